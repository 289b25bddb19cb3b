"""The Executor port: starts replicas on a backend and reports their status. `atoll.testing.executor_contract` tests
the contract clauses E1-E27. `Starter`, `Replacer`, `Sweeper`, `HandleResolver`, `Preflighter` and `Diagnoser`
are optional."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from atoll.context import RunContext
from atoll.errors import did_you_mean
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import RunStatus


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
    that another process did not finish. `atoll.executors.undo.submit_or_stop` is its `submit`.
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
class Replacer(Protocol):
    """An executor that can start a rank again on another machine after its machine was lost with the supervisor.

    `status`, `logs` and `cancel` then mean the newest replica of each rank. `cancel` also stops a replacement that no
    list contains yet.
    """

    def replace(self, plan: Plan, rank: int, ended: str) -> str | None:
        """Start a replica of this rank in the place of `ended`, the native id of one that has failed, or adopt it.

        Returns its native id, which follows from the arguments, so that two callers start one replica; None if `ended`
        cannot be replaced, because its restarts or its time are used up.
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
