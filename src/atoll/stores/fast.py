"""Optional abilities of stores: large objects without copies, sizes of objects, and requests with a shorter timeout.

A store with the method has the ability. For any other store the functions here use the five methods of the port.
The clauses of the contract (S1-S15) hold either way.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn, Protocol, overload, runtime_checkable

from atoll.errors import StoreUnavailable
from atoll.stores.base import Buffer, Data, Store, pieces


@runtime_checkable
class RetryLimited(Protocol):
    """A store with its own retries, whose duration the caller can limit."""

    def with_retry_timeout(self, seconds: float) -> Store:
        """The same store, whose requests fail after about `seconds` without success."""
        ...


@runtime_checkable
class Recycling(Protocol):
    """A store that can reuse the space of deleted objects, which is faster than new space."""

    @property
    def recycles(self) -> bool: ...


def recycles(store: Store) -> bool:
    """Whether the store reuses the space of deleted objects, so that a late reader may see other bytes."""
    return getattr(store, "recycles", False) is True  # `isinstance` with a protocol takes longer than deleting a file


@runtime_checkable
class SizeLister(Protocol):
    """A store that lists objects with their sizes as cheaply as without."""

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Every key that starts with `prefix`, sorted, with the bytes of the object."""
        ...


def list_sizes(store: Store, prefix: str = "") -> Iterator[tuple[str, int | None]]:
    """Every key that starts with `prefix`, sorted, with the bytes of the object; None if the store cannot say."""
    if isinstance(store, SizeLister):
        yield from store.list_sizes(prefix)
    else:
        yield from ((key, None) for key in store.list(prefix))


class Body(Protocol):
    """An object that is read from its beginning. For one thread at a time."""

    size: int

    def readinto(self, buffer: memoryview) -> None:
        """Fill the buffer with the next bytes, or raise `StoreUnavailable`, with the buffer in an undefined state."""
        ...

    def close(self) -> None:
        """Release the object, read or not. May be called twice."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A store that reads an object piece by piece into the caller's memory."""

    def open(self, key: str) -> Body:
        """Begin to read an object. (S2 S15)"""
        ...


class Descriptor(NamedTuple):
    """The open file or socket with the next bytes of a body. It stays open until the body is closed."""

    file: int
    ready: memoryview = memoryview(b"")
    """Bytes that were read from it already; they come first."""
    is_socket: bool = False
    """A socket, with its own timeout; otherwise a file."""
    is_huge: bool = False
    """A file in huge pages: mapping it is faster than reading it, and it never becomes shorter."""


class DescriptorBody(ABC):
    """A `Body` whose descriptor compiled code can read."""

    @abstractmethod
    def descriptor(self) -> Descriptor | None:
        """The descriptor, or None if this body must be read by `readinto`."""

    @abstractmethod
    def was_read(self, count: int) -> None:
        """Record that compiled code has read `count` more bytes."""

    @abstractmethod
    def was_cut(self, error: OSError | None) -> NoReturn:
        """Raise `StoreUnavailable`: compiled code got `error`, or None at an early end of the bytes."""


class BufferBody:
    """A `Body` of an object in memory."""

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


def with_retry_timeout(store: Store, seconds: float) -> Store:
    """The store with its own retries, if any, limited to about `seconds`."""
    return store.with_retry_timeout(seconds) if isinstance(store, RetryLimited) else store


class HashedWhileWritten(Sequence[Buffer]):
    """Data of two buffers, a front and a payload, whose front depends on the payload, such as a header with a hash.

    A store that can write in any order writes the payload first and calls `hash_and_norm` for each part, so that memory
    is read once. For any other store this is a sequence of two buffers.
    """

    front_bytes: int
    """A multiple of 1 KiB."""
    payload: memoryview

    @abstractmethod
    def hash_and_norm(self, start: int, stop: int, out: memoryview | None = None) -> None:
        """Hash these bytes of the payload, and copy them to `out` if given. From 0 on, in steps of whole KiB."""

    def write_hashed(self, fd: int, start: int, stop: int, step: int) -> None:
        """Hash these bytes and write them to their position in a file, in steps that end at multiples of `step`."""
        while start < stop:
            some = self.payload[start : min(stop, start + step - (self.front_bytes + start) % step)]
            self.hash_and_norm(start, start + len(some))
            while some:
                written = os.pwrite(fd, some, self.front_bytes + start)
                some, start = some[written:], start + written

    @abstractmethod
    def front(self) -> Buffer:
        """The front. Hashes the rest of the payload first."""

    @property
    def nbytes(self) -> int:
        return self.front_bytes + len(self.payload)

    def __len__(self) -> int:
        return 2

    @overload
    def __getitem__(self, index: int) -> Buffer: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Buffer]: ...

    def __getitem__(self, index: int | slice) -> Buffer | Sequence[Buffer]:
        return (self.front(), self.payload)[index]

    def __iter__(self) -> Iterator[Buffer]:
        yield self.front()
        yield self.payload


def size_of(data: Data) -> int:
    """The number of bytes; for a `HashedWhileWritten`, without computing its front."""
    return data.nbytes if isinstance(data, HashedWhileWritten) else sum(map(len, pieces(data)))
