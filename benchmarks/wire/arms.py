"""Ways to average one array over N processes: ours over each store. The peers are in peers.py.

An arm lives in every replica process. `run` is what is timed; everything else is not.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from atoll.rounds.client import RoundClient
from atoll.rounds.context import Tuning
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import ArrayVector, Layout
from atoll.stores.base import Store
from atoll.stores.cloud.store import CloudStore
from atoll.stores.file.store import FileStore


@dataclass(frozen=True)
class Seat:
    """One replica's place: who it is, what it averages, and where it may write."""

    rank: int
    replicas: int
    update: np.ndarray[Any, np.dtype[np.float32]]
    out: np.ndarray[Any, np.dtype[np.float32]]
    scratch: Path
    """A folder in memory that all replicas of this team share."""
    endpoints: dict[str, str] = field(default_factory=dict)
    """Store addresses by the kind of server behind them."""
    tuning: dict[str, Any] = field(default_factory=dict)
    chunk: int | None = None
    plain: Path | None = None
    """The same without large pages."""


class Arm(Protocol):
    def open(self, seat: Seat) -> None: ...

    def prepare(self, round_no: int) -> None:
        """Make `seat.out` ready."""

    def run(self, round_no: int) -> None:
        """Leave the mean (or the sum, see `is_sum`) in `seat.out`."""

    def tidy(self, round_no: int) -> None:
        """Remove what the round left; every replica is through it, and about to begin the next one."""

    def facts(self) -> dict[str, Any]:
        """Counters of the last round."""

    def close(self) -> None: ...

    is_sum: bool


def can_recycle() -> bool:
    return "recycle" in inspect.signature(FileStore.__init__).parameters


class Ours:
    """A `RoundClient`, fp32, over the store that the kind names: file, small, recycled, wire, or slow."""

    is_sum = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def open(self, seat: Seat) -> None:
        self._seat = seat
        self._store = store_of(self.kind, seat)
        self._keys = RoundKeys(f"bench-{self.kind}")
        layout = Layout.of([("w", [seat.update.size], "uint8")])  # what matters is the size: four bytes travel for each
        options: dict[str, Any] = {} if seat.chunk is None else {"chunk": seat.chunk}
        self._client = RoundClient(
            self._store, self._keys.run_id, seat.rank, seat.replicas,
            layouts=[layout], codec_name="fp32", tuning=Tuning(**seat.tuning), **options,
        )  # fmt: skip
        self._client.join([memoryview(np.zeros(seat.update.size, dtype=np.uint8))])
        self._update, self._out = ArrayVector([seat.update]), ArrayVector([seat.out])

    def prepare(self, round_no: int) -> None:
        self._seat.out.fill(np.nan)

    def run(self, round_no: int) -> None:
        done = self._client.exchange(round_no, self._update, weight=1.0, out=self._out)
        self._outcome = done.outcome

    def tidy(self, round_no: int) -> None:
        """Not by `retire`, which keeps two rounds: the room is in memory here. Each replica removes what it wrote."""
        if self.kind == "slow":  # a tenth of a second for every object: rather leave it
            return
        for key in self._store.list(self._keys.round_prefix(round_no)):
            if _writer(key, self._seat.replicas) == self._seat.rank:
                self._store.delete(key)

    def facts(self) -> dict[str, Any]:
        counters = self._outcome.counters
        return {
            "requests": dict(counters.requests),
            "misses": counters.misses,
            "retries": counters.retries,
            "up": counters.bytes_up,
            "down": counters.bytes_down,
            "seconds": dict(counters.seconds),
            "mode": self._outcome.commit.mode,
            "connections": self._client._protocol.member.connections,  # as measured, so not in `Tuning`
            "chunk_bytes": 4 * self._client.agreement.chunk,
            "chunks": -(-self._seat.update.size // self._client.agreement.chunk),
        }

    def close(self) -> None:
        self._client.close()


def _writer(key: str, replicas: int) -> int:
    """The rank that wrote an object of a round in which nobody was missing."""
    kind, name, *rest = key.split("/rounds/", 1)[1].split("/")[1:]
    return int(rest[0]) % replicas if kind == "mean" else int(name.partition(".")[0])


def store_of(kind: str, seat: Seat) -> Store:
    """Files need no fsync in memory; bodies are signed by TLS elsewhere, so plain HTTP here does not hash them."""
    if kind == "file":
        return FileStore(seat.scratch / "file", fsync=False)
    if kind == "small":
        assert seat.plain is not None
        return FileStore(seat.plain / "small", fsync=False)
    if kind == "recycled":
        return FileStore(seat.scratch / "recycled", fsync=False, recycle=True)  # type: ignore[call-arg]
    os.environ.update(AWS_ACCESS_KEY_ID="wire", AWS_SECRET_ACCESS_KEY="wire")
    return CloudStore.from_uri(seat.endpoints[kind], unsigned_payload=True)
