"""Libraries that were compiled when Atoll was installed, if there was a compiler, and what C needs to know of an array.

A library is used only if it was built from the source that lies beside it. `ATOLL_PURE=1` does without.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Mapping
from ctypes import CDLL, addressof, c_char, c_char_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

Functions: TypeAlias = Mapping[str, tuple[Any, ...]]
"""By name: what each gives, then what it takes."""


class NotUsable(Exception):
    """Why a library is done without."""


class NotBuilt(NotUsable):
    """There is none that fits this machine and this source: installing Atoll again may bring one."""


def opened(library: Path, source: Path, functions: Functions) -> CDLL:
    """The library with these functions, or `NotUsable`."""
    if os.environ.get("ATOLL_PURE", "") not in ("", "0"):
        raise NotUsable("ATOLL_PURE is set")
    if sys.byteorder != "little":
        raise NotUsable("the library is for little-endian machines")
    if not library.is_file():
        raise NotBuilt(f"there is no {library.name}: no C compiler built it when Atoll was installed")
    try:
        wanted = hashlib.sha256(source.read_bytes()).hexdigest()
        found = ctypes.CDLL(str(library))
        for name, (result, *arguments) in {"atoll_source": (c_char_p,), **functions}.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as exc:
        raise NotBuilt(f"{library.name} does not load here: {exc}") from exc
    if found.atoll_source().decode(errors="replace") != wanted:
        raise NotBuilt(f"{library.name} was built from another {source.name}")
    return found


def address_of(array: NDArray[Any], dtype: type[Any]) -> int:
    """Where a contiguous array begins. C would not ask what it is."""
    assert array.flags.c_contiguous and array.dtype == dtype  # noqa: PT018
    if array.flags.writeable and array.size:
        # A quarter of the time, but only of what can be written.
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    address: int = array.__array_interface__["data"][0]
    return address


def room_of(array: NDArray[Any], dtype: type[Any]) -> int:
    """The same of one that is written to."""
    assert array.flags.writeable
    return address_of(array, dtype)
