"""See for oneself that a store keeps the promise everything rests on: of many `create`s of one key, one wins.

Some services accept the condition and ignore it. Such a store is refused, with the reason, before anything depends
on it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Barrier, Event

from atoll.errors import KeyExists, KeyNotFound, StoreError
from atoll.stores.base import Store

PROBE_PREFIX = ".atoll-probe"
_TORN_BYTES = 1 << 20


@dataclass(frozen=True)
class ProbeReport:
    """What was seen to hold, in words."""

    uri: str
    checks: tuple[str, ...]


def probe(store: Store, *, writers: int = 16) -> ProbeReport:
    """Try everything a run needs of the store; raise `StoreError` with the first thing that does not hold.

    Takes a few dozen requests and leaves nothing behind.
    """
    checks = ["create refuses a taken key"]
    probe_create(store)
    with _own_corner(store) as corner:
        _race(store, f"{corner}/race", writers)
        checks.append(f"of {writers} racing creates one wins")
        _visible(store, corner)
        checks.append("what was written is read and listed at once, what was deleted is gone")
        _whole(store, f"{corner}/whole")
        checks.append("a reader never sees part of an object")
    return ProbeReport(store.uri, tuple(checks))


def probe_create(store: Store) -> None:
    """The short form: `create` twice, and expect a refusal. A handful of requests."""
    with _own_corner(store) as corner:
        key = f"{corner}/twice"
        store.create(key, b"first")
        try:
            store.create(key, b"second")
        except KeyExists:
            pass
        else:
            raise _refusal(store, "overwrites", "a second `create` of the same key was accepted")
        # More than one look: an answer spoilt on its way must not condemn the store.
        if all(bytes(store.get(key)) != b"first" for _ in range(3)):
            raise _refusal(store, "overwrites_when_refused", "a `create` that was refused changed the object")


def _race(store: Store, key: str, writers: int) -> None:
    gate = Barrier(writers)

    def write(name: str) -> str | None:
        gate.wait()
        try:
            store.create(key, name.encode())
        except KeyExists:
            return None
        return name

    with ThreadPoolExecutor(writers) as pool:
        winners = [name for name in pool.map(write, map(str, range(writers))) if name is not None]
    if len(winners) != 1:
        raise _refusal(store, "race", f"{len(winners)} of {writers} racing creates won")
    if bytes(store.get(key)) != winners[0].encode():
        raise _refusal(store, "race", "the object is not the one the winner of a race wrote")


def _visible(store: Store, corner: str) -> None:
    keys = [f"{corner}/seen/{i}" for i in range(3)]
    for key in keys:
        store.put(key, key.encode())
    if any(bytes(store.get(key)) != key.encode() for key in keys):
        raise _refusal(store, "not_read", "an object just written was not read back")
    if list(store.list(f"{corner}/seen/")) != keys:
        raise _refusal(store, "not_listed", "objects just written were not listed")
    store.delete(keys[0])
    with suppress(KeyNotFound):
        store.get(keys[0])
        raise _refusal(store, "still_read", "an object just deleted was still read")
    if list(store.list(f"{corner}/seen/")) != keys[1:]:
        raise _refusal(store, "still_listed", "an object just deleted was still listed")


def _whole(store: Store, key: str) -> None:
    """Read while someone writes. Not a proof, but it finds the stores that write in place."""
    versions = [letter * _TORN_BYTES for letter in (b"a", b"b")]
    store.put(key, versions[0])
    is_over = Event()

    def read() -> bool:
        seen = True
        while not is_over.is_set() and seen:
            try:
                seen = bytes(store.get(key)) in versions
            except KeyNotFound:
                seen = False
        return seen

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            for i in range(6):
                store.put(key, versions[i % 2])
        finally:
            is_over.set()
        if not reader.result():
            raise _refusal(store, "torn", "a reader saw part of an object")


@contextmanager
def _own_corner(store: Store) -> Iterator[str]:
    corner = f"{PROBE_PREFIX}/{uuid.uuid4().hex}"
    try:
        yield corner
    finally:
        with suppress(StoreError):
            for key in list(store.list(f"{corner}/")):
                store.delete(key)


def _refusal(store: Store, reason: str, what: str) -> StoreError:
    return StoreError(
        f"cannot use {store.uri}: {what}",
        uri=store.uri,
        reason=reason,
        hint="replicas agree by atomic `create`; use a store that honours conditional writes, such as S3, GCS, Azure, "
        "SeaweedFS, or a folder that every replica mounts",
    )
