"""`MeanClient`: a blocking mean by name over a store, for code that wants nothing more than an all-reduce."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import InvalidSpec
from atoll.rounds.drive import Driver
from atoll.rounds.keys import MeanKeys
from atoll.rounds.layout import ITEM_BYTES, numpy_dtype
from atoll.rounds.means import Ledger, mean
from atoll.rounds.meeting import Meeting, meet
from atoll.rounds.requests import Counters, Requests
from atoll.stores.base import Store


class MeanClient:
    """One rank of a group that averages arrays. Meets the others at the first call; threads may share it.

    A label that was used before is fine: every start of the group is a session of its own. All ranks must start anew
    together: one that restarts alone is not let in, and the others get `QuorumLost` in their time.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        label: str = "default",
        timeout_s: float = 1800.0,
        poll_s: float = 1.0,
        connections: int = 8,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not 0 <= rank < world_size:
            raise InvalidSpec("rank", [f"rank={rank}: from 0 to below world_size={world_size}"])
        io = Requests(clock, random.Random(), retry_s=min(120.0, timeout_s))
        self._meeting = Meeting(io, MeanKeys(label), rank, world_size, timeout_s, poll_s)
        self._ledger = Ledger(world_size)
        self._drive = Driver(store, clock, connections=connections)
        self._lock = threading.Lock()
        self._session: str | None = None

    @property
    def counters(self) -> Counters:
        return self._meeting.io.counters

    def meet(self) -> str:
        """Wait until every rank is here; the session they share."""
        with self._lock:
            if self._session is None:
                self._session = self._drive(meet(self._meeting))
            return self._session

    def mean(self, name: str, array: NDArray[Any], *, dtype: str | None = None) -> NDArray[Any]:
        """The mean of every rank's `array` under this name, as a new array of the same shape and dtype.

        `dtype="bfloat16"` takes bit patterns as uint16. `CorruptUpdate` if shapes or dtypes differ between ranks,
        `QuorumLost` naming the rank that did not come in time.
        """
        kind = dtype or array.dtype.name
        if kind not in ITEM_BYTES:
            raise InvalidSpec("array", [f"dtype={kind}: one of {', '.join(ITEM_BYTES)}"])
        flat = np.ascontiguousarray(array).reshape(-1).astype(numpy_dtype(kind), copy=False)
        session = self.meet()
        result = self._drive(mean(self._meeting, session, self._ledger, name, flat, kind, array.shape))
        return result.reshape(array.shape)

    def close(self) -> None:
        """End the threads; the objects of the last turns stay."""
        self._drive.close()
