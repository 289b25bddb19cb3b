"""The bench: all that the executor contract needs to know about one adapter and the backend behind it.

A subclass says how to build the adapter and where replicas meet, and gives as many of the hooks as it can. A hook
that it does not give skips the tests that need it, and the skip says why.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import pytest

from atoll.context import RUN_ID, STORE
from atoll.errors import InternalError
from atoll.executors.base import Executor, Plan
from atoll.handle import RunHandle
from atoll.registry import open_store
from atoll.replica import processes
from atoll.stores.base import Store
from atoll.testing import contract_jobs


class Call(StrEnum):
    """What an adapter asks of its service, in the suite's words."""

    CREATE = "create"
    DESCRIBE = "describe"
    """Whatever `status` asks: one by one, or a list."""
    STOP = "stop"
    LOG = "log"


class Fault(StrEnum):
    """How a service can answer instead."""

    UNAUTHORIZED = "401"
    FORBIDDEN = "403"
    NOT_FOUND = "404"
    CONFLICT = "409"
    THROTTLED = "429"
    BROKEN = "500"
    SILENT = "no answer"


class Faults(Protocol):
    """Makes the service fail on cue."""

    calls: frozenset[Call]
    """The calls that this service has."""

    def fail(
        self, call: Call, fault: Fault, *, nth: int = 1, times: int | None = None, after_effect: bool = False
    ) -> None:
        """Meet such calls with the fault, from the `nth` on from now; `after_effect`, only the answer is lost."""
        ...

    def heal(self) -> None:
        """Forget every fault."""
        ...


@dataclass
class Bench:
    """An adapter, and hooks into the backend behind it. Made afresh for every test."""

    path: str
    """`module:Class` of the adapter."""
    store_uri: str
    """A fresh store that replicas can reach."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the adapter, as JSON: another process builds it from the same."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables another process needs on top of ours."""
    placement: Mapping[str, Any] = field(default_factory=lambda: {"grace_s": 10.0})
    """What every run of the suite is launched with; clauses add to it."""
    changes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Field of `Placement` -> further values this backend takes, for E2."""
    secret: tuple[str, str] | None = None
    """A reference to a secret that this backend can read, and the value behind it."""
    limit_s: float = 1.0
    """The shortest time limit worth trying."""
    patience_s: float = 60.0
    """How long anything may take before the test fails."""
    impatient: Mapping[str, Any] = field(default_factory=dict)
    """Settings under which the adapter soon gives up on a service that breaks, throttles or does not answer."""
    tells_exit_codes: bool = True
    """False if the service has no word for them; then only the replica's own record must have them."""
    extra: str = ""
    """The extra that brings the SDK; empty if the adapter needs none."""
    sdk: Sequence[str] = ()
    """Modules of that SDK."""
    faults: Faults | None = None

    def executor(self, **settings: Any) -> Executor:
        """A fresh adapter, as another process would build it."""
        module, _, name = self.path.partition(":")
        made = getattr(import_module(module), name)(**{**self.settings, **settings})
        if not isinstance(made, Executor):
            raise InternalError(f"{self.path} does not have the methods of an Executor")
        return made

    def placed(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """The bench's placement with more to it; variables and secrets are added to its own."""
        merged = {name: {**self.placement.get(name, {}), **more[name]} for name in ("env", "secrets") if name in more}
        return {**self.placement, **more, **merged}

    @property
    def store(self) -> Store:
        return open_store(self.store_uri)

    def elsewhere(self, name: str) -> Bench:
        """The same backend with another, empty store."""
        return replace(self, store_uri=f"{self.store_uri}-{name}")

    # ── hooks: what is seen or done without the adapter ─────────────────────────────────────────────────────────

    def running(self, run_id: str) -> list[str]:
        """What runs for the run, or waits to. By default: processes of this machine with the run's variables."""
        return [str(pid) for pid in processes_with({RUN_ID: run_id, STORE: self.store_uri})]

    def kill_replica(self, run_id: str, rank: int) -> None:
        """End a replica without a word. By default: SIGKILL to the process that runs the user's code."""
        pids = [start.pid for start in contract_jobs.starts(self.store, run_id) if start.rank == rank]
        os.kill(pids[-1], signal.SIGKILL)

    def stranger(self, handle: RunHandle) -> RunHandle:
        """The handle of a run that this backend never had."""
        last = "0" if handle.native_id[-1] != "0" else "1"
        return replace(handle, native_id=handle.native_id[:-1] + last)

    def forget(self, handle: RunHandle) -> None:
        """Let the backend lose every trace of a run that is over."""
        pytest.skip("this bench cannot make its backend forget a run")

    def queue_held(self) -> AbstractContextManager[None]:
        """While this is open, the backend starts nothing. By default it may: the cancel is then only early."""
        return nullcontext()

    def start_broken(self, plan: Plan, rank: int) -> AbstractContextManager[None]:
        """While this is open, the backend cannot start this rank of the plan. By default: its create is refused."""
        return _refused(self.need_faults(Call.CREATE), min(rank + 1, self.creates(plan.replicas)))

    def creates(self, replicas: int) -> int:
        """How many create calls a run takes: one for each replica, or one for a group."""
        return replicas

    def calls(self) -> int:
        """How many calls the service has had."""
        pytest.skip("this backend has no service that could count calls")

    def most_status_calls(self, replicas: int) -> int:
        """How many calls one `status` may take. For a group, and where there is a list, not the number of replicas."""
        return 1 + replicas // 100

    def kill_points(self, replicas: int) -> Sequence[str]:
        """Moments of a submit, as the service sees them, at which a launcher may die."""
        pytest.skip("this backend has no service that could see a launcher die")

    def at_point(self, point: str, action: Callable[[], None]) -> None:
        """Do `action` when the service reaches that moment."""
        raise InternalError(f"this bench has no kill point `{point}`")

    def need_faults(self, *calls: Call) -> Faults:
        """The faults, or a skip if the backend has no service that could fail at these calls."""
        if self.faults is None:
            pytest.skip("this backend has no wire on which a call could fail")
        if missing := set(calls) - self.faults.calls:
            pytest.skip(f"this service has no call to {', '.join(sorted(missing))}")
        return self.faults


@contextmanager
def _refused(faults: Faults, nth: int) -> Iterator[None]:
    faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=nth)
    try:
        yield
    finally:
        faults.heal()


def processes_with(variables: Mapping[str, str]) -> list[int]:
    """Living processes that were started with all of these environment variables."""
    wanted = {f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in variables.items()}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if wanted <= set(environment.split(b"\0")) and not processes.is_dead(int(entry.name)):
            found.append(int(entry.name))
    return found
