"""Stores whose bodies break clause S15, each in a way of its own."""

from __future__ import annotations

from urllib.parse import unquote_plus

from atoll.errors import KeyNotFound
from atoll.stores.base import Store, check_key
from atoll.stores.fast import Body, BufferBody
from atoll.stores.memory import MemoryStore


class OpensBodies(MemoryStore):
    """A store with bodies of its own, broken in one way by each subclass."""

    def open(self, key: str) -> Body:
        return BufferBody(self.get(key))


class GivesTheFirstMegabyte(OpensBodies):
    def open(self, key: str) -> Body:
        return BufferBody(self.get(key, length=1 << 20))


class GivesTheNextPieceTwice(OpensBodies):
    """Goes back to the beginning for each piece."""

    def open(self, key: str) -> Body:
        whole = self.get(key)
        body = BufferBody(whole)
        body.readinto = lambda buffer: BufferBody(whole).readinto(buffer)  # type: ignore[method-assign]
        return body


class TakesTheSizeForGranted(OpensBodies):
    def open(self, key: str) -> Body:
        body = BufferBody(self.get(key))
        body.size += 1
        return body


class UnquotesKeys(OpensBodies):
    def open(self, key: str) -> Body:
        return BufferBody(self.get(unquote_plus(key)))


class OpensWhatIsNotThere(OpensBodies):
    def open(self, key: str) -> Body:
        return BufferBody(self._objects.by_key.get(check_key(key), b""))


class OpensAnyKey(OpensBodies):
    def open(self, key: str) -> Body:
        return BufferBody(self._objects.by_key.get(key, b""))


class FillsUpWithZeros(OpensBodies):
    def open(self, key: str) -> Body:
        body = BufferBody(self.get(key))
        padded = BufferBody(bytes(self.get(key)) + bytes(100_000))
        padded.size = body.size
        return padded


class StaysOpen(OpensBodies):
    def open(self, key: str) -> Body:
        body = BufferBody(self.get(key))
        body.close = lambda: None  # type: ignore[method-assign]
        return body


class _AsksForEachPiece:
    """The usual mistake: one ranged `get` after the other, of whatever object has the key then."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self._at = store, key, 0
        self.size = len(store.get(key))

    def readinto(self, buffer: memoryview) -> None:
        try:
            found = self._store.get(self._key, start=self._at, length=len(buffer))
        except KeyNotFound:
            found = bytes(len(buffer))
        buffer[:], self._at = found, self._at + len(buffer)

    def close(self) -> None:
        pass


class AsksForEachPiece(OpensBodies):
    def open(self, key: str) -> Body:
        return _AsksForEachPiece(self, key)


class HasOneBodyAtATime(OpensBodies):
    """One buffer for whatever is being read."""

    def open(self, key: str) -> Body:
        self.current = BufferBody(self.get(key))
        body = BufferBody(self.get(key))
        body.readinto = lambda buffer: self.current.readinto(buffer)  # type: ignore[method-assign]
        return body
