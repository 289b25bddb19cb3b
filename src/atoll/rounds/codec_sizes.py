"""What values take in each codec, and which codec means have. Without numpy, because planning needs it too.

The codecs say the same of themselves; a test compares.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.errors import UnknownName

_SIZES: dict[str, Callable[[int], int]] = {
    "fp32": lambda count: 4 * count,
    "bf16": lambda count: 2 * count,
    "int8": lambda count: 2 * -(-count // 256) + count,
    "int4": lambda count: 2 * -(-count // 128) + -(-count // 2),
}
_MEANS = {"int4": "int8"}


def check_name(name: str) -> None:
    """Raise `UnknownName` if there is no such codec."""
    if name not in _SIZES:
        raise UnknownName("codec", name, list(_SIZES))


def encoded_bytes(name: str, count: int) -> int:
    """Bytes that `count` values take."""
    check_name(name)
    return _SIZES[name](count)


def recommended_mean(name: str) -> str:
    """The codec for published means when updates have this one and nobody chose.

    The error of an update is halved by averaging and can be fed back; that of the mean is neither.
    """
    check_name(name)
    return _MEANS.get(name, name)
