"""The Executor port: starts replicas on a backend and reports their status. `atoll.testing.executor_contract` tests
the contract clauses E1-E30. `Starter`, `Replacer`, `Restarter`, `Watcher`, `AttemptReader`, `QueueLimiter`,
`CancelTeller`, `StoreReader`, `Sweeper`, `HandleResolver`, `Preflighter`, `Pricer`, `Rated`, `Composite`, `Linker`,
`Diagnoser`, `PermissionLister` and `Deployer` are optional."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from atoll.context import RunContext
from atoll.errors import ConfigError, InvalidSpec, did_you_mean
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import RunStatus

OTHER_MACHINE = "other_machine"
"""The `reason` of a `BackendError`: the handle names a machine that this process cannot ask."""


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
    cancels_together: bool = False
    """Whether the backend can only stop all replicas of a run together."""
    fails_together: bool = False
    """Whether one failed replica ends all replicas of the run: the others are then CANCELLED."""
    forgets_cancelled: bool = False
    """Whether `cancel` removes the run from the backend: its ranks are then LOST here, and the record says the rest."""


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
    """The check failed because of the user's input, such as a setting."""


@dataclass(frozen=True)
class Deployment:
    """What `deploy` left at the service."""

    name: str
    version: str
    """The version of Atoll in it."""
    message: str
    url: str = ""
    """A page about it; empty if there is none."""


@runtime_checkable
class Executor(Protocol):
    """Starts replicas and reports their status. Holds no state about runs."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        """The exact request. Pure; raises `Unsupported` with every reason. (E1 E2 E3 E16)

        The executor may run only a part of the run: its replicas have the ranks `context.ranks(placement.replicas)` and
        the world size of the context. The other methods count the replicas of the handle from 0. (E30)
        """
        ...

    def submit(self, plan: Plan) -> RunHandle:
        """Start every replica, or none. Adopts what an earlier submit of the same plan started. (E4 E10 E18 E19 E21)"""
        ...

    def status(self, handle: RunHandle) -> RunStatus:
        """Every rank, in order, with its reason. A rank unknown to the backend is LOST. (E5 E6 E8 E9 E12 E17)"""
        ...

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        """Stop every replica by its name, whether it was created or not. Never creates. (E7 E20 E21 E22 E26)

        Returns after a lookup of every name has shown that none runs, else raises `StopFailed`. No error if the run
        is over or unknown. With `ranks`, all this concerns only these ranks: the others keep running, and a rank that
        was stopped is not started again. `ranks_to_stop` checks `ranks` before any call. (E28)
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
class Restarter(Protocol):
    """An executor whose service cannot limit the restarts of a run, so that a process that waits for the run does it.

    A failed run with restarts left is then PENDING, with the reason `restarting`, until such a process restarts it.
    """

    def restart(self, handle: RunHandle, *, is_cancelled: Callable[[], bool] | None = None) -> bool:
        """Start all replicas again if they wait for that; two callers start them once. False if there is nothing to do.

        The replicas of the attempt before have ended when it returns. `is_cancelled` is asked when they have: a run
        that was cancelled meanwhile is not started.
        """
        ...


class RunWatch(Protocol):
    """One run while a process waits for it. (E29)"""

    def status(self) -> RunStatus:
        """As `Executor.status`. It may cost less while nothing changes, and is never older than its call, except for
        changes that `wait` will report."""
        ...

    def wait(self, seconds: float) -> None:
        """Return soon after something of the run has changed since the last `status`, at the latest after `seconds`.

        It may return too early. It raises nothing: without answers of the backend it is a pause.
        """
        ...


@runtime_checkable
class Watcher(Protocol):
    """An executor that notices changes of a run without asking for its status again and again."""

    def watch(self, handle: RunHandle) -> AbstractContextManager[RunWatch]:
        """Watch a run until the block ends; nothing of the watch is left then. Makes no call before `status`. (E29)"""
        ...


@runtime_checkable
class AttemptReader(Protocol):
    """An executor whose backend keeps the output of earlier attempts of a rank."""

    def attempt_logs(self, handle: RunHandle, rank: int, attempt: int, *, tail: int | None = None) -> Iterator[str]:
        """Lines of one attempt, from 0, as `logs`. Raises `RunNotFound` if the backend does not have them."""
        ...


@runtime_checkable
class CancelTeller(Protocol):
    """An executor that stops replicas also without a cancel, such as for an eviction or because another one failed."""

    def is_cancelled(self, handle: RunHandle) -> bool:
        """Whether somebody has cancelled the run, as far as the backend still knows it."""
        ...


@runtime_checkable
class StoreReader(Protocol):
    """An executor whose replicas report to the store whatever the backend does, so that a status needs no backend."""

    def stored_status(self, handle: RunHandle, problem: str) -> RunStatus:
        """Every rank as the store knows it. `problem` says why the backend was not asked: it is part of each row that
        is not over."""
        ...


@runtime_checkable
class QueueLimiter(Protocol):
    """An executor with a limit for the time that replicas wait, which its service cannot enforce by itself.

    Only a process that waits for the run enforces it; reading a status never ends a run.
    """

    def queue_left_s(self, handle: RunHandle) -> float:
        """How much longer replicas may wait; 0 or less if one has waited for too long, infinite without a limit, and
        minus infinity if they can never start."""
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
class Pricer(Protocol):
    """An executor whose service tells its prices."""

    def prices(self, plan: Plan) -> list[str]:
        """What the run of this plan costs, as notes for the user; the cost itself is last. Asks the service."""
        ...


@runtime_checkable
class Rated(Protocol):
    """An executor that knows what a replica costs."""

    def hourly_usd(self, plan: Plan, placement: Placement) -> float | None:
        """The price of one replica for an hour, in dollars; None if it is not known. May ask the service."""
        ...


class PartHandle(NamedTuple):
    """A part of a run: its executor, its handle, and its first rank."""

    executor: Executor
    handle: RunHandle
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.handle.replicas)


@runtime_checkable
class Composite(Protocol):
    """An executor whose replicas are at several other executors."""

    def parts_of(self, handle: RunHandle) -> list[PartHandle]:
        """The parts of a run, in the order of their ranks. Makes no call."""
        ...

    def part_prices(self, plan: Plan, placement: Placement) -> list[float | None]:
        """The price of one replica of each part for an hour, in dollars; None where it is not known."""
        ...


@runtime_checkable
class Linker(Protocol):
    """An executor whose service has web pages about replicas."""

    def links(self, handle: RunHandle, rank: int) -> dict[str, str]:
        """The addresses of pages about a replica, by name, such as `console` and `logs`. Pure: makes no call."""
        ...


@runtime_checkable
class Diagnoser(Protocol):
    """An executor that can check its own setup on this machine."""

    def diagnose(self) -> list[Check]:
        """One finding for each part of the setup."""
        ...


@dataclass(frozen=True)
class Permissions:
    """What an account needs to launch runs on a backend."""

    document: dict[str, Any]
    """In the form of the backend, such as a Role."""
    text: str
    """The same with comments, as an administrator applies it."""


@runtime_checkable
class PermissionLister(Protocol):
    """An executor that knows which permissions its runs need."""

    def permissions(self) -> Permissions:
        """The least permissions of a launcher with these settings. Makes no call."""
        ...


@runtime_checkable
class Deployer(Protocol):
    """An executor whose service runs only what was deployed to it before."""

    def deploy(self) -> Deployment:
        """Deploy what the launches of these settings need, in place of an earlier deployment of the same name."""
        ...


def check(placement: Placement, capabilities: Capabilities) -> list[str]:
    """Every reason why a backend with these capabilities cannot run this placement."""
    problems = []
    if placement.parts:
        names = "+".join(f"{part.on}:{part.replicas}" for part in placement.parts)
        problems.append(f"parts=`{names}`: this backend has all replicas of its run; use the executor `several`")
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


def ranks_to_stop(executor: Executor, handle: RunHandle, ranks: Sequence[int] | None) -> list[int]:
    """The ranks that `executor.cancel(handle, ranks)` has to stop, in order: all if `ranks` is None.

    Raises `InvalidSpec` for an empty list or a rank that the run does not have. If the backend can only stop all
    replicas together, raises `ConfigError` with the reason `cancels_together` unless every rank is named.
    """
    everyone = range(handle.replicas)
    if ranks is None:
        return list(everyone)
    given = list(ranks) if isinstance(ranks, Collection) else []
    if not given or any(type(rank) is not int or rank not in everyone for rank in given):
        rule = f"one or more of the ranks 0 to {handle.replicas - 1} of this run"
        raise InvalidSpec(f"the cancel of `{handle.native_id}`", [f"ranks={ranks!r}: {rule}"])
    chosen = sorted(set(given))
    if executor.capabilities.cancels_together and len(chosen) < handle.replicas:
        raise ConfigError(
            f"`{executor.name}` can only stop all replicas of a run together, not single ranks",
            hint="cancel the whole run: `atoll cancel RUN` without `--rank`",
            reason="cancels_together",
        )
    return chosen


def store_problems(store_uri: str, *, is_mounted: bool) -> list[str]:
    """Why replicas on other machines than this one cannot reach the store. `is_mounted` is the user's setting."""
    scheme = store_uri.partition(":")[0]
    if scheme == "memory":
        return [f"store=`{store_uri}`: replicas are on other machines, which cannot see the memory of this one"]
    if scheme in ("file", "local") and not is_mounted:
        remedy = "use a bucket, or set store_is_mounted=true if every replica sees this path on a shared file system"
        return [f"store=`{store_uri}`: replicas are on other machines, which cannot see this folder; {remedy}"]
    return []
