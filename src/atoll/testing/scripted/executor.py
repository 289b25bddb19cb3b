"""ScriptedExecutor: the adapter of the scripted cloud. It passes the whole contract although the service fails.

It is also an example for new adapters: it does what the adapter of a real service has to do. Pure functions build the
requests, the five verbs send them, and `_call` translates each error of the vendor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any, ClassVar

from atoll._time import SYSTEM_CLOCK, Clock, Deadline, backoff
from atoll.context import GRACE, RunContext, rank_environment
from atoll.errors import (
    AtollError,
    AuthError,
    BackendError,
    BackendUnavailable,
    ConfigError,
    Conflict,
    InternalError,
    MissingExtra,
    RunNotFound,
    SubmitError,
    Unsupported,
    translating,
)
from atoll.executors.base import Capabilities, Plan, check, store_problems
from atoll.handle import RunHandle
from atoll.names import native_name
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
    """Runs replicas in a scripted cloud: one job for each, or with `group` one job for all."""

    name: ClassVar[str] = "scripted"
    capabilities: ClassVar[Capabilities] = CAPABILITIES

    @checks_settings
    def __init__(
        self,
        *,
        endpoint: Annotated[str, TEXT],
        group: bool = False,
        timeout_s: Annotated[float, SECONDS_ABOVE_0] = 30.0,
        clock: Annotated[Clock, CLOCK] = SYSTEM_CLOCK,
    ) -> None:
        self._sdk = _sdk()
        self._client = self._sdk.ScriptedClient(endpoint, timeout_s=timeout_s)
        self._endpoint, self._group, self._clock = endpoint, group, clock
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
        label = native_name(context.run_id, context.store_uri, reserve=6)
        request = {"label": label, "creates": list(creates(context, placement, label, self._group))}
        return Plan(self.name, context.run_id, placement.replicas, request)

    def submit(self, plan: Plan) -> RunHandle:
        made: list[str] = []
        adopted: list[str] = []
        for body in plan.request["creates"]:
            try:
                is_new = self._create(plan.run_id, body)
            except BaseException as exc:
                if not _is_definite(exc):
                    made.append(body["name"])
                self._roll_back(plan.run_id, made, adopted, exc)
                raise
            (made if is_new else adopted).append(body["name"])
        return RunHandle(self.name, self._endpoint, plan.request["label"], plan.replicas)

    def status(self, handle: RunHandle) -> RunStatus:
        found = {task["rank"]: (job, task) for job in self._jobs(handle) for task in job["tasks"]}
        return RunStatus(tuple(replica_status(rank, found.get(rank)) for rank in range(handle.replicas)))

    def cancel(self, handle: RunHandle) -> None:
        self._stop_all(lambda: self._jobs(handle), handle.native_id)

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

    def _create(self, run_id: str, body: dict[str, Any]) -> bool:
        """Create the job. False if an earlier submit created it; a job whose answer was lost counts as new."""
        for tries_left in reversed(range(_TRIES)):
            try:
                self._call("create", "submit", **body)
                return True
            except BackendError as exc:
                is_taken = isinstance(exc.__cause__, self._sdk.NameTaken)
                if not is_taken and not exc.retryable:
                    raise
                present = self._described(body["name"])
                if present is not None and present["token"] != body["token"]:
                    raise Conflict(run_id, [f"`{body['name']}` was started with another request"]) from exc
                if present is not None:
                    return not is_taken or tries_left < _TRIES - 1
                if is_taken or not tries_left:
                    raise
        raise InternalError("the last try neither returned nor raised")

    def _roll_back(self, run_id: str, made: Sequence[str], adopted: Sequence[str], why: BaseException) -> None:
        """Stop the jobs that this submit may have created. Raises `SubmitError` if there were any, or some are left."""
        left = list(adopted)  # jobs of another launcher; this submit does not stop them
        for name in made:
            try:
                self._stop_all(partial(self._at_most_one, name), name)
            except BackendError:
                left.append(name)
        if isinstance(why, AtollError) and (made or left):
            raise SubmitError(f"run `{run_id}`: {why.message}", left_running=left, executor=self.name) from why

    def _at_most_one(self, name: str) -> list[dict[str, Any]]:
        present = self._described(name)
        return [] if present is None else [present]

    def _stop_all(self, find: Callable[[], list[dict[str, Any]]], what: str) -> None:
        """Stop every job that is not over, and wait until all are."""
        for job in find():
            if not _is_over(job):
                self._stop(job["name"])
        deadline, pauses = Deadline(_STOP_S, self._clock), backoff(_POLL_S, cap_s=1.0)
        while not all(map(_is_over, find())):
            if deadline.is_past:
                raise BackendError(f"`{what}` does not stop", executor=self.name, operation="cancel")
            deadline.sleep(next(pauses))

    def _stop(self, name: str) -> None:
        """Stop one job. No error if a second look shows that the job is over or deleted."""
        try:
            self._call("stop", "cancel", name=name)
        except BackendError as exc:
            if not isinstance(exc.__cause__, self._sdk.NameTaken | self._sdk.NoSuchJob):
                raise
            if not all(map(_is_over, self._at_most_one(name))):
                raise


def creates(context: RunContext, placement: Placement, label: str, group: bool) -> Iterator[dict[str, Any]]:
    """The bodies of the create calls: one for each rank, or one for the group."""
    tasks = [
        {"rank": rank, "environment": rank_environment(rank, placement.rank_env)} for rank in range(placement.replicas)
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
    if state is ReplicaState.FAILED and reason is Reason.USER_ERROR and code is not None and code > 128:
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


def _is_over(job: dict[str, Any]) -> bool:
    return all(STATES[task["state"]][0].is_terminal for task in job["tasks"])


def _is_definite(exc: BaseException) -> bool:
    """Whether a create that failed with this error has surely created nothing."""
    return isinstance(exc, ConfigError) or (isinstance(exc, BackendError) and not exc.retryable)


def _sdk() -> Any:
    """The client library, which may not be installed."""
    try:
        return import_module("atoll.testing.scripted.wire")
    except ModuleNotFoundError as exc:
        raise MissingExtra("atoll.testing.scripted.wire", extra="scripted") from exc
