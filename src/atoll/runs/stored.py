"""What replicas wrote to the store: outcomes, results, heartbeats and logs. Reads only; needs no backend."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from atoll._time import Clock
from atoll.errors import KeyNotFound, StoreError
from atoll.keys import RunKeys
from atoll.result import ReplicaOutcome
from atoll.status import Progress
from atoll.stores.base import Store

_PAUSE_S = 0.5


class StoredRun:
    """The store's side of the story of one run."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._keys = store, RunKeys(run_id)

    def outcomes(self, *, with_results: bool = False) -> dict[int, ReplicaOutcome]:
        """The newest outcome of every rank that left one."""
        newest: dict[int, str] = {}
        for key in self._store.list(self._keys.outcomes_prefix()):  # sorted, so a later attempt replaces an earlier
            newest[self._keys.parse_outcome(key).rank] = key
        return {rank: self._outcome(key, with_results) for rank, key in newest.items()}

    def progress(self, replicas: int) -> dict[int, Progress]:
        """The newest heartbeat of every rank that sent one."""
        if replicas <= 4 or self._store.uri.startswith(("file:", "memory:")):
            beats = [self._beat(rank) for rank in range(replicas)]
        else:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(16) as pool:  # a distant store: many at once
                beats = list(pool.map(self._beat, range(replicas)))
        return {rank: beat for rank, beat in enumerate(beats) if beat is not None}

    def _beat(self, rank: int) -> Progress | None:
        try:
            beat = _json(self._store.get(self._keys.beat(rank)))
        except KeyNotFound:
            return None
        return Progress(beat["round_no"], beat["metrics"], beat["last_line"], beat["beat_at"])

    def attempts(self, rank: int) -> list[int]:
        """Attempts of a rank that left output, oldest first."""
        prefix = self._keys.log_prefix(rank)
        return sorted({self._keys.parse_log_chunk(key).attempt for key in self._store.list(prefix)})

    def log(self, rank: int, *, attempt: int | None = None, since: float | None = None) -> Iterator[bytes]:
        """Sealed pieces of a rank's output, in order: one attempt or all; from the piece of time `since` on."""
        seen = -1
        for key in self._store.list(self._keys.log_prefix(rank, attempt)):
            chunk = self._keys.parse_log_chunk(key)
            place = (chunk.attempt << 60) + chunk.offset
            if place > seen and (since is None or chunk.last_ms >= since * 1000):
                seen = place
                yield bytes(self._store.get(key))

    def follow_log(
        self, rank: int, *, attempt: int, since: float | None, is_over: Callable[[], bool], clock: Clock
    ) -> Iterator[bytes]:
        """Sealed pieces as they come, until `is_over()` and nothing new is there."""
        seen = -1
        while True:
            over = is_over()
            for key in self._store.list(self._keys.log_prefix(rank, attempt)):
                chunk = self._keys.parse_log_chunk(key)
                if chunk.offset > seen and (since is None or chunk.last_ms >= since * 1000):
                    seen = chunk.offset
                    yield bytes(self._store.get(key))
            if over:
                return
            clock.sleep(_PAUSE_S)

    def _outcome(self, key: str, with_results: bool) -> ReplicaOutcome:
        data = _json(self._store.get(key))
        size, digest = data.pop("result_bytes", None), data.pop("result_sha256", None)
        if size is not None and with_results:
            found = bytes(self._store.get(self._keys.result(data["rank"], data["attempt"])))
            if hashlib.sha256(found).hexdigest() != digest:
                raise StoreError(f"the result of rank {data['rank']} is damaged", uri=self._store.uri, key=key)
            data["result"] = _json(found)
        return ReplicaOutcome.from_json(data)


def lines(
    witness: StoredRun,
    rank: int,
    *,
    tail: int | None,
    since: float | None,
    attempt: int | None,
    is_over: Callable[[], bool] | None,
    clock: Clock,
) -> Iterator[str]:
    """Lines of one attempt (the newest unless said otherwise). With `is_over`, go on until it is true.

    `since` is exact to the age of a sealed piece: a few seconds more may come, never less.
    """
    if attempt is None:
        attempt = max(witness.attempts(rank), default=0)
    if is_over is not None:
        yield from _split(witness.follow_log(rank, attempt=attempt, since=since, is_over=is_over, clock=clock))
        return
    found = _split(witness.log(rank, attempt=attempt, since=since))
    yield from found if tail is None else deque(found, maxlen=tail)


def _split(pieces: Iterable[bytes]) -> Iterator[str]:
    partial = b""
    for piece in pieces:
        *whole, partial = (partial + piece).split(b"\n")
        yield from map(_text, whole)
    if partial:
        yield _text(partial)


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "backslashreplace")


def _json(data: Any) -> Any:
    return json.loads(bytes(data))
