"""What the store knows about replicas on hosts that do not answer, and how it stops them.

The supervisor on a host uploads heartbeats and outcomes, and looks for requests to stop (`atoll.replica.stops`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from atoll import journal, registry
from atoll._threads import map_in_background
from atoll._time import Clock, Deadline, backoff
from atoll.errors import AtollError, KeyNotFound, RunNotFound, StoreError
from atoll.executors.ssh.request import Block
from atoll.keys import RunKeys
from atoll.result import ReplicaOutcome
from atoll.status import Progress, Reason, ReplicaState, ReplicaStatus
from atoll.stores.base import Store
from atoll.stores.fast import with_retry_timeout

_AT_ONCE = 16
_RETRY_S = 10.0
_STOP_S = 45.0
"""Time beyond the grace in which a supervisor finds the request, ends its replicas and stores their outcomes."""


class _Limits(NamedTuple):
    """What the record of the run says about the end of its replicas."""

    max_restarts: int
    grace_s: float


def stored_rows(block: Block, problem: str) -> list[ReplicaStatus]:
    """The rows of a host that does not answer; `problem` says why, and is part of every row that is not over."""
    ranks = block.context.ranks(len(block.ranks))
    try:
        store = _store(block)
        outcomes = _final_outcomes(store, block)
        rows = [_row(store, block, rank, outcomes.get(rank), problem) for rank in ranks]
    except AtollError as exc:
        words = f"{problem}; and the store: {exc.message}"
        rows = [_unknown(rank, block, words) for rank in ranks]
    return [replace(row, rank=place) for row, place in zip(rows, block.ranks, strict=True)]


def stop_through_store(blocks: Sequence[Block], chosen: Sequence[int], clock: Clock) -> dict[Block, str]:
    """Ask the supervisors of these blocks to stop the chosen ranks, and wait until the store shows their ends.

    Returns for each block why its replicas may still run; an empty text if the store shows that all have ended.
    """
    stop = partial(_stop_block, chosen=chosen, clock=clock)
    found = list(map(stop, blocks)) if len(blocks) < 2 else map_in_background(stop, blocks, most=_AT_ONCE)
    return dict(zip(blocks, found, strict=True))


def request_stop(block: Block, chosen: Sequence[int]) -> tuple[Store, list[int], _Limits]:
    """Ask the supervisor of this block through the store to stop the chosen ranks. Returns them as ranks of the run."""
    context, first = block.context, block.context.first_rank - block.ranks.start
    ranks = [first + rank for rank in chosen if rank in block.ranks]
    store = _store(block)
    limits = _limits(store, block)
    for rank in ranks:
        journal.record_stop(store, context.run_id, rank, launch=context.launch)
    return store, ranks, limits


def _stop_block(block: Block, *, chosen: Sequence[int], clock: Clock) -> str:
    try:
        store, ranks, limits = request_stop(block, chosen)
        deadline, pauses = Deadline(limits.grace_s + _STOP_S, clock), backoff(0.1, cap_s=2.0)
        while left := set(ranks) - _final_outcomes(store, block).keys():
            if deadline.is_past:
                return f"the stop was requested through the store, which does not show the end of {_listed(left)}"
            deadline.sleep(next(pauses))
    except RunNotFound:
        return "the store has no record of this run"
    except AtollError as exc:
        return f"the stop could not be requested through the store: {exc.message}"
    return ""


def _listed(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _store(block: Block) -> Store:
    return with_retry_timeout(registry.open_store(block.context.store_uri), _RETRY_S)


def _limits(store: Store, block: Block) -> _Limits:
    context = block.context
    placement: Mapping[str, Any] = journal.read_launch(store, context.run_id, context.launch).spec["placement"]
    return _Limits(int(placement["max_restarts"]), float(placement["grace_s"]))


def _final_outcomes(store: Store, block: Block) -> dict[int, ReplicaOutcome]:
    """The outcomes of the ranks of a block that no restart follows."""
    newest = dict(_outcomes(store, block))
    if all(outcome.state is not ReplicaState.FAILED for outcome in newest.values()):
        return newest
    most = _limits(store, block).max_restarts
    return {r: each for r, each in newest.items() if each.state is not ReplicaState.FAILED or each.attempt >= most}


def _outcomes(store: Store, block: Block) -> Iterator[tuple[int, ReplicaOutcome]]:
    """The newest outcome of each rank of the block that has one."""
    keys = RunKeys(block.context.run_id, block.context.launch)
    ranks = block.context.ranks(len(block.ranks))
    newest: dict[int, str] = {}
    for key in store.list(keys.outcomes_prefix()):  # sorted, so a later attempt replaces an earlier one
        newest[keys.parse_outcome(key).rank] = key
    for rank in ranks:
        if rank in newest:
            yield rank, ReplicaOutcome.from_json(_json(store, newest[rank]))


def _row(store: Store, block: Block, rank: int, outcome: ReplicaOutcome | None, problem: str) -> ReplicaStatus:
    if outcome is not None:
        return ReplicaStatus(
            rank,
            outcome.state,
            outcome.reason,
            outcome.message,
            outcome.exit_code,
            str(block.host),
            outcome.attempt,
            started_at=outcome.started_at,
            ended_at=outcome.ended_at,
        )
    try:
        beat = _json(store, RunKeys(block.context.run_id, block.context.launch).beat(rank))
    except KeyNotFound:
        return _unknown(rank, block, problem)
    attempt = int(beat.get("attempt", 0))
    return replace(_unknown(rank, block, problem), state=ReplicaState.RUNNING, attempt=attempt)


def _unknown(rank: int, block: Block, problem: str) -> ReplicaStatus:
    """A rank that has not ended, as far as the store knows."""
    host, progress = str(block.host), Progress(problem=problem)
    return ReplicaStatus(rank, ReplicaState.PENDING, Reason.NO_ANSWER, problem, host=host, progress=progress)


def _json(store: Store, key: str) -> dict[str, Any]:
    try:
        found = json.loads(bytes(store.get(key)))
    except ValueError as exc:
        raise StoreError(f"`{key}` is damaged: {exc}", uri=store.uri, key=key, reason="damaged") from exc
    return dict(found)
