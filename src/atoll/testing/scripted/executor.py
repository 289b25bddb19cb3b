"""ScriptedExecutor: the adapter of the scripted cloud. It passes the whole contract although the service fails.

It is also an example for new adapters: it does what the adapter of a real service has to do. Pure functions build the
requests, the five verbs send them, and `_call` translates each error of the vendor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Annotated, Any, ClassVar

from atoll._time import SYSTEM_CLOCK, Clock, Deadline, backoff
from atoll.context import GRACE, RunContext, ending_signal, rank_environment
from atoll.errors import (
    AtollError,
    AuthError,
    BackendError,
    BackendUnavailable,
    Conflict,
    InternalError,
    MissingExtra,
    RunNotFound,
    StopFailed,
    SubmitError,
    Unsupported,
    translating,
)
from atoll.executors.base import Capabilities, Plan, check, ranks_to_stop, store_problems
from atoll.executors.undo import submit_or_stop
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus
from atoll.validation import CLOCK, SECONDS_ABOVE_0, TEXT, checks_settings

CAPABILITIES = Capabilities(
    code=frozenset({"image", "bundle"}),
    gpus=frozenset({"H100", "L4"}),
    secret_schemes=frozenset({"vault"}),
    max_restarts=3,
    max_replicas=500,
)
STATES: dict[str, tuple[ReplicaState, Reason]] = {
    "Queued": (ReplicaState.PENDING, Reason.WAITING),
    "Running": (ReplicaState.RUNNING, Reason.OK),
    "Succeeded": (ReplicaState.SUCCEEDED, Reason.OK),
    "Failed": (ReplicaState.FAILED, Reason.USER_ERROR),
    "Stopped": (ReplicaState.CANCELLED, Reason.CANCELLED),
    "TimedOut": (ReplicaState.FAILED, Reason.TIMEOUT),
}
_TRIES = 3
_LATE_S = 5.0
"""Time that the service gives a container beyond the grace of its replica."""
_STOP_S = 60.0
_POLL_S = 0.02


class ScriptedExecutor:
    """Runs replicas in a scripted cloud: one job for each."""

    name: ClassVar[str] = "scripted"
    capabilities: ClassVar[Capabilities] = CAPABILITIES
    _group: ClassVar[bool] = False

    @checks_settings
    def __init__(
        self,
        *,
        endpoint: Annotated[str, TEXT],
        timeout_s: Annotated[float, SECONDS_ABOVE_0] = 30.0,
        clock: Annotated[Clock, CLOCK] = SYSTEM_CLOCK,
    ) -> None:
        self._sdk = _sdk()
        self._client = self._sdk.ScriptedClient(endpoint, timeout_s=timeout_s)
        self._endpoint, self._clock = endpoint, clock
        self._errors: dict[type[Exception], type[AtollError]] = {
            self._sdk.Denied: AuthError,
            self._sdk.NoSuchJob: RunNotFound,
            self._sdk.TryAgain: BackendUnavailable,
            self._sdk.NoAnswer: BackendUnavailable,
            self._sdk.ServiceError: BackendError,
        }

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        problems = check(placement, CAPABILITIES)
        problems += store_problems(
            context.store_uri, is_mounted=True
        )  # the containers of this cloud run on this machine
        if problems:
            raise Unsupported(self.name, context.run_id, problems)
        label = context.native_name(reserve=6)
        request: dict[str, Any] = {"label": label, "creates": list(creates(context, placement, label, self._group))}
        request |= {"first_rank": context.first_rank} if context.first_rank else {}
        return Plan(self.name, context.run_id, placement.replicas, request)

    def handle(self, plan: Plan) -> RunHandle:
        first = plan.request.get("first_rank", 0)
        return RunHandle(self.name, self._endpoint, plan.request["label"], plan.replicas, first)

    def submit(self, plan: Plan) -> RunHandle:
        return submit_or_stop(self, plan)

    def start(self, plan: Plan) -> RunHandle:
        made: list[str] = []
        adopted: list[str] = []
        for body in plan.request["creates"]:
            made.append(body["name"])  # first: after an interrupt it may exist
            try:
                is_new = self._create(plan.run_id, body, made)
            except AtollError as exc:
                if not made and not adopted:
                    raise
                left = [*made, *adopted]
                message = f"run `{plan.run_id}`: {exc.message}"
                raise SubmitError(message, left_running=left, created=made, executor=self.name) from exc
            if not is_new:
                adopted.append(made.pop())
        return self.handle(plan)

    def status(self, handle: RunHandle) -> RunStatus:
        jobs = self._jobs(handle)
        found = {task["rank"]: (job, task) for job in jobs for task in job["tasks"]}
        for name in self._names(handle):
            # A list may lack a new job: only a lookup of its own name shows that there is none.
            if name not in {job["name"] for job in jobs} and (job := self._described(name)):
                found |= {task["rank"]: (job, task) for task in job["tasks"]}
        return RunStatus(tuple(replica_status(rank, found.get(rank)) for rank in range(handle.replicas)))

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        chosen = ranks_to_stop(self, handle, ranks)
        refusals = {name: self._stop(name) for name in self._names(handle, chosen)}
        deadline = Deadline(_STOP_S, self._clock)
        found = {name: self._wait_until_over(name, deadline, refusal) for name, refusal in refusals.items()}
        if problems := {name: error for name, error in found.items() if error is not None}:
            reasons = {name: error.message for name, error in problems.items()}
            raise StopFailed(f"run `{handle.native_id}`", reasons, executor=self.name) from next(
                iter(problems.values())
            )

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        if not 0 <= rank < handle.replicas:
            raise RunNotFound(f"run `{handle.native_id}` has no rank {rank}", executor=self.name, operation="logs")
        lines = self._lines(handle, rank, follow)
        if tail is None or follow:
            yield from lines
        else:
            everything = list(lines)
            yield from everything[len(everything) - min(tail, len(everything)) :]

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _call(self, verb: str, operation: str, **body: Any) -> dict[str, Any]:
        """One call to the service. Only this method translates errors of the SDK."""
        what = f"{operation} `{body.get('name') or body.get('label')}`"
        with translating(self._errors, what, executor=self.name, operation=operation):
            return dict(self._client.call(verb, **body))

    def _jobs(self, handle: RunHandle) -> list[dict[str, Any]]:
        """Every job of the run; none if the service does not know the run."""
        found: list[dict[str, Any]] = []
        page: int | None = 0
        while page is not None:
            try:
                answer = self._call("list", "status", label=handle.native_id, page=page)
            except RunNotFound:
                return []
            found += answer["jobs"]
            page = answer["next"]
        return found

    def _described(self, name: str) -> dict[str, Any] | None:
        try:
            return self._call("describe", "status", name=name)
        except RunNotFound:
            return None

    def _lines(self, handle: RunHandle, rank: int, follow: bool) -> Iterator[str]:
        job = handle.native_id if self._group else task_name(handle.native_id, rank)
        start, unfinished = 0, ""
        while True:
            is_over = not follow or self.status(handle).replicas[rank].state.is_terminal
            answer = self._call("log", "logs", name=job, rank=rank, start=start)
            *whole, unfinished = (unfinished + answer["text"]).split("\n")
            yield from whole
            if is_over and answer["next"] == start:
                break
            is_new, start = answer["next"] > start, answer["next"]
            if not is_new:
                self._clock.sleep(_POLL_S)
        if unfinished:
            yield unfinished

    # ── starting and stopping ───────────────────────────────────────────────────────────────────────────────────

    def _create(self, run_id: str, body: dict[str, Any], made: list[str]) -> bool:
        """Create the job. False if an earlier submit created it; a job whose answer was lost counts as new.

        If the service has surely created nothing, the name is taken out of `made`.
        """
        maybe_created = False
        for tries_left in reversed(range(_TRIES)):
            try:
                self._call("create", "submit", **body)
                return True
            except BackendError as exc:
                is_taken = isinstance(exc.__cause__, self._sdk.NameTaken)
                maybe_created = maybe_created or exc.retryable
                if not maybe_created:
                    made.remove(body["name"])
                if not is_taken and not exc.retryable:
                    raise
                present = self._described(body["name"])
                if present is not None and present["token"] != body["token"]:
                    raise Conflict(run_id, [f"`{body['name']}` was started with another request"]) from exc
                if present is not None:
                    if not maybe_created:
                        made.append(body["name"])
                    return maybe_created
                if is_taken or not tries_left:
                    raise
        raise InternalError("the last try neither returned nor raised")

    def _names(self, handle: RunHandle, ranks: Iterable[int] | None = None) -> list[str]:
        """The names of the jobs of these ranks, or of every rank, whether they were created or not."""
        if self._group:
            return [handle.native_id]
        return [task_name(handle.native_id, rank) for rank in (range(handle.replicas) if ranks is None else ranks)]

    def _stop(self, name: str) -> BackendError | None:
        """Request the stop of one job by its name, whether it exists or not. Returns the refusal, if any."""
        try:
            self._call("stop", "cancel", name=name)
        except BackendError as exc:
            return exc
        return None

    def _wait_until_over(self, name: str, deadline: Deadline, refusal: BackendError | None) -> BackendError | None:
        """None when a lookup of the name shows that the job is over or does not exist, else why it may still run."""
        pauses = backoff(_POLL_S, cap_s=1.0)
        while True:
            try:
                if _is_over(self._described(name)):
                    return None
            except BackendError as exc:
                return refusal or exc
            if refusal is not None or deadline.is_past:
                return refusal or BackendError("does not stop", executor=self.name, operation="cancel")
            deadline.sleep(next(pauses))


class ScriptedGroupExecutor(ScriptedExecutor):
    """Runs replicas in a scripted cloud: one job for all replicas of a run, which stop together."""

    capabilities: ClassVar[Capabilities] = replace(CAPABILITIES, cancels_together=True)
    _group: ClassVar[bool] = True


def creates(context: RunContext, placement: Placement, label: str, group: bool) -> Iterator[dict[str, Any]]:
    """The bodies of the create calls: one for each rank, or one for the group."""
    ranks = context.ranks(placement.replicas)
    tasks = [
        {"rank": place, "environment": rank_environment(rank, placement.rank_env)} for place, rank in enumerate(ranks)
    ]
    whole = {
        "label": label,
        "image": placement.image,
        "command": ["-P", "-m", "atoll.replica"],
        "cpus": placement.cpus,
        "memory_gib": placement.memory_gib,
        "gpu": str(placement.gpu) if placement.gpu else None,
        "max_runtime_s": placement.timeout_s,
        "stop_grace_s": placement.grace_s + _LATE_S,
        "max_restarts": placement.max_restarts,
        "environment": {
            **context.environment(placement.replicas),
            **placement.env,
            GRACE: str(placement.grace_s),
        },
        "secrets": {name: reference.partition(":")[2] for name, reference in placement.secrets.items()},
    }
    if group:
        yield _with_token({**whole, "name": label, "tasks": tasks})
    else:
        for task in tasks:
            yield _with_token({**whole, "name": task_name(label, task["rank"]), "tasks": [task]})


def task_name(label: str, rank: Any) -> str:
    return f"{label}-{rank:05d}"


def replica_status(rank: int, found: tuple[dict[str, Any], dict[str, Any]] | None) -> ReplicaStatus:
    """The status of one rank from the service's job and task."""
    if found is None:
        return ReplicaStatus(rank, ReplicaState.LOST, Reason.LOST, "the service no longer has this job")
    job, task = found
    state, reason = STATES[task["state"]]
    code = task["exit_code"]
    if state is ReplicaState.FAILED and reason is Reason.USER_ERROR and ending_signal(code):
        reason = Reason.KILLED
    return ReplicaStatus(
        rank,
        state,
        reason,
        f"the service says {task['state']}",
        code,
        attempt=task["attempt"],
        native_id=job["name"],
        started_at=task["started_at"],
        ended_at=task["ended_at"],
    )


def _with_token(body: dict[str, Any]) -> dict[str, Any]:
    """The body with a token that distinguishes this job from another job of the same name."""
    text = json.dumps(body, sort_keys=True).encode()
    return {**body, "token": hashlib.sha256(text).hexdigest()}


def _is_over(job: dict[str, Any] | None) -> bool:
    return job is None or all(STATES[task["state"]][0].is_terminal for task in job["tasks"])


def _sdk() -> Any:
    """The client library, which may not be installed."""
    try:
        return import_module("atoll.testing.scripted.wire")
    except ModuleNotFoundError as exc:
        raise MissingExtra("atoll.testing.scripted.wire", extra="scripted") from exc
