"""The Executor port: starts replicas somewhere, and says how they are doing. Contract clauses E1-E19 are in
`atoll.testing.executor_contract`, one test each."""

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
    """The exact request a backend would be sent. JSON, deterministic, and free of secrets. (E1)"""

    executor: str
    run_id: str
    replicas: int
    request: dict[str, Any]
    notes: tuple[str, ...] = ()
    """What a person should know before saying yes; never part of the request."""

    def to_json(self) -> dict[str, Any]:
        return {
            "executor": self.executor,
            "run_id": self.run_id,
            "replicas": self.replicas,
            "request": self.request,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """The request, as a person reads it."""
        return json.dumps(self.request, indent=2, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True)
class Capabilities:
    """Facts about a backend, as data, so that one pure function can refuse with every reason."""

    code: frozenset[str] = frozenset({"bundle", "image"})
    """Ways replicas can get the user's code: `in_place`, `bundle`, `image`."""
    images: bool = True
    resources: bool = True
    """Whether `cpus` and `memory_gib` mean something here."""
    gpus: frozenset[str] | None = None
    """GPU names on offer; None = the adapter decides by itself."""
    secret_schemes: frozenset[str] = frozenset()
    max_restarts: int | None = None
    max_replicas: int | None = None
    network_between_replicas: bool = False


@dataclass(frozen=True)
class Stray:
    """Something a backend still runs for a run that is over."""

    handle: RunHandle
    native_id: str
    message: str


@dataclass(frozen=True)
class Check:
    """One finding of `doctor`."""

    name: str
    ok: bool
    message: str
    hint: str = ""


@runtime_checkable
class Executor(Protocol):
    """Starts replicas somewhere, and says how they are doing. Holds no state about runs."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        """The exact request. Pure; raises `Unsupported` with every reason. (E1 E2 E3 E16)"""
        ...

    def submit(self, plan: Plan) -> RunHandle:
        """Start every replica, or none. Adopts what an earlier submit of the same plan started. (E4 E10 E18 E19)"""
        ...

    def status(self, handle: RunHandle) -> RunStatus:
        """Every rank, in order, each with its reason. What the backend forgot is LOST. (E5 E6 E8 E9 E12 E17)"""
        ...

    def cancel(self, handle: RunHandle) -> None:
        """Stop every replica. Returns when nothing runs, and that was observed. Quiet if already over. (E7)"""
        ...

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        """Lines of one rank's output, without line ends. Raises `RunNotFound` for an unknown run. (E13)"""
        ...


@runtime_checkable
class Sweeper(Protocol):
    """An executor that can find strays at the service, by label."""

    def strays(self) -> list[Stray]:
        """What still runs for runs that are over. Asks the service, never our own records."""
        ...


@runtime_checkable
class HandleResolver(Protocol):
    """An executor that can say which run, in which store, a handle belongs to."""

    def origin(self, handle: RunHandle) -> RunContext | None: ...


@runtime_checkable
class Preflighter(Protocol):
    """An executor with reasons to refuse that a pure plan cannot see, such as a secret that is not there."""

    def preflight(self, plan: Plan) -> None:
        """Raise `ConfigError` with every such reason. Called before anything is recorded."""
        ...


@runtime_checkable
class Diagnoser(Protocol):
    """An executor that can say whether it would work here."""

    def diagnose(self) -> list[Check]: ...


def check(placement: Placement, capabilities: Capabilities) -> list[str]:
    """Every reason a backend with these capabilities cannot do this placement."""
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
