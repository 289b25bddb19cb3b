"""The Executor port: starts replicas on a backend and reports their status. `atoll.testing.executor_contract` tests
the contract clauses E1-E27. `Starter`, `Sweeper`, `HandleResolver`, `Preflighter` and `Diagnoser` are optional."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol, runtime_checkable

from atoll.context import RunContext
from atoll.errors import AtollError, BackendError, ConfigError, StopFailed, SubmitError, did_you_mean
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import RunStatus

log = logging.getLogger("atoll.executors")


@dataclass(frozen=True)
class Plan:
    """The exact request for a backend. JSON, deterministic, and free of secrets. (E1)"""

    executor: str
    run_id: str
    replicas: int
    request: dict[str, Any]
    notes: tuple[str, ...] = ()
    """What a user should know before launching, such as the price; not part of the request."""

    def to_json(self) -> dict[str, Any]:
        return {
            "executor": self.executor,
            "run_id": self.run_id,
            "replicas": self.replicas,
            "request": self.request,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """The request as indented JSON."""
        return json.dumps(self.request, indent=2, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True)
class Capabilities:
    """What a backend supports. `check` compares a placement with it and returns every problem."""

    code: frozenset[str] = frozenset({"bundle", "image"})
    """How replicas can get the user's code: `in_place`, `bundle`, `image`."""
    images: bool = True
    resources: bool = True
    """Whether the backend uses `cpus` and `memory_gib`."""
    gpus: frozenset[str] | None = None
    """GPU names on offer; None if the adapter checks them itself."""
    secret_schemes: frozenset[str] = frozenset()
    max_restarts: int | None = None
    max_replicas: int | None = None
    network_between_replicas: bool = False


@dataclass(frozen=True)
class Stray:
    """Something that carries Atoll's label and that a backend still runs."""

    handle: RunHandle
    native_id: str
    message: str
    context: RunContext | None = None
    """Set if the backend does not know whether the run is over: the record of the run has to say it."""


@dataclass(frozen=True)
class Check:
    """One finding of `doctor`."""

    name: str
    ok: bool
    message: str
    hint: str = ""
    is_input: bool = False
    """The check failed because of the user's input, such as a setting, before any call was made."""


@runtime_checkable
class Executor(Protocol):
    """Starts replicas and reports their status. Holds no state about runs."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        """The exact request. Pure; raises `Unsupported` with every reason. (E1 E2 E3 E16)"""
        ...

    def submit(self, plan: Plan) -> RunHandle:
        """Start every replica, or none. Adopts what an earlier submit of the same plan started. (E4 E10 E18 E19 E21)"""
        ...

    def status(self, handle: RunHandle) -> RunStatus:
        """Every rank, in order, with its reason. A rank unknown to the backend is LOST. (E5 E6 E8 E9 E12 E17)"""
        ...

    def cancel(self, handle: RunHandle) -> None:
        """Stop every replica by its name, whether it was created or not. Never creates. (E7 E20 E21 E22 E26)

        Returns after a lookup of every name has shown that none runs, else raises `StopFailed`. No error if the run
        is over or unknown.
        """
        ...

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        """Lines of one rank's output, without line ends. Raises `RunNotFound` for an unknown run. (E13)"""
        ...


@runtime_checkable
class Starter(Protocol):
    """An executor with names that follow from the plan, which leaves the undoing of a failed start to its caller.

    The caller can so record that a launch is undone before any replica is stopped, and can stop replicas of a launch
    that another process did not finish. `submit_or_stop` is the `submit` of such an executor.
    """

    def handle(self, plan: Plan) -> RunHandle:
        """The handle of the run that this plan starts. Pure, and the same before and after the start. (E22)"""
        ...

    def start(self, plan: Plan) -> RunHandle:
        """Start every replica, or adopt it. If some may have been created, raise `SubmitError` with their names. (E21)

        Any other `BackendError` that is not `retryable`, and any `ConfigError`, means that nothing was created.
        """
        ...


@runtime_checkable
class Sweeper(Protocol):
    """An executor that can find strays on its backend, by label."""

    def strays(self) -> list[Stray]:
        """What runs with Atoll's label, except what surely belongs to a run that goes on. Reads no records."""
        ...


@runtime_checkable
class HandleResolver(Protocol):
    """An executor that can find the run id and the store of a handle."""

    def origin(self, handle: RunHandle) -> RunContext | None:
        """The run and its store, or None if the backend no longer knows the run."""
        ...


@runtime_checkable
class Preflighter(Protocol):
    """An executor with checks that a pure plan cannot do, such as whether a secret exists."""

    def preflight(self, plan: Plan) -> None:
        """Raise `ConfigError` with every problem. Called before the run is recorded."""
        ...


@runtime_checkable
class Diagnoser(Protocol):
    """An executor that can check its own setup on this machine."""

    def diagnose(self) -> list[Check]:
        """One finding for each part of the setup."""
        ...


def submit_or_stop(executor: Any, plan: Plan) -> RunHandle:
    """Start every replica, or stop what was started: the `submit` of an executor that is a `Starter`."""
    try:
        handle: RunHandle = executor.start(plan)
    except BaseException as why:
        if has_created_nothing(why):
            raise
        stop_and_raise(executor, executor.handle(plan), plan.run_id, why)
    return handle


def has_created_nothing(why: BaseException) -> bool:
    """Whether a start that failed with this error has surely created nothing itself."""
    if isinstance(why, SubmitError):
        return not why.created  # only replicas of another launcher exist
    return isinstance(why, ConfigError) or (isinstance(why, BackendError) and not why.retryable)


def stop_and_raise(
    executor: Executor, handle: RunHandle, run_id: str, why: BaseException, *, note: str = ""
) -> NoReturn:
    """Stop the replicas of a start that failed, and raise an error that says so and names what may still run."""
    log.info("run %s: the start failed: stop %s", run_id, handle)
    left = _stop(executor, handle)
    if not left and not isinstance(why, AtollError):
        why.add_note(f"the launch of run `{run_id}` was undone; nothing is left running{note}")
        raise why
    cause = why.__cause__ if isinstance(why, SubmitError) and why.__cause__ is not None else why
    message = cause.message if isinstance(cause, AtollError) else f"interrupted by {type(cause).__name__}"
    hint = f"`atoll cancel '{handle}'` tries again to stop them" if left else getattr(why, "hint", None)
    text = f"run `{run_id}`: {message.removeprefix(f'run `{run_id}`: ')}{note}"
    raise SubmitError(text, left_running=left, executor=executor.name, hint=hint) from cause


def _stop(executor: Executor, handle: RunHandle) -> tuple[str, ...]:
    """Stop every replica; returns what may still run."""
    try:
        executor.cancel(handle)
    except StopFailed as exc:
        return exc.left_running
    except (BackendError, KeyboardInterrupt) as exc:
        log.warning("could not stop %s: %s", handle, exc)
        return (str(handle),)
    return ()


def check(placement: Placement, capabilities: Capabilities) -> list[str]:
    """Every reason why a backend with these capabilities cannot run this placement."""
    problems = []
    most = capabilities.max_replicas
    if most is not None and placement.replicas > most:
        problems.append(f"replicas={placement.replicas}: this backend starts at most {most}")
    if placement.image is not None and not capabilities.images:
        problems.append(f"image=`{placement.image}`: this backend runs no images; leave it out")
    sizes = {} if capabilities.resources else {"cpus": placement.cpus, "memory_gib": placement.memory_gib}
    problems.extend(
        f"{name}={size:g}: replicas here share one machine; leave it out"
        for name, size in sizes.items()
        if size is not None
    )
    if placement.gpu is not None and capabilities.gpus is not None and placement.gpu.name not in capabilities.gpus:
        offered = sorted(capabilities.gpus)
        meant = did_you_mean(placement.gpu.name, offered)
        problems.append(f"gpu=`{placement.gpu}`: offered here: {', '.join(offered) or 'none'}{meant}")
    if capabilities.max_restarts is not None and placement.max_restarts > capabilities.max_restarts:
        problems.append(f"max_restarts={placement.max_restarts}: at most {capabilities.max_restarts} here")
    for name, reference in placement.secrets.items():
        scheme = reference.partition(":")[0]
        if scheme not in capabilities.secret_schemes:
            known = ", ".join(f"`{s}:`" for s in sorted(capabilities.secret_schemes)) or "none"
            problems.append(f"secrets.{name}=`{scheme}:…`: this backend reads {known}")
    return problems


def store_problems(store_uri: str, *, is_mounted: bool) -> list[str]:
    """Why replicas on other machines than this one cannot reach the store. `is_mounted` is the user's setting."""
    scheme = store_uri.partition(":")[0]
    if scheme == "memory":
        return [f"store=`{store_uri}`: replicas are on other machines, which cannot see the memory of this one"]
    if scheme in ("file", "local") and not is_mounted:
        remedy = "use a bucket, or set store_is_mounted=true if every replica sees this path on a shared file system"
        return [f"store=`{store_uri}`: replicas are on other machines, which cannot see this folder; {remedy}"]
    return []
