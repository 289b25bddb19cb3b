"""What replicas wrote to the store: outcomes, results, heartbeats and logs. Reads only; needs no backend."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from atoll import disk
from atoll._time import Clock
from atoll.errors import KeyNotFound, StoreError
from atoll.keys import RunKeys
from atoll.result import ReplicaOutcome
from atoll.status import Progress
from atoll.stores.base import Store

_PAUSE_S = 0.5
_LARGEST = 1e15
"""A time or a number of rounds beyond this is an error of the replica's code."""


class Beat(NamedTuple):
    """The newest heartbeat of a rank."""

    attempt: int
    progress: Progress


class StoredRun:
    """The records of one run in the store."""

    def __init__(self, store: Store, run_id: str, launch: int = 1) -> None:
        self._store, self._keys = store, RunKeys(run_id, launch)

    def outcomes(self, *, with_results: bool = False) -> dict[int, ReplicaOutcome]:
        """The newest outcome of every rank that wrote one."""
        newest: dict[int, str] = {}
        for key in self._store.list(self._keys.outcomes_prefix()):  # sorted, so a later attempt replaces an earlier
            newest[self._keys.parse_outcome(key).rank] = key
        return {rank: self._outcome(key, with_results) for rank, key in newest.items()}

    def outcome(self, rank: int, attempt: int) -> ReplicaOutcome | None:
        """The outcome of one attempt; None if it wrote none."""
        try:
            return self._outcome(self._keys.outcome(rank, attempt), with_results=False)
        except KeyNotFound:
            return None

    def newest_start(self, rank: int) -> int | None:
        """The newest attempt of a rank that began in a container; None if none has."""
        found = [self._keys.parse_start(key).attempt for key in self._store.list(self._keys.starts_prefix(rank))]
        return max(found, default=None)

    def beats(self, replicas: int) -> dict[int, Beat]:
        """The newest heartbeat of every rank that sent one."""
        if replicas <= 4 or self._store.uri.startswith(("file:", "memory:")):
            beats = [self._beat(rank) for rank in range(replicas)]
        else:
            from atoll._threads import map_in_background

            beats = map_in_background(self._beat, range(replicas), most=16)  # a store with latency: many at once
        if problem := self._problem():
            beats = [_with_problem(beat or Beat(0, Progress()), problem) for beat in beats]
        return {rank: beat for rank, beat in enumerate(beats) if beat is not None}

    def _problem(self) -> str:
        """`disk full: …` if the store is a folder that has no room: then newer heartbeats do not reach it."""
        folder = disk.folder_of(self._store.uri)
        return "" if folder is None else disk.problem_of(folder)

    def _beat(self, rank: int) -> Beat | None:
        try:
            beat = _json(self._store.get(self._keys.beat(rank)))
        except KeyNotFound:
            return None
        total = _number(beat, "rounds_total")
        progress = Progress(
            beat["round_no"],
            beat["metrics"],
            beat["last_line"],
            beat["beat_at"],
            rounds_total=None if total is None else int(total),
            eta_s=_eta_s(beat),
            phase=beat.get("phase"),
            is_line_open=bool(beat.get("is_line_open")),
            problem=str(beat.get("problem", "")),
        )
        return Beat(int(beat.get("attempt", 0)), progress)

    def attempts(self, rank: int) -> list[int]:
        """Attempts of a rank that have output, oldest first."""
        prefix = self._keys.log_prefix(rank)
        return sorted({self._keys.parse_log_chunk(key).attempt for key in self._store.list(prefix)})

    def log(self, rank: int, *, attempt: int | None = None, since: float | None = None) -> Iterator[bytes]:
        """Uploaded log chunks of a rank, in order: of one attempt or all, from the chunk of time `since` on."""
        return self._new_chunks(rank, attempt, since, [-1])

    def lines(
        self,
        rank: int,
        *,
        tail: int | None,
        since: float | None,
        attempt: int | None,
        is_over: Callable[[], bool] | None,
        clock: Clock,
    ) -> Iterator[str]:
        """Lines of one attempt, by default the newest. With `is_over`, wait for more lines until it is true.

        `since` selects whole chunks, so a few seconds before it may be included.
        """
        if attempt is None:
            attempt = max(self.attempts(rank), default=0)
        if is_over is not None:
            yield from _split(self._follow(rank, attempt, since, is_over, clock))
            return
        found = _split(self.log(rank, attempt=attempt, since=since))
        yield from found if tail is None else deque(found, maxlen=tail)

    def _follow(
        self, rank: int, attempt: int, since: float | None, is_over: Callable[[], bool], clock: Clock
    ) -> Iterator[bytes]:
        """Log chunks as they are uploaded, until `is_over()` and there is no new one."""
        seen = [-1]
        while True:
            over = is_over()
            yield from self._new_chunks(rank, attempt, since, seen)
            if over:
                return
            clock.sleep(_PAUSE_S)

    def _new_chunks(self, rank: int, attempt: int | None, since: float | None, seen: list[int]) -> Iterator[bytes]:
        """Chunks after the position `seen[0]`, which moves to the last chunk; an offset uploaded twice counts once."""
        for key in self._store.list(self._keys.log_prefix(rank, attempt)):
            chunk = self._keys.parse_log_chunk(key)
            position = (chunk.attempt << 60) + chunk.offset
            if position > seen[0] and (since is None or chunk.last_ms >= since * 1000):
                seen[0] = position
                yield bytes(self._store.get(key))

    def _outcome(self, key: str, with_results: bool) -> ReplicaOutcome:
        data = _json(self._store.get(key))
        size, digest = data.pop("result_bytes", None), data.pop("result_sha256", None)
        if size is not None and with_results:
            found = bytes(self._store.get(self._keys.result(data["rank"], data["attempt"])))
            if hashlib.sha256(found).hexdigest() != digest:
                raise StoreError(f"the result of rank {data['rank']} is damaged", uri=self._store.uri, key=key)
            data["result"] = _json(found)
        return ReplicaOutcome.from_json(data)


def _with_problem(beat: Beat, problem: str) -> Beat:
    return beat._replace(progress=replace(beat.progress, problem=beat.progress.problem or problem))


def _split(chunks: Iterable[bytes]) -> Iterator[str]:
    partial = b""
    for chunk in chunks:
        *whole, partial = (partial + chunk).split(b"\n")
        yield from map(_text, whole)
    if partial:
        yield _text(partial)


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "backslashreplace")


def _eta_s(beat: dict[str, Any]) -> float | None:
    """How long the remaining rounds take from the heartbeat on; all its times are of the replica's own clock."""
    found = [_number(beat, name) for name in ("round_no", "rounds_total", "round_s", "round_at", "beat_at")]
    known = [number for number in found if number is not None]
    if len(known) < len(found):
        return None
    done, total, round_s, round_at, beat_at = known
    left = total - done
    return max((left - 1) * round_s, left * round_s - max(0.0, beat_at - round_at)) if left > 0 else None


def _number(beat: dict[str, Any], name: str) -> float | None:
    """A field that an older replica does not send, and that user code can overwrite; None if it is not a number."""
    found = beat.get(name)
    return found if isinstance(found, int | float) and abs(found) < _LARGEST else None


def _json(data: Any) -> Any:
    return json.loads(bytes(data))
