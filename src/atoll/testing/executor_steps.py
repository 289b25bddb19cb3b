"""What clauses of the executor contract do again and again: launch, wait, let go, and look."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from atoll._time import Deadline, backoff
from atoll.executors.base import Executor, Plan
from atoll.runs.run import Run
from atoll.runs.wait import wait
from atoll.status import RunStatus
from atoll.testing import contract_jobs
from atoll.testing.executor_bench import Bench
from atoll.testing.executor_order import Order

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
    """A run of real replicas. Whatever happens, nothing of it is left when the block is over."""
    ordered = order(bench, entry, replicas, **options)
    with cleared(bench, ordered.run_id):
        yield ordered.draft(executor or bench.executor(), bench.store_uri).submit()


@contextmanager
def cleared(bench: Bench, *run_ids: str) -> Iterator[None]:
    """At the end let replicas of these runs go, and give them time to. Without the adapter: it may be the culprit."""
    try:
        yield
    finally:
        for run_id in run_ids:
            contract_jobs.let_go(bench.store, run_id)
        deadline, pauses = Deadline(bench.patience_s), backoff(0.01, cap_s=0.1)
        while any(bench.running(run_id) for run_id in run_ids) and not deadline.is_past:
            deadline.sleep(next(pauses))


def until(bench: Bench, what: str, condition: Callable[[], T]) -> T:
    """What the condition says once it is true of something; it fails the test when patience is at an end."""
    deadline, pauses = Deadline(bench.patience_s), backoff(0.01, cap_s=0.1)
    while not (found := condition()):
        assert not deadline.is_past, f"not within {bench.patience_s:g} s: {what}"
        deadline.sleep(next(pauses))
    return found


def over(bench: Bench, run: Run) -> RunStatus:
    """The backend's own word once every rank is over."""
    return wait(lambda: run.executor.status(run.handle), timeout_s=bench.patience_s)


def entered(bench: Bench, run: Run) -> None:
    """Returns when every rank is in user code."""
    wanted = set(range(run.spec.placement.replicas))
    until(bench, "every rank is in user code", lambda: _ranks(bench, run.id) >= wanted)


def logged(bench: Bench, run: Run, rank: int, wanted: Sequence[str]) -> None:
    """Returns when the log is exactly these lines; a service may take its time to deliver them."""
    found: list[str] = []

    def is_settled() -> bool:
        found[:] = bench.executor().logs(run.handle, rank)
        return found == wanted or found != wanted[: len(found)]

    with suppress(AssertionError):
        until(bench, "the log is all there", is_settled)
    assert found == wanted


def gone(bench: Bench, run_id: str) -> None:
    """Returns when nothing of the run is left, as seen without the adapter."""
    until(bench, "nothing of the run is left", lambda: not bench.running(run_id))


def let_go(bench: Bench, run: Run) -> RunStatus:
    """Let replicas in `hold` return, and wait for the end."""
    contract_jobs.let_go(bench.store, run.id)
    return over(bench, run)


def assert_each_rank_once(bench: Bench, run_id: str, replicas: int) -> None:
    """Exactly N replicas ever entered user code: one for each rank."""
    gone(bench, run_id)
    found = Counter(start.rank for start in contract_jobs.starts(bench.store, run_id))
    assert found == Counter(range(replicas)), f"processes by rank: {dict(sorted(found.items()))}, wanted one each"


def assert_ranks(status: RunStatus, replicas: int) -> None:
    ranks = [replica.rank for replica in status.replicas]
    assert ranks == list(range(replicas)), f"status has ranks {ranks}, wanted 0 to {replicas - 1} in order"


def words(status: RunStatus) -> Sequence[tuple[str, str, int | None]]:
    """State, reason and exit code of each rank: what must not change once it is terminal."""
    return [(str(r.state), str(r.reason), r.exit_code) for r in status.replicas]


def _ranks(bench: Bench, run_id: str) -> set[int]:
    return {start.rank for start in contract_jobs.starts(bench.store, run_id)}
