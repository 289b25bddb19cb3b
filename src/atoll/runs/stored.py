"""What replicas wrote to the store: outcomes, results, heartbeats and logs. Reads only; needs no backend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from atoll import disk
from atoll.errors import KeyNotFound, StoreError
from atoll.keys import RunKeys
from atoll.replica.stored_log import StoredLog
from atoll.result import ReplicaOutcome
from atoll.status import Progress
from atoll.stores.base import Store

_LARGEST = 1e15
"""A time or a number of rounds beyond this is an error of the replica's code."""

_DAMAGED = (ValueError, KeyError, TypeError, AttributeError)
"""What reading a record raises that is no JSON, or lacks a field."""


class Beat(NamedTuple):
    """The newest heartbeat of a rank."""

    attempt: int
    progress: Progress


class StoredRun:
    """The records of one run in the store."""

    def __init__(self, store: Store, run_id: str, launch: int = 1) -> None:
        self._store, self._keys = store, RunKeys(run_id, launch)
        self.log = StoredLog(store, self._keys)

    def outcomes(
        self, ranks: Collection[int] | None = None, *, with_results: bool = False
    ) -> dict[int, ReplicaOutcome]:
        """The newest outcome of every rank, or of each of these `ranks`, that wrote one."""
        newest: dict[int, str] = {}
        for key in self._store.list(self._keys.outcomes_prefix()):  # sorted, so a later attempt replaces an earlier
            newest[self._keys.parse_outcome(key).rank] = key
        wanted = newest if ranks is None else [rank for rank in newest if rank in ranks]
        return {rank: self._outcome(newest[rank], with_results) for rank in wanted}

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
        """None also if it is damaged: the next one replaces it."""
        try:
            return _read_beat(_json(self._store.get(self._keys.beat(rank))))
        except (KeyNotFound, *_DAMAGED):
            return None

    def _outcome(self, key: str, with_results: bool) -> ReplicaOutcome:
        try:
            data = _json(self._store.get(key))
            size, digest = data.pop("result_bytes", None), data.pop("result_sha256", None)
            if size is not None and with_results:
                found = bytes(self._store.get(self._keys.result(data["rank"], data["attempt"])))
                if hashlib.sha256(found).hexdigest() != digest:
                    raise StoreError(f"the result of rank {data['rank']} is damaged", uri=self._store.uri, key=key)
                data["result"] = _json(found)
            return ReplicaOutcome.from_json(data)
        except _DAMAGED as exc:
            what = f"`{key}` is damaged: {exc!r}"
            raise StoreError(what, uri=self._store.uri, key=key, reason="damaged") from exc


def _read_beat(beat: dict[str, Any]) -> Beat:
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


def _with_problem(beat: Beat, problem: str) -> Beat:
    return beat._replace(progress=replace(beat.progress, problem=beat.progress.problem or problem))


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
