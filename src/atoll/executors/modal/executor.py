"""ModalExecutor: each replica is a call of one deployed function; replicas share only the store.

Modal knows calls only by the ids that it chooses. So the handle names the store of the run, where `records` has the
ids, and a claim in the store decides which call of a rank runs user code. A copy of the ids on the launching machine
lets `cancel` work while the store does not answer.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import atoll
from atoll._threads import Unanswered, answer_within
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import RunContext, home
from atoll.errors import AtollError, BackendError, BackendUnavailable, ConfigError, RunNotFound, StopFailed, Unsupported
from atoll.errors import StoreError as _StoreError
from atoll.executors.base import Capabilities, Check, Deployment, Plan, Stray, ranks_to_stop
from atoll.executors.modal.calls import Calls, Phase
from atoll.executors.modal.client import ModalClient, profile_environment
from atoll.executors.modal.deploy import deploy_app
from atoll.executors.modal.doctor import setup_checks
from atoll.executors.modal.errors import EXECUTOR
from atoll.executors.modal.logs import CallLog, follow_lines
from atoll.executors.modal.looks import Looks
from atoll.executors.modal.machines import hourly_price
from atoll.executors.modal.records import BARRED, CallRecords, RankCalls, sent_handles
from atoll.executors.modal.request import CAPABILITIES, context_of, request_token, run_handle, spawn_request
from atoll.executors.modal.settings import Client, Lag, ModalSettings, Seconds, plan_hint
from atoll.executors.modal.status import replica_status
from atoll.executors.modal.submit import Submission, bound_function, unknown_call
from atoll.executors.undo import submit_or_stop
from atoll.handle import RunHandle
from atoll.journal import Claim
from atoll.registry import open_store
from atoll.spec import Placement
from atoll.status import ReplicaStatus, RunStatus
from atoll.stores.fast import with_retry_timeout
from atoll.validation import CLOCK, check_settings, checks_settings

_RECORDS_S = 15.0
"""How long a request waits for the records in the store before it uses the copy on this machine."""
log = logging.getLogger("atoll.executors")


class ModalExecutor:
    """Runs replicas as calls of a function on Modal. `job` takes the fields of `ModalSettings`."""

    name: ClassVar[str] = EXECUTOR
    capabilities: ClassVar[Capabilities] = CAPABILITIES
    settings_class: ClassVar[type] = ModalSettings

    @checks_settings
    def __init__(
        self,
        *,
        client: Client = None,
        timeout_s: Seconds = 30.0,
        patience_s: Seconds = 60.0,
        stop_s: Seconds = 180.0,
        pause_s: Seconds = 2.0,
        log_lag_s: Lag = 5.0,
        clock: Annotated[Clock, CLOCK] = SYSTEM_CLOCK,
        **job: Any,
    ) -> None:
        self.settings = ModalSettings(**job)
        self._client = ModalClient(given=client, timeout_s=timeout_s, patience_s=patience_s, clock=clock)
        self._calls = Calls(self._client, clock=clock, pause_s=pause_s, stop_s=stop_s)
        self._looks = Looks(self._calls)
        self._clock, self._pause_s, self._log_lag_s = clock, pause_s, log_lag_s
        self._bound: dict[str, Any] = {}
        self._seen: dict[RunHandle, list[str | None]] = {}
        """Call ids that this process has read, by rank, for links."""
        self._noted: dict[RunHandle, dict[int, str]] = {}
        self._claims: dict[RunContext, dict[int, Claim]] = {}

    def with_settings(self, **changes: Any) -> ModalExecutor:
        """A copy of this executor with other settings."""
        check_settings(self.name, changes, type(self), self.settings_class)
        other = copy(self)
        other.settings = replace(self.settings, **changes)
        return other

    @property
    def _environment(self) -> str | None:
        return self.settings.environment or profile_environment()

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        request, problems, notes = spawn_request(
            context, placement, self.settings, environment=self._environment, version=atoll.__version__
        )
        if problems:
            raise Unsupported(self.name, context.run_id, problems, hint=plan_hint(problems))
        return Plan(self.name, context.run_id, placement.replicas, request, tuple(notes))

    def hourly_usd(self, plan: Plan, placement: Placement) -> float | None:  # noqa: ARG002  the placement says it
        """The list price of a container, or your own."""
        size = {"cpus": placement.cpus, "memory_gib": placement.memory_gib}
        return hourly_price(placement.gpu, **size, own=self.settings.prices)

    def preflight(self, plan: Plan) -> None:
        """The function is deployed, and its secrets and volumes exist."""
        self._function(plan)

    def handle(self, plan: Plan) -> RunHandle:
        return run_handle(plan.request, plan.replicas)

    def submit(self, plan: Plan) -> RunHandle:
        return submit_or_stop(self, plan)

    def start(self, plan: Plan) -> RunHandle:
        handle = self.handle(plan)
        records = self._records(context_of(handle))
        Submission(self._client, records, _local_records(context_of(handle)), plan, lambda: self._function(plan)).run()
        return handle

    def status(self, handle: RunHandle) -> RunStatus:
        return RunStatus(tuple(self._replicas(handle, range(handle.replicas))))

    def _replicas(self, handle: RunHandle, ranks: Sequence[int]) -> list[ReplicaStatus]:
        """The status of these ranks; `looks` says which calls Modal is asked about."""
        records, calls = self._known(handle)
        looks = self._looks.of(records, {rank: calls[rank] for rank in ranks})
        if any(look.is_duplicate for look in looks.values()):
            records, calls = self._known(handle)  # a call that no record has claimed the rank in between
            looks = self._looks.of(records, {rank: calls[rank] for rank in ranks})
        return [replica_status(rank, calls[rank], looks) for rank in ranks]

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        chosen = ranks_to_stop(self, handle, ranks)
        refusals: dict[str, BackendError] = {}
        for _ in range(3):  # a container may claim its rank while the others are stopped
            records, known = self._known(handle)
            chosen = [rank for rank in chosen if known[rank].is_known and known[rank].holder != BARRED]
            refusals = self._stop(records, {rank: known[rank] for rank in chosen})
            chosen = [rank for rank in chosen if not refusals and not self._is_settled(records, rank, known[rank])]
            if not chosen:
                break
        else:
            refusals |= {unknown_call(rank): _unsettled(rank) for rank in chosen}
        if refusals:
            reasons = {name: error.message for name, error in refusals.items()}
            raise StopFailed(f"run `{context_of(handle).run_id}`", reasons, executor=self.name) from next(
                iter(refusals.values())
            )

    def _stop(self, records: CallRecords, known: dict[int, RankCalls]) -> dict[str, BackendError]:
        """Cancel every known call of these ranks that is not over. Returns those that may still run, and why."""
        ids = [call for calls in known.values() for call in calls.ids]
        try:
            looks = self._calls.look_all(ids)
        except BackendError:
            looks = {}
        for rank, calls in known.items():
            is_alive = any(call not in looks or not looks[call].is_over for call in calls.ids)
            if is_alive or calls.has_unknown:
                _record_stop(records, rank)
        return self._calls.stop_all([call for call in ids if call not in looks or not looks[call].is_over])

    def _is_settled(self, records: CallRecords, rank: int, calls: RankCalls) -> bool:
        """Whether no call of this rank can run any more: a call that is over, or this cancel, has its claim."""
        if calls.holder:
            return True
        if not calls.has_unknown and all(self._calls.look(call).phase is not Phase.PENDING for call in calls.sent):
            return True
        try:
            return records.bar(rank)
        except _StoreError as exc:
            log.warning("cannot claim rank %d: %s", rank, exc.message)
            return not calls.has_unknown

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        calls = self._known(handle)[1][rank] if 0 <= rank < handle.replicas else RankCalls()
        if not calls.ids:
            message = f"Modal has no log of rank {rank} of `{handle.native_id}`"
            raise RunNotFound(message, executor=self.name, operation="logs")
        call_id = calls.ids[0]
        lines = CallLog(self._client, call_id)
        if follow:
            yield from follow_lines(
                lines,
                tail=tail,
                is_over=lambda: self._replicas(handle, [rank])[0].state.is_terminal,
                pause_s=self._pause_s,
                lag_s=self._log_lag_s,
                clock=self._clock,
            )
        elif tail != 0:
            yield from lines.lines() if tail is None else lines.last_lines(tail)

    def origin(self, handle: RunHandle) -> RunContext | None:
        return context_of(handle)

    def call_ids(self, handle: RunHandle, ranks: Sequence[int]) -> list[str | None]:
        """The id of each rank's call; None where no record has it yet."""
        self._known(handle)
        return [self._seen[handle][rank] for rank in ranks]

    @contextmanager
    def knowing_call(self, handle: RunHandle, rank: int, call_id: str) -> Iterator[None]:
        """Tell the id of a rank's call for the time of the block, in case no record has it. Threads may do so for
        several ranks at once."""
        noted = self._noted.setdefault(handle, {})
        noted[rank] = call_id
        try:
            yield
        finally:
            noted.pop(rank, None)

    def links(self, handle: RunHandle, rank: int) -> dict[str, str]:
        """The page of the call; empty if this process has not read its id yet."""
        call_id = self._seen[handle][rank] if handle in self._seen else None
        return {"call": f"https://modal.com/id/{call_id}"} if call_id else {}

    def strays(self) -> list[Stray]:
        """Calls that are not over, of launches that this machine began: Modal has no list of calls."""
        found: list[Stray] = []
        for folder in sorted(path for path in _local_folder().glob("*") if path.is_dir()):
            store = open_store(str(folder))
            for text, keys in sent_handles(store).items():
                handle = RunHandle.parse(text)
                calls = self._strays_of(handle)
                found += calls
                for key in [] if calls else keys:  # this launch is over: the next sweep need not look at it
                    store.delete(key)
        return found

    def _strays_of(self, handle: RunHandle) -> list[Stray]:
        """Calls that are not over. A call whose id was lost is one, under the name of its rank, until its rank is
        claimed: it may wait for a machine."""
        context, (_, known) = context_of(handle), self._known(handle)
        looks = self._calls.look_all(call for calls in known for call in calls.ids)
        alive = [(rank, call) for rank, calls in enumerate(known) for call in calls.ids if not looks[call].is_over]
        unknown = [
            (rank, unknown_call(rank)) for rank, calls in enumerate(known) if calls.has_unknown and calls.holder is None
        ]
        return [
            Stray(handle, call, f"rank {handle.first_rank + rank} of run `{context.run_id}`", context)
            for rank, call in sorted([*alive, *unknown])
        ]

    def deploy(self) -> Deployment:
        return deploy_app(self._client, self.settings, environment=self._environment)

    def diagnose(self) -> list[Check]:
        return setup_checks(self._client, self.settings, environment=self._environment)

    def _function(self, plan: Plan) -> Any:
        token = request_token({**plan.request, "calls": [], "run": {}})
        if token not in self._bound:
            self._bound[token] = bound_function(self._client, plan.request)
        return self._bound[token]

    def _records(self, context: RunContext) -> CallRecords:
        store = with_retry_timeout(open_store(context.store_uri), _RECORDS_S)
        return CallRecords(store, context, self._claims.setdefault(context, {}))

    def _known(self, handle: RunHandle) -> tuple[CallRecords, list[RankCalls]]:
        """The records of the calls, from the store, or from this machine if the store does not answer."""
        records, calls = self._read(handle)
        self._seen[handle] = [next(iter(each.ids), None) for each in calls]
        return records, calls

    def _read(self, handle: RunHandle) -> tuple[CallRecords, list[RankCalls]]:
        context = context_of(handle)

        def read() -> tuple[CallRecords, list[RankCalls]]:
            records = self._records(context)
            return records, records.read(handle.replicas)

        problem: Exception | None = None
        try:
            records, known = answer_within(_RECORDS_S, read)
        except (_StoreError, ConfigError, Unanswered) as exc:
            problem = exc
        if problem is None and any(calls.is_known for calls in known):
            return records, known
        local = _local_records(context)  # the store does not answer, or has lost the records
        copied = local.read(handle.replicas)
        if any(calls.is_known for calls in copied):
            return local, copied
        if noted := dict(self._noted.get(handle, {})):
            sent = {rank: (call_id,) for rank, call_id in noted.items()}
            return local, [RankCalls(sent.get(rank, ())) for rank in range(handle.replicas)]
        if problem is not None:
            why = problem.message if isinstance(problem, AtollError) else "it does not answer"
            message = f"the ids of the calls are in {context.store_uri}, which cannot be read: {why}"
            raise BackendUnavailable(message, executor=self.name, operation="status", reason="store") from problem
        return records, known


def _local_folder() -> Path:
    return home() / "modal"


def _local_records(context: RunContext) -> CallRecords:
    """The copy of the records on this machine."""
    folder = _local_folder() / hashlib.sha256(context.store_uri.encode()).hexdigest()[:16]
    return CallRecords(open_store(str(folder)), context)


def _record_stop(records: CallRecords, rank: int) -> None:
    try:
        records.record_stop(rank)
    except _StoreError as exc:
        log.warning("cannot record the cancel of rank %d: %s", rank, exc.message)


def _unsettled(rank: int) -> BackendError:
    message = f"a call of rank {rank} may exist whose id is not known, and the store cannot keep it from running"
    return BackendError(message, executor=EXECUTOR, operation="cancel")
