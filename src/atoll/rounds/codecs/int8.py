"""`int8`: blocks of 256 values, each a whole multiple (-127 to 127) of the block's scale. 1.008 bytes for each value.

Payload: for n values, ceil(n / 256) scales as bfloat16 little-endian, then n codes as signed bytes in order.
Value i is code i times scale i // 256. Error: half the scale of the block, which is about 1/254 of its largest
magnitude; a block with none above 3.8e-34 becomes zeros. How scales and codes are found: `codec_blocks`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.rounds.codecs.base import F32
from atoll.rounds.codecs.blocks import BlockCodec


class Int8(BlockCodec):
    """One byte for each value."""

    name = "int8"
    block = 256
    levels = 127
    top = 129 / 128 * 2.0**121
    largest = levels * top

    def code_bytes(self, count: int) -> int:
        return count

    def pack(self, codes: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
        np.copyto(out.view(np.int8), codes, casting="unsafe")

    def unpack(self, packed: NDArray[np.uint8], out: F32) -> None:
        np.copyto(out, packed.view(np.int8))


CODEC = Int8()
