"""The Store port: whole objects by key, and the rules that every adapter keeps (S1-S15)."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn, Protocol, TypeAlias, runtime_checkable

from atoll.errors import BadKey, StoreUnavailable

Buffer: TypeAlias = bytes | bytearray | memoryview


class Unsealed(ABC):
    """A front and a payload, to be written one after the other; what the front says is known when the payload was seen.

    A store that can write in any order looks at the payload while it writes it, and the bytes are fetched from memory
    once. For any other this is two buffers.
    """

    front_bytes: int
    """A multiple of 1 KiB."""
    payload: memoryview

    @abstractmethod
    def look(self, start: int, stop: int, room: memoryview | None = None) -> None:
        """See these bytes of the payload, and copy them to `room` if there is one. From 0 on, in steps of whole KiB."""

    def pour(self, fd: int, start: int, stop: int, step: int) -> None:
        """See these bytes, and write them to their place in a file, in steps that end at multiples of `step`."""
        while start < stop:
            some = self.payload[start : min(stop, start + step - (self.front_bytes + start) % step)]
            self.look(start, start + len(some))
            while some:
                written = os.pwrite(fd, some, self.front_bytes + start)
                some, start = some[written:], start + written

    @abstractmethod
    def front(self) -> Buffer:
        """The first bytes; all of the payload is seen now if it was not."""

    @property
    def nbytes(self) -> int:
        return self.front_bytes + len(self.payload)

    def __iter__(self) -> Iterator[Buffer]:
        yield self.front()
        yield self.payload


Data: TypeAlias = Buffer | Sequence[Buffer] | Unsealed
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


@runtime_checkable
class Patient(Protocol):
    """A store that asks again by itself, and can be told for how long."""

    def with_patience(self, seconds: float) -> Store:
        """The same store; a request that gets no good answer is given up after about `seconds`, and not much later."""
        ...


@runtime_checkable
class Recycling(Protocol):
    """A store that can write new objects into the space of deleted ones, which is faster than fresh space."""

    @property
    def recycles(self) -> bool: ...


def recycles(store: Store) -> bool:
    """Whether the space of what is deleted is written again, so that a late reader may find other bytes there."""
    return getattr(store, "recycles", False) is True  # `isinstance` with a protocol takes longer than deleting a file


class Body(Protocol):
    """An object that is being read from its beginning. For one thread at a time."""

    size: int

    def readinto(self, buffer: memoryview) -> None:
        """Fill the buffer with the next bytes. `StoreUnavailable` if they stay out; the buffer is of no use then."""
        ...

    def close(self) -> None:
        """Let go of it, read or not. May be called twice."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A store that hands over large objects piece by piece, in memory of the reader's choice."""

    def open(self, key: str) -> Body:
        """Begin to read an object. (S2 S15)"""
        ...


class Descriptor(NamedTuple):
    """Where the next bytes of a body come from, just as they are: something open, which stays so until it is closed."""

    file: int
    ready: memoryview = memoryview(b"")
    """What has been taken from there already, and comes first."""
    is_socket: bool = False
    """To be waited for, as long as the socket has been told to wait; else it is a file."""
    is_huge: bool = False
    """A file that is better looked at where it lies, and will not get shorter."""


class Straight(ABC):
    """A `Body` that compiled code may read by itself, which spares the interpreter."""

    @abstractmethod
    def descriptor(self) -> Descriptor | None:
        """None if it has to be read by `readinto` after all."""

    @abstractmethod
    def was_read(self, count: int) -> None:
        """So many bytes more have been read."""

    @abstractmethod
    def was_cut(self, error: OSError | None) -> NoReturn:
        """They could not be read, for this reason, or because there are no more. Raises `StoreUnavailable`."""


class BufferBody:
    """An object that is in memory already."""

    def __init__(self, data: Buffer) -> None:
        self._left = memoryview(data).cast("B")
        self.size = len(self._left)

    def readinto(self, buffer: memoryview) -> None:
        if len(buffer) > len(self._left):
            raise StoreUnavailable(f"an object of {self.size} bytes ended early", reason="cut")
        buffer[:] = self._left[: len(buffer)]
        self._left = self._left[len(buffer) :]

    def close(self) -> None:
        self._left = memoryview(b"")


def open_body(store: Store, key: str) -> Body:
    """Begin to read an object, piece by piece if the store can. (S15)"""
    opened = getattr(store, "open", None)  # `isinstance` with a protocol takes longer than opening a file
    body: Body = BufferBody(store.get(key)) if opened is None else opened(key)
    return body


def with_patience(store: Store, seconds: float) -> Store:
    """The store, with no more patience than this if it has any of its own."""
    return store.with_patience(seconds) if isinstance(store, Patient) else store


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


def size_of(data: Data) -> int:
    """How many bytes that is."""
    return data.nbytes if isinstance(data, Unsealed) else sum(map(len, pieces(data)))


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
