"""The codecs by name, one row each, and the default codec. No numpy: `atoll estimate` runs on the core install.

To add a codec, write a module that has it as `CODEC` (the port is `atoll.rounds.codecs.base.Codec`) and add its row to
`CODECS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.errors import UnknownName


@dataclass(frozen=True)
class CodecRow:
    """Where a codec is, and what planning needs to know of it."""

    module: str
    """The module that has the codec as `CODEC`; imported when the codec is first used."""
    encoded_bytes: Callable[[int], int]
    """From a number of values to the bytes they take: always the same for a number."""
    recommended_mean: str | None = None
    """The codec of published means when updates have this one and the caller chose none. None: this one.

    Averaging halves the error of an update, and error feedback returns it; the error of the mean stays.
    """


CODECS = {
    "fp32": CodecRow("atoll.rounds.codecs.fp32", lambda count: 4 * count),
    "bf16": CodecRow("atoll.rounds.codecs.bf16", lambda count: 2 * count),
    "int8": CodecRow("atoll.rounds.codecs.int8", lambda count: 2 * -(-count // 256) + count),
    "int4": CodecRow("atoll.rounds.codecs.int4", lambda count: 2 * -(-count // 128) + -(-count // 2), "int8"),
}
DEFAULT_CODEC = "int8"
"""How updates travel unless the caller chooses: it trains as well as `fp32` with a quarter of the bytes."""
EXACT_CODEC = "fp32"
"""The default where the values themselves are averaged and every bit counts: averaging of weights, and torchft."""


def row_of(name: str) -> CodecRow:
    """The row of a codec, or `UnknownName`."""
    row = CODECS.get(name)
    if row is None:
        raise UnknownName("codec", name, list(CODECS))
    return row


def encoded_bytes(name: str, count: int) -> int:
    """Bytes that `count` values take."""
    return row_of(name).encoded_bytes(count)


def recommended_mean(name: str) -> str:
    """The codec of published means when updates have this one and the caller chose none."""
    return row_of(name).recommended_mean or name
