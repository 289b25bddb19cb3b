"""Checks that a store keeps the clause on which rounds depend: of many `create`s of one key, one succeeds.

Some services accept the condition and ignore it. The probe refuses such a store before a run uses it.
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
    """The checks that passed, in words."""

    uri: str
    checks: tuple[str, ...]


def probe(store: Store, *, writers: int = 16) -> ProbeReport:
    """Check everything that a run needs of the store; raise `StoreError` for the first check that fails.

    Sends a few dozen requests and deletes its objects.
    """
    checks = ["create refuses an existing key"]
    probe_create(store)
    with _probe_folder(store) as folder:
        _race(store, f"{folder}/race", writers)
        checks.append(f"of {writers} concurrent creates one succeeds")
        _visible(store, folder)
        checks.append("written objects are read and listed at once, deleted objects are not")
        _whole(store, f"{folder}/whole")
        checks.append("a reader never sees part of an object")
    return ProbeReport(store.uri, tuple(checks))


def probe_create(store: Store) -> None:
    """The short form: `create` a key twice and expect a refusal. Sends a few requests."""
    with _probe_folder(store) as folder:
        key = f"{folder}/twice"
        store.create(key, b"first")
        try:
            store.create(key, b"second")
        except KeyExists:
            pass
        else:
            raise _refusal(store, "overwrites", "a second `create` of the same key was accepted")
        # Three reads, because one corrupted response must not condemn the store.
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
        raise _refusal(store, "race", f"{len(winners)} of {writers} concurrent creates succeeded")
    if bytes(store.get(key)) != winners[0].encode():
        raise _refusal(store, "race", "the object is not that of the successful `create`")


def _visible(store: Store, folder: str) -> None:
    keys = [f"{folder}/seen/{i}" for i in range(3)]
    for key in keys:
        store.put(key, key.encode())
    if any(bytes(store.get(key)) != key.encode() for key in keys):
        raise _refusal(store, "not_read", "a written object was not read back at once")
    if list(store.list(f"{folder}/seen/")) != keys:
        raise _refusal(store, "not_listed", "written objects were not listed at once")
    store.delete(keys[0])
    with suppress(KeyNotFound):
        store.get(keys[0])
        raise _refusal(store, "still_read", "a deleted object was still read")
    if list(store.list(f"{folder}/seen/")) != keys[1:]:
        raise _refusal(store, "still_listed", "a deleted object was still listed")


def _whole(store: Store, key: str) -> None:
    """Read during writes. Not a proof, but it finds stores that write in place."""
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
def _probe_folder(store: Store) -> Iterator[str]:
    folder = f"{PROBE_PREFIX}/{uuid.uuid4().hex}"
    try:
        yield folder
    finally:
        with suppress(StoreError):
            for key in list(store.list(f"{folder}/")):
                store.delete(key)


def _refusal(store: Store, reason: str, what: str) -> StoreError:
    return StoreError(
        f"cannot use {store.uri}: {what}",
        uri=store.uri,
        reason=reason,
        hint="replicas need an atomic `create`; use a store with conditional writes, such as S3, GCS, Azure, "
        "SeaweedFS, or a folder that every replica mounts",
    )
