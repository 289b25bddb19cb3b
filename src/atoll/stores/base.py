"""The Store port: whole objects by key, and the rules that every adapter keeps (S1-S15).

Optional abilities, such as `open_body`, are in `atoll.stores.fast`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from atoll.errors import BadKey

Buffer: TypeAlias = bytes | bytearray | memoryview


Data: TypeAlias = Buffer | Sequence[Buffer]
"""What `put` and `create` take: one buffer, or several that become one object without being joined first."""

_MAX_KEY_BYTES = 900  # S3 and GCS allow 1 024 with our prefix in front
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")
_ODD_PART = re.compile(r"(?:^|/)\.{0,2}(?:/|$)", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_PART_BYTES = 240  # file systems allow 255 for a name, Azure 254 for a segment


@runtime_checkable
class Store(Protocol):
    """Whole objects by key. Readers never see half an object.

    S1   bytes come back as they were written, whatever the size.
    S2   a missing key raises `KeyNotFound`, which names it.
    S3   a reader sees the old object or the new one, never part of either.
    S4   of many racing `create`s of one key exactly one wins; the others get `KeyExists`.
    S5   `create` works again after `delete`; deleting twice is quiet.
    S6   `list` is sorted, complete past 1 000 keys, and its prefix is exact.
    S7   what was written is visible at once, also from another process.
    S8   unicode keys work; empty, absolute and `..` keys raise `BadKey`.
    S9   two prefixes of one store do not leak into each other.
    S10  `open_store(store.uri)` is the same store.
    S11  refusal, throttling and silence are typed errors; a racing 409 is retried, 412 is `KeyExists`.
    S12  a `create` whose answer was lost is not misread as a loss.
    S13  `get` takes a range.
    S14  nothing that reads the store unpickles anything.
    S15  `open_body` gives the same bytes piece by piece: of one object, even if it is replaced or deleted meanwhile.
    """

    uri: str

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        """The object, or `length` bytes of it from `start`. A range past the end gives what there is. (S1 S2 S13)"""
        ...

    def put(self, key: str, data: Data) -> None:
        """Write the object; the last write wins. (S3)"""
        ...

    def create(self, key: str, data: Data) -> None:
        """Write the object only if the key is free; the first write wins. (S4 S12)"""
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Every key that starts with `prefix`, sorted. (S6)"""
        ...

    def delete(self, key: str) -> None:
        """Remove the object. Quiet if there is none. (S5)"""
        ...


def check_key(key: str) -> str:
    """Return the key, or raise `BadKey` saying which rule it breaks. (S8)"""
    if not isinstance(key, str) or not key:
        raise BadKey(str(key), "a key is a non-empty text")
    if key.startswith("/") or key.endswith("/"):
        raise BadKey(key, "a key neither starts nor ends with `/`")
    if _ODD_PART.search(key):
        raise BadKey(key, "no part of a key is empty, `.` or `..`")
    return _checked_text(key)


def check_prefix(prefix: str) -> str:
    """Return the prefix, or raise `BadKey` if no key could ever start with it. Only its last part may be unfinished."""
    if not isinstance(prefix, str):
        raise BadKey(str(prefix), "a prefix is a text")
    if any(part in ("", ".", "..") for part in prefix.split("/")[:-1]):
        raise BadKey(prefix, "no finished part of a prefix is empty, `.` or `..`")
    return _checked_text(prefix)


def check_range(start: int, length: int | None) -> None:
    """Raise `ValueError` for a range that counts backwards. (S13)"""
    if start < 0 or (length is not None and length < 0):
        raise ValueError(f"a range has no negative numbers: start={start}, length={length}")


def pieces(data: Data) -> list[memoryview]:
    """`data` as flat byte views, without copying."""
    parts = [data] if isinstance(data, bytes | bytearray | memoryview) else list(data)
    return [memoryview(part).cast("B") for part in parts]


def _checked_text(text: str) -> str:
    if _FORBIDDEN.search(text):
        raise BadKey(text, "a key has no control characters and no backslash")
    if text.isascii() and len(text) <= _MAX_PART_BYTES:
        return text
    if _SURROGATE.search(text) or len(text.encode()) > _MAX_KEY_BYTES:
        raise BadKey(text, f"a key is valid UTF-8 of at most {_MAX_KEY_BYTES} bytes")
    if any(len(part.encode()) > _MAX_PART_BYTES for part in text.split("/")):
        raise BadKey(text, f"no part of a key is longer than {_MAX_PART_BYTES} bytes")
    return text
