"""Clause S15 of the Store contract: objects read piece by piece. Part of `StoreContract`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle

import pytest

from atoll.errors import BadKey, KeyNotFound, StoreUnavailable
from atoll.stores.base import Buffer, Store
from atoll.stores.fast import Body, Unsealed, open_body, recycles

BIG = 8 * 1024 * 1024 + 1
_MIDDLE = 3_000_001  # more than a socket's buffers hold, so that most of it is still on its way when it is opened
_STEPS = (1, 7, 4096, 0, 100_003, 65_536, 1_500_000)


class BodyClauses:
    """Methods that take the store as an argument, like the others of `StoreContract`."""

    @pytest.mark.parametrize("size", [0, 1, 4097, BIG])
    def test_s15_a_body_is_what_get_gives(self, store: Store, size: int) -> None:
        data = pattern(size)
        store.put("a/b.bin", data)
        with closing(open_body(store, "a/b.bin")) as body:
            assert body.size == size
            assert read_unevenly(body) == data == bytes(store.get("a/b.bin"))

    @pytest.mark.parametrize(
        "key", ["café/naïve.txt", "日本語/文.json", "a b+c%20d&e=f?g#h", "quote'\"`$(x);|<>*", "~"]
    )
    def test_s15_unusual_keys_are_opened(self, store: Store, key: str) -> None:
        store.put(key, key.encode())
        with closing(open_body(store, key)) as body:
            assert read_unevenly(body) == key.encode()

    def test_s15_a_missing_key_names_itself(self, store: Store) -> None:
        store.put("there/is.bin", b"x")
        for key in ("there/is-not.bin", "there", "there/is.bin/below", "nowhere/at/all"):
            with pytest.raises(KeyNotFound) as caught:
                open_body(store, key)
            assert caught.value.key == key
            assert key in str(caught.value)

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "..", "a/../b", "a\\b", "a\nb", "x" * 241])
    def test_s15_bad_keys_are_not_opened(self, store: Store, key: str) -> None:
        with pytest.raises(BadKey):
            open_body(store, key)

    @pytest.mark.parametrize("read", [0, 1, 10_000])
    def test_s15_nothing_is_read_past_the_end(self, store: Store, read: int) -> None:
        store.put("a.bin", pattern(10_000))
        with closing(open_body(store, "a.bin")) as body:
            body.readinto(memoryview(bytearray(read)))
            with pytest.raises(StoreUnavailable):
                body.readinto(memoryview(bytearray(10_001 - read)))

    @pytest.mark.parametrize("read", [0, 5, _MIDDLE])
    def test_s15_a_body_may_be_closed_at_any_time_and_twice(self, store: Store, read: int) -> None:
        data = pattern(_MIDDLE)
        store.put("a.bin", data)
        for _ in range(3):
            body = open_body(store, "a.bin")
            body.readinto(memoryview(bytearray(read)))
            body.close()
            body.close()
            with pytest.raises(StoreUnavailable):
                body.readinto(memoryview(bytearray(1)))
        with closing(open_body(store, "a.bin")) as again:
            assert read_unevenly(again) == data
        assert bytes(store.get("a.bin")) == data

    @pytest.mark.parametrize("read", [0, 100_000])
    def test_s15_a_body_is_of_one_object_though_it_is_replaced(self, store: Store, read: int) -> None:
        old, new = pattern(_MIDDLE), bytes(_MIDDLE)
        store.put("a.bin", old)
        with closing(open_body(store, "a.bin")) as body:
            front = bytearray(read)
            body.readinto(memoryview(front))
            store.put("a.bin", new)
            assert _rest_or_nothing(body, len(front), old) in (old[read:], None)
        with closing(open_body(store, "a.bin")) as body:
            assert read_unevenly(body) == new

    def test_s15_a_body_is_of_one_object_though_it_is_deleted(self, store: Store) -> None:
        old = pattern(_MIDDLE)
        store.put("a.bin", old)
        with closing(open_body(store, "a.bin")) as body:
            store.delete("a.bin")
            if not recycles(store):  # which says that it may give other bytes then
                store.put("b.bin", bytes(_MIDDLE))
            assert _rest_or_nothing(body, 0, old) in (old, None)
        with pytest.raises(KeyNotFound):
            open_body(store, "a.bin")

    def test_s15_bodies_do_not_mix(self, store: Store) -> None:
        """Some in each thread, and several threads."""
        objects = {f"{i}.bin": bytes([i]) * (500_000 + i) for i in range(12)}
        for key, data in objects.items():
            store.put(key, data)

        def read_three(first: int) -> bool:
            keys = [f"{i}.bin" for i in range(first, first + 3)]
            bodies = [open_body(store, key) for key in keys]
            found = [bytearray() for _ in keys]
            for start in range(0, 600_000, 100_000):
                for body, data in zip(bodies, found, strict=True):
                    piece = bytearray(max(0, min(100_000, body.size - start)))
                    body.readinto(memoryview(piece))
                    data += piece
            for body in bodies:
                body.close()
            return [bytes(data) for data in found] == [objects[key] for key in keys]

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read_three, [0, 3, 6, 9] * 3))


def pattern(size: int) -> bytes:
    """Bytes in which any two places differ, so that a shifted read shows."""
    return b"".join(i.to_bytes(4, "big") for i in range(size // 4 + 1))[:size]


def read_unevenly(body: Body, read: int = 0) -> bytes:
    """What is left of a body, in pieces of many sizes."""
    room = memoryview(bytearray(body.size - read))
    for piece in _cut(room):
        body.readinto(piece)
    return bytes(room)


def _cut(room: memoryview) -> Iterator[memoryview]:
    for step in cycle(_STEPS):
        if not room:
            return
        yield room[:step]
        room = room[step:]


def _rest_or_nothing(body: Body, read: int, old: bytes) -> bytes | None:
    """The rest of the body; None if the store says that it cannot be had."""
    assert body.size == len(old)
    try:
        return read_unevenly(body, read)
    except StoreUnavailable:
        return None


class Counted(Unsealed):
    """A payload after a front that says how many of its bytes were seen."""

    front_bytes = 1024

    def __init__(self, payload: bytes) -> None:
        self.payload = memoryview(payload)
        self._seen = 0

    def look(self, start: int, stop: int, room: memoryview | None = None) -> None:
        self._seen = stop if start in (0, self._seen) else -1
        if room is not None:
            room[:] = self.payload[start:stop]

    def front(self) -> Buffer:
        if self._seen == 0:
            self.look(0, len(self.payload))
        return f"{self._seen:>{self.front_bytes}}".encode()
