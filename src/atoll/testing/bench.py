"""The bench of an executor: what the executor contract needs to know about one adapter and the backend behind it.

A subclass builds the adapter, names the store, and implements as many hooks as it can. The suite skips the tests that
need a hook which the subclass does not have, and the skip names the hook. `LocalBench` is the bench of the local
executor. `Order` is one run of the contract's jobs as plain values, so that any process can launch it.
"""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.request import url2pathname

import pytest

from atoll._time import Deadline, backoff
from atoll.context import RUN_ID, STORE
from atoll.errors import InternalError
from atoll.executors.base import Executor, Plan
from atoll.handle import RunHandle
from atoll.registry import open_store, store_uri
from atoll.replica import processes
from atoll.replica.spool import Spool
from atoll.runs.prepare import Draft, prepare
from atoll.runs.run import Run
from atoll.runs.wait import wait
from atoll.status import RunStatus
from atoll.stores.base import Store
from atoll.testing import contract_jobs

JOBS = "atoll.testing.contract_jobs"


@dataclass(frozen=True)
class Order:
    """One run of the contract's jobs; `entry` is the name of the job."""

    run_id: str
    entry: str
    replicas: int = 1
    args: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)

    def draft(self, executor: Executor, store_uri: str) -> Draft:
        """Check and plan the run."""
        return prepare(
            f"{JOBS}:{self.entry}",
            on=executor,
            store=store_uri,
            run_id=self.run_id,
            replicas=self.replicas,
            args=self.args,
            **self.placement,
        )


class Call(StrEnum):
    """The kinds of calls that an adapter makes to its service."""

    CREATE = "create"
    DESCRIBE = "describe"
    """The calls that `status` makes: describe or list."""
    STOP = "stop"
    LOG = "log"


class Fault(StrEnum):
    """How a call to the service can fail."""

    UNAUTHORIZED = "401"
    FORBIDDEN = "403"
    NOT_FOUND = "404"
    CONFLICT = "409"
    THROTTLED = "429"
    BROKEN = "500"
    SILENT = "no answer"


class Faults(Protocol):
    """Makes calls to the service fail."""

    calls: frozenset[Call]
    """The calls that this service has."""

    def fail(
        self, call: Call, fault: Fault, *, nth: int = 1, times: int | None = None, after_effect: bool = False
    ) -> None:
        """Fail such calls, from the `nth` from now on. With `after_effect` only the answer is lost."""
        ...

    def heal(self) -> None:
        """Remove every fault."""
        ...


@dataclass
class Bench:
    """An adapter, and hooks into the backend behind it. Each test gets a new one."""

    path: str
    """`module:Class` of the adapter."""
    store_uri: str
    """A fresh store that replicas can reach."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the adapter, as JSON: another process builds the adapter from them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that another process needs besides those of this one."""
    placement: Mapping[str, Any] = field(default_factory=lambda: {"grace_s": 10.0})
    """The placement of every run of the suite; clauses add to it."""
    changes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Field of `Placement` -> further values that this backend accepts, for E2."""
    secret: tuple[str, str] | None = None
    """A reference to a secret that this backend can read, and its value."""
    limit_s: float = 1.0
    """The time limit of the runs in E12."""
    patience_s: float = 60.0
    """How long anything may take before the test fails."""
    impatient: Mapping[str, Any] = field(default_factory=dict)
    """Settings with which the adapter soon stops retrying a service that fails, throttles or does not answer."""
    tells_exit_codes: bool = True
    """False if the service does not report exit codes; then only the replica's own record must have them."""
    extra: str = ""
    """The extra that installs the SDK; empty if the adapter needs none."""
    sdk: Sequence[str] = ()
    """Modules of that SDK."""
    faults: Faults | None = None

    def executor(self, **settings: Any) -> Executor:
        """A new adapter, built as another process would build it."""
        module, _, name = self.path.partition(":")
        made = getattr(import_module(module), name)(**{**self.settings, **settings})
        if not isinstance(made, Executor):
            raise InternalError(f"{self.path} does not have the methods of an Executor")
        return made

    def placed(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """The bench's placement with more fields; variables and secrets are merged with its own."""
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
        """What runs or is queued for the run. By default: processes of this machine with the run's variables."""
        return [str(pid) for pid in processes_with({RUN_ID: run_id, STORE: self.store_uri})]

    def kill_replica(self, run_id: str, rank: int) -> None:
        """Kill a replica. By default: SIGKILL to the process that runs the user's code."""
        pids = [start.pid for start in contract_jobs.starts(self.store, run_id) if start.rank == rank]
        os.kill(pids[-1], signal.SIGKILL)

    def stranger(self, handle: RunHandle) -> RunHandle:
        """The handle of a run that this backend never had."""
        last = "0" if handle.native_id[-1] != "0" else "1"
        return replace(handle, native_id=handle.native_id[:-1] + last)

    def forget(self, handle: RunHandle) -> None:
        """Make the backend forget a run that is over."""
        pytest.skip("this bench cannot make its backend forget a run")

    def queue_held(self) -> AbstractContextManager[None]:
        """While this is open, the backend starts no run. By default it may: the cancel is then only early."""
        return nullcontext()

    def start_broken(self, plan: Plan, rank: int) -> AbstractContextManager[None]:
        """While this is open, the backend cannot start this rank of the plan. By default: its create is refused."""
        return _refused(self.need_faults(Call.CREATE), min(rank + 1, self.creates(plan.replicas)))

    def creates(self, replicas: int) -> int:
        """How many create calls a run takes: one for each replica, or one for a group."""
        return replicas

    def calls(self) -> int:
        """How many calls the service has received."""
        pytest.skip("this backend has no service that could count calls")

    def most_status_calls(self, replicas: int) -> int:
        """How many calls one `status` may make. With a group or a list call, fewer than one for each replica."""
        return 1 + replicas // 100

    def kill_points(self, replicas: int) -> Sequence[str]:
        """Moments of a submit, as the service sees them, at which the suite kills the launcher."""
        pytest.skip("this backend has no service that could see a launcher die")

    def at_point(self, point: str, action: Callable[[], None]) -> None:
        """Call `action` when the service reaches that moment."""
        raise InternalError(f"this bench has no kill point `{point}`")

    def lists_late(self) -> AbstractContextManager[None]:
        """While this is open, no list of the service shows a new replica; a lookup of its name does."""
        pytest.skip("this backend has no list that could lack a replica")

    def hide_once(self, handle: RunHandle, rank: int) -> None:
        """Leave this replica out of the next list."""
        pytest.skip("this backend has no list that could lack a replica")

    def store_lost(self) -> AbstractContextManager[None]:
        """While this is open, every request to the store fails. By default: a file is in place of its folder."""
        if not self.store_uri.startswith("file://"):
            pytest.skip("this bench cannot make its store fail")
        return _replaced_by_a_file(Path(url2pathname(self.store_uri.removeprefix("file://"))))

    def need_faults(self, *calls: Call) -> Faults:
        """The faults; skips the test if the backend has no service, or the service has no such calls."""
        if self.faults is None:
            pytest.skip("this backend has no wire on which a call could fail")
        if missing := set(calls) - self.faults.calls:
            pytest.skip(f"this service has no call to {', '.join(sorted(missing))}")
        return self.faults


@contextmanager
def _replaced_by_a_file(folder: Path) -> Iterator[None]:
    kept = folder.with_name(f"{folder.name}-kept")
    folder.rename(kept)
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        kept.rename(folder)


@contextmanager
def _refused(faults: Faults, nth: int) -> Iterator[None]:
    faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=nth)
    try:
        yield
    finally:
        faults.heal()


def processes_with(variables: Mapping[str, str]) -> list[int]:
    """Running processes that were started with all of these environment variables."""
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


T = TypeVar("T")


def order(
    bench: Bench, entry: str, replicas: int = 1, *, run_id: str = "", args: Mapping[str, Any] | None = None, **more: Any
) -> Order:
    """A run of one of the contract's jobs under the bench's own placement."""
    run_id = run_id or f"{entry.replace('_', '-')}-{uuid.uuid4().hex[:8]}"
    return Order(run_id, entry, replicas, args or {}, bench.placed(more))


def plan_of(bench: Bench, ordered: Order, executor: Executor | None = None) -> Plan:
    return ordered.draft(executor or bench.executor(), bench.store_uri).plan


@contextmanager
def launched(
    bench: Bench, entry: str, replicas: int = 1, *, executor: Executor | None = None, **options: Any
) -> Iterator[Run]:
    """Launch a run of real replicas. When the block ends, its replicas are ended too."""
    ordered = order(bench, entry, replicas, **options)
    with cleared(bench, ordered.run_id):
        yield ordered.draft(executor or bench.executor(), bench.store_uri).submit()


@contextmanager
def cleared(bench: Bench, *run_ids: str) -> Iterator[None]:
    """At the end release the replicas of these runs and wait for their end, without the adapter: it may be broken."""
    try:
        yield
    finally:
        for run_id in run_ids:
            contract_jobs.let_go(bench.store, run_id)
        deadline, pauses = Deadline(bench.patience_s), backoff(0.01, cap_s=0.1)
        while any(bench.running(run_id) for run_id in run_ids) and not deadline.is_past:
            deadline.sleep(next(pauses))


def until(bench: Bench, what: str, condition: Callable[[], T]) -> T:
    """Wait until the condition is true, and return its value. Fails the test after `patience_s`."""
    deadline, pauses = Deadline(bench.patience_s), backoff(0.01, cap_s=0.1)
    while not (found := condition()):
        assert not deadline.is_past, f"not within {bench.patience_s:g} s: {what}"
        deadline.sleep(next(pauses))
    return found


def over(bench: Bench, run: Run) -> RunStatus:
    """Wait until every rank is over, and return the backend's status."""
    return wait(lambda: run.executor.status(run.handle), timeout_s=bench.patience_s)


def cancelled(bench: Bench, run: Run) -> RunStatus:
    """Cancel the run, and return its status. A backend that forgets what is cancelled needs the record of the run."""
    if bench.executor().capabilities.forgets_cancelled:
        run.cancel()
        return run.status(progress=False)
    run.executor.cancel(run.handle)
    return bench.executor().status(run.handle)


def entered(bench: Bench, run: Run) -> None:
    """Wait until every rank is in user code."""
    wanted = set(range(run.spec.placement.replicas))
    until(bench, "every rank is in user code", lambda: _ranks(bench, run.id) >= wanted)


def logged(bench: Bench, run: Run, rank: int, wanted: Sequence[str]) -> None:
    """Wait until the log is exactly these lines; a service may deliver them late."""
    found: list[str] = []

    def is_settled() -> bool:
        found[:] = bench.executor().logs(run.handle, rank)
        return found == wanted or found != wanted[: len(found)]

    with suppress(AssertionError):
        until(bench, "the log is all there", is_settled)
    assert found == wanted


def gone(bench: Bench, run_id: str) -> None:
    """Wait until nothing of the run is left, without asking the adapter."""
    until(bench, "nothing of the run is left", lambda: not bench.running(run_id))


def let_go(bench: Bench, run: Run) -> RunStatus:
    """Let replicas in `hold` return, and wait for the end."""
    contract_jobs.let_go(bench.store, run.id)
    return over(bench, run)


def assert_each_rank_once(bench: Bench, run_id: str, replicas: int) -> None:
    """Assert that exactly one process of each rank entered user code."""
    gone(bench, run_id)
    found = Counter(start.rank for start in contract_jobs.starts(bench.store, run_id))
    assert found == Counter(range(replicas)), f"processes by rank: {dict(sorted(found.items()))}, wanted one each"


def assert_ranks(status: RunStatus, replicas: int) -> None:
    ranks = [replica.rank for replica in status.replicas]
    assert ranks == list(range(replicas)), f"status has ranks {ranks}, wanted 0 to {replicas - 1} in order"


def verdicts(status: RunStatus) -> Sequence[tuple[str, str, int | None]]:
    """State, reason and exit code of each rank: they must not change once they are terminal."""
    return [(str(r.state), str(r.reason), r.exit_code) for r in status.replicas]


def _ranks(bench: Bench, run_id: str) -> set[int]:
    return {start.rank for start in contract_jobs.starts(bench.store, run_id)}


@dataclass
class LocalBench(Bench):
    """The local executor, with spools and store in a folder of the test."""

    @classmethod
    def below(cls, folder: Path) -> LocalBench:
        """The caller sets the variable `CONTRACT_VAULT` in this process to the secret."""
        return cls(
            "atoll.executors.local.executor:LocalExecutor",
            store_uri(str(folder / "store")),
            {"root": str(folder / "spools")},
            secret=("env:CONTRACT_VAULT", "hunter2 hunter3"),
        )

    def forget(self, handle: RunHandle) -> None:
        shutil.rmtree(f"/{handle.native_id}")

    @contextmanager
    def start_broken(self, plan: Plan, rank: int) -> Iterator[None]:
        """Put a file where the supervisor creates the folder of this rank."""
        folder = Spool(plan.request["label"]).attempt(rank, 0).root.parent
        folder.parent.mkdir(parents=True)
        folder.touch()
        yield
