"""Exchanges by name: every rank gives its part under a name, and gets everybody's parts, in rank order.

client = NamedClient(store, "round-7", rank, world_size)
parts = client.exchange("grads", part)      # blocks; one part from each rank
"""

from __future__ import annotations

import os
import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakValueDictionary

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import ConfigError
from atoll.rounds.io import Counters, StoreIO, ThreadedDriver
from atoll.rounds.named.exchange import NamedContribution, NamedProtocol, ReadContribution
from atoll.rounds.named.keys import NamedKeys
from atoll.rounds.named.session import Rendezvous
from atoll.stores.base import Store
from atoll.stores.fast import with_retry_timeout

_clients: WeakValueDictionary[str, NamedClient] = WeakValueDictionary()


class NamedClient:
    """One rank's side, with plain blocking calls. Threads may exchange at the same time, under different names."""

    def __init__(
        self,
        store: Store,
        space: str | None,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 1800.0,
        poll_first_s: float = 0.05,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self.home = (store.uri, space, world_size, rank, os.getpid())
        retry_s = min(120.0, timeout_s / 2)
        self._store, self._clock = with_retry_timeout(store, retry_s), clock
        self._token = uuid.uuid4().hex
        self._io = StoreIO(clock, rng or random.Random(), retry_s=retry_s)
        keys, beside = NamedKeys(space, world_size), partial(_alive_at, self.home)
        self._protocol = NamedProtocol(Rendezvous(self._io, keys, rank, self._token, poll_first_s, beside), timeout_s)
        self._lock = threading.Lock()
        self._idle: list[ThreadedDriver] = []
        self._is_closed = False
        _clients[self._token] = self

    @property
    def counters(self) -> Counters:
        """Requests and bytes since the client was made."""
        return self._io.counters

    def exchange(self, name: str, part: NamedContribution) -> list[ReadContribution]:
        """Give a part and get one from each rank, in rank order; ours is what stands for us in the store.

        After an error the same call can be made again: it goes on waiting for the same generation. Only `PartsDiffer`
        ends the generation, because every rank sees it.
        """
        if self._is_closed:
            raise ConfigError("this one was closed; make a new one, on every rank", reason="closed")
        with self._driver() as drive:
            return drive(self._protocol.exchange(name, part))

    def close(self) -> None:
        """Say goodbye, and end the threads."""
        if self._is_closed:
            return
        self._is_closed = True
        _clients.pop(self._token, None)
        try:
            with self._driver() as drive:
                drive(self._protocol.leave())
        finally:
            for driver in self._idle:
                driver.close()

    @contextmanager
    def _driver(self) -> Iterator[ThreadedDriver]:
        """A driver of our own: one must not be shared between threads."""
        with self._lock:
            driver = self._idle.pop() if self._idle else ThreadedDriver(self._store, self._clock)
        try:
            yield driver
        finally:
            with self._lock:
                self._idle.append(driver)


def _alive_at(home: tuple[object, ...]) -> list[str]:
    """Clients of this process for one rank of one space. A forked child is not its parent: it has another pid."""
    return [token for token, client in list(_clients.items()) if client.home == home]
