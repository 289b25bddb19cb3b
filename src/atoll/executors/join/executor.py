"""JoinExecutor: replicas run on machines whose users start them with `atoll join`; only the store connects them.

`start` records which ranks wait for machines, and nothing else. `status`, `logs` and `cancel` read and write records in
the store (`atoll.replica.joined`), so they work from any process that reaches it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, ClassVar

from atoll import journal
from atoll._time import SYSTEM_CLOCK, Clock, Deadline
from atoll.context import RunContext
from atoll.errors import BackendUnavailable, Conflict, KeyExists, RunNotFound, StopFailed, StoreError, Unsupported
from atoll.executors.base import Capabilities, Plan, ranks_to_stop
from atoll.executors.join.request import CAPABILITIES, EXECUTOR, context_of, join_line, join_request, run_handle
from atoll.executors.join.status import native_id, replica_status
from atoll.executors.undo import submit_or_stop
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.registry import open_store
from atoll.replica.joined import Condition, JoinedRanks, RankRow, read_part
from atoll.replica.stored_log import StoredLog
from atoll.spec import Placement
from atoll.status import RunStatus
from atoll.stores.base import Store
from atoll.stores.fast import with_retry_timeout
from atoll.validation import CLOCK, Kind, between, checks_settings

_STORE_S = 15.0
"""How long a request to the store is retried."""
_STOP_S = 60.0
"""Time beyond the grace in which a machine may store the outcome."""
_POLL_S, _POLL_FILE_S = 1.0, 0.05

Silence = Annotated[float, Kind("seconds from 1 to 86400", between(1, 86_400))]

log = logging.getLogger("atoll.executors")


class JoinExecutor:
    """Waits for machines that join. One that sends no heartbeat for `silent_after_s` may be replaced by another."""

    name: ClassVar[str] = EXECUTOR
    capabilities: ClassVar[Capabilities] = CAPABILITIES

    @checks_settings
    def __init__(self, *, silent_after_s: Silence = 60.0, clock: Annotated[Clock, CLOCK] = SYSTEM_CLOCK) -> None:
        self._silent_s, self._clock = float(silent_after_s), clock
        self._ranks: dict[RunHandle, JoinedRanks] = {}

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        request, problems, notes = join_request(context, placement, silent_s=self._silent_s)
        if problems:
            raise Unsupported(self.name, context.run_id, problems)
        return Plan(self.name, context.run_id, placement.replicas, request, tuple(notes))

    def handle(self, plan: Plan) -> RunHandle:
        return run_handle(plan.request)

    def submit(self, plan: Plan) -> RunHandle:
        return submit_or_stop(self, plan)

    def start(self, plan: Plan) -> RunHandle:
        handle, part = self.handle(plan), plan.request["part"]
        context = context_of(handle)
        key = _keys(context).join_part(handle.first_rank)
        with _store_answers("submit"):
            store = _store(context)
            try:
                store.create(key, json.dumps(part, sort_keys=True).encode())
            except KeyExists:
                found = read_part(store, _keys(context), handle.first_rank)
                present = {} if found is None else found.to_json()
                if differing := [name for name in sorted(part) if present.get(name) != part[name]]:
                    raise Conflict(plan.run_id, [f"{name}: there another value" for name in differing]) from None
        return handle

    def status(self, handle: RunHandle) -> RunStatus:
        with _store_answers("status"):
            ranks = self._joined(handle)
            if ranks is None:
                return RunStatus.lost(handle.replicas, f"no machine can join `{handle.native_id}`: it has no record")
            rows, line = ranks.read(), join_line(context_of(handle))
        return RunStatus(tuple(replica_status(rank, row, ranks.part, line) for rank, row in enumerate(rows)))

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        chosen = [handle.first_rank + rank for rank in ranks_to_stop(self, handle, ranks)]
        try:
            left = self._stop(handle, chosen)
        except StoreError as exc:
            why = f"only the store reaches its machine, and it did not take the request: {exc.message}"
            refusals = {f"rank {rank}": why for rank in chosen}
            raise StopFailed(f"run `{context_of(handle).run_id}`", refusals, executor=self.name) from exc
        if left:
            why = "its machine sends heartbeats, and has not stopped the replica"
            refusals = {f"rank {row.rank} on {native_id(row)}": why for row in left}
            raise StopFailed(f"run `{context_of(handle).run_id}`", refusals, executor=self.name)

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        context = context_of(handle)
        with _store_answers("logs"):
            if not 0 <= rank < handle.replicas or self._joined(handle) is None:
                message = f"no machine has run rank {rank} of `{handle.native_id}`"
                raise RunNotFound(message, executor=self.name, operation="logs")
            yield from StoredLog(_store(context), _keys(context)).lines(
                handle.first_rank + rank,
                tail=tail,
                since=None,
                attempt=None,
                is_over=(lambda: self._is_over(handle, handle.first_rank + rank)) if follow else None,
                clock=self._clock,
            )

    def origin(self, handle: RunHandle) -> RunContext | None:
        return context_of(handle)

    def _joined(self, handle: RunHandle) -> JoinedRanks | None:
        """The ranks of a handle; None if no launcher has recorded them."""
        context = context_of(handle)
        store, keys = _store(context), _keys(context)
        part = read_part(store, keys, handle.first_rank)
        if part is None or part.replicas != handle.replicas:
            return None
        if handle not in self._ranks or self._ranks[handle].part != part:
            self._ranks[handle] = JoinedRanks(store, keys, part, self._clock)
        return self._ranks[handle]

    def _is_over(self, handle: RunHandle, rank: int) -> bool:
        ranks = self._joined(handle)
        return ranks is None or ranks.read([rank])[0].condition(ranks.part.max_restarts) is Condition.OVER

    def _stop(self, handle: RunHandle, chosen: Sequence[int]) -> list[RankRow]:
        """Ask the machines of these ranks to stop, and keep others from claiming them. Returns those that still run.

        A machine without heartbeats is not waited for: it ends its replica itself when it sees the later attempt.
        """
        ranks = self._joined(handle)
        if ranks is None:
            return []
        context, part = context_of(handle), ranks.part
        asked, left = set[int](), ranks.read(chosen)
        deadline = Deadline(part.grace_s + part.silent_s + _STOP_S, self._clock)
        pause_s = _POLL_FILE_S if context.store_uri.startswith("file:") else _POLL_S
        while True:
            left = [row for row in left if row.condition(part.max_restarts) is not Condition.OVER]
            for row in left:
                if row.rank not in asked:
                    journal.record_stop(_store(context), context.run_id, row.rank, launch=context.launch)
                    asked.add(row.rank)
            left = [row for row in left if not self._bar(ranks, row)]
            if not left or deadline.is_past:
                return left
            self._clock.sleep(pause_s)
            left = ranks.read([row.rank for row in left])

    def _bar(self, ranks: JoinedRanks, row: RankRow) -> bool:
        """Keep every machine from claiming the rank, if none has it at the moment.

        A machine that looks silent may only have a wrong clock, so its next heartbeats are waited for.
        """
        condition = row.condition(ranks.part.max_restarts)
        if condition is Condition.RUNNING or (condition is Condition.SILENT and not ranks.was_watched(row.rank)):
            return False
        return ranks.bar(row.rank, row.next_attempt)


def _store(context: RunContext) -> Store:
    return with_retry_timeout(open_store(context.store_uri), _STORE_S)


def _keys(context: RunContext) -> RunKeys:
    return RunKeys(context.run_id, context.launch)


@contextmanager
def _store_answers(operation: str) -> Iterator[None]:
    """The store is all that this backend has: an error of the store is an error of the backend."""
    try:
        yield
    except StoreError as exc:
        raise BackendUnavailable(
            f"the records of the machines cannot be read or written: {exc.message}",
            executor=EXECUTOR,
            operation=operation,
            reason="store",
        ) from exc
