"""`int4`: blocks of 128 values, each a whole multiple (-7 to 7) of the block's scale. 0.516 bytes for each value.

Payload: for n values, ceil(n / 128) scales as bfloat16 little-endian, then the codes as four-bit two's complement,
two in a byte. Each group of 2048 values takes 1024 bytes: byte j has code j of the group in its low half and code
1024 + j in its high half. In a last group of m values it is codes j and ceil(m / 2) + j, and 0 where there is no such.
Value i is code i times scale i // 128. Error: half the scale of the block, which is about 1/14 of its largest
magnitude; a block with none above 2.1e-35 becomes zeros. So coarse a codec wants error feedback. More: `codec_blocks`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.rounds.codecs.base import F32
from atoll.rounds.codecs.blocks import BlockCodec

_GROUP = 2048  # long runs, so that halves are joined and parted at full speed
_SIGNS = 0x88


class Int4(BlockCodec):
    """Half a byte for each value."""

    name = "int4"
    block = 128
    levels = 7
    offset = 8  # codes are positive while they are joined, so that no sign runs into the other half
    unit = 1 / 16  # they come back shifted to the upper half of a signed byte
    top = 146 / 128 * 2.0**125
    largest = levels * top
    needs_feedback = True

    def code_bytes(self, count: int) -> int:
        return -(-count // 2)

    def pack(self, codes: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
        whole = codes.size // _GROUP * _GROUP
        groups, last = codes[:whole].reshape(-1, 2, _GROUP // 2), codes[whole:]
        low, high = groups[:, 0], groups[:, 1]
        _join(low, high, out[: whole // 2].reshape(low.shape))
        half = -(-last.size // 2)
        paired = last.size - half
        _join(last[:paired], last[half:], out[whole // 2 : whole // 2 + paired])
        if paired < half:
            out[-1] = (int(last[paired]) & 0xF) ^ (_SIGNS & 0xF)

    def unpack(self, packed: NDArray[np.uint8], out: F32) -> None:
        whole = out.size // _GROUP * _GROUP
        groups, last = out[:whole].reshape(-1, 2, _GROUP // 2), out[whole:]
        low, high = groups[:, 0], groups[:, 1]
        _part(packed[: whole // 2].reshape(low.shape), low, high)
        half = -(-last.size // 2)
        _part(packed[whole // 2 :], last[:half], last[half:])


def _join(low: NDArray[np.int32], high: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
    np.left_shift(high, 4, out=high)
    np.add(high, low, out=high)
    np.copyto(out, high, casting="unsafe")
    np.bitwise_xor(out, _SIGNS, out=out)


def _part(packed: NDArray[np.uint8], low: F32, high: F32) -> None:
    shifted = np.left_shift(packed, 4)
    np.copyto(low, shifted.view(np.int8))
    np.bitwise_and(packed, 0xF0, out=shifted)
    np.copyto(high, shifted.view(np.int8)[..., : high.shape[-1]])


CODEC = Int4()
