"""Clauses about a run whose replicas are on several backends: E30."""

from __future__ import annotations

from atoll import journal
from atoll.context import RunContext
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.runs.wait import wait
from atoll.spec import Placement
from atoll.status import ReplicaState
from atoll.testing import contract_jobs
from atoll.testing.bench import Bench, Order, assert_ranks, cleared, order, until

WORLD_SIZE = 5
NAMES = ["CONTRACT_INDEX", "REPLICA_RANK", "WORLD_SIZE"]


class PartClauses:
    """A part of a run has the ranks and the number of replicas of the whole run, and its own verbs count from 0."""

    def test_e30_a_part_has_the_ranks_and_the_size_of_the_run(self, bench: Bench) -> None:
        ordered = _ordered(bench)
        with cleared(bench, ordered.run_id):
            handle = _start(bench, ordered, 2)
            assert RunHandle.parse(str(handle)) == handle
            assert_ranks(bench.executor().status(handle), 2)
            _enter(bench, ordered, {2, 3})
            for place, rank in enumerate((2, 3)):
                wanted = [f"CONTRACT_INDEX={rank}", f"REPLICA_RANK={rank}", f"WORLD_SIZE={WORLD_SIZE}"]
                assert _log(bench, handle, place, lines=3) == wanted
            contract_jobs.let_go(bench.store, ordered.run_id)
            ended = wait(lambda: bench.executor().status(handle), timeout_s=bench.patience_s)
            assert [replica.state for replica in ended.replicas] == [ReplicaState.SUCCEEDED] * 2
        assert _stored(bench, ordered) == [2, 3], "the records of the run have other ranks"

    def test_e30_two_parts_on_one_backend_are_stopped_apart(self, bench: Bench) -> None:
        ordered = _ordered(bench)
        with cleared(bench, ordered.run_id):
            first, second = _start(bench, ordered, 0), _start(bench, ordered, 2)
            assert first != second, "two parts have one handle"
            _enter(bench, ordered, {0, 1, 2, 3})
            bench.executor().cancel(first)
            states = [replica.state for replica in bench.executor().status(second).replicas]
            assert states == [ReplicaState.RUNNING] * 2, f"cancelling one part reached the other: {states}"
            wanted = [ReplicaState.SUCCEEDED] * 2
            if not bench.executor().capabilities.cancels_together:
                bench.executor().cancel(second, [1])
                wanted[1] = ReplicaState.CANCELLED
            contract_jobs.let_go(bench.store, ordered.run_id)
            ended = wait(lambda: bench.executor().status(second), timeout_s=bench.patience_s)
            assert [replica.state for replica in ended.replicas] == wanted, "another rank of the part was stopped"
            bench.executor().cancel(second)
            assert not bench.running(ordered.run_id), "something runs after cancel returned"


def _ordered(bench: Bench) -> Order:
    return order(bench, "show", WORLD_SIZE, args={"names": NAMES}, rank_env="CONTRACT_INDEX")


def _start(bench: Bench, ordered: Order, first_rank: int) -> RunHandle:
    """Start two replicas as a part of the run, and record the run first."""
    executor, placement = bench.executor(), {**ordered.placement, "replicas": 2}
    spec = ordered.draft(executor, bench.store_uri).spec
    journal.record_run(bench.store, spec, executor=executor.name)
    context = RunContext(spec.run_id, bench.store_uri, first_rank=first_rank, world_size=WORLD_SIZE)
    return executor.submit(executor.plan(context, Placement(**placement)))


def _enter(bench: Bench, ordered: Order, ranks: set[int]) -> None:
    def has_entered() -> bool:
        found = {start.rank for start in contract_jobs.starts(bench.store, ordered.run_id)}
        assert found <= ranks, f"the part has ranks {sorted(ranks)}, and replicas have the ranks {sorted(found)}"
        return found == ranks

    until(bench, f"ranks {sorted(ranks)} are in user code", has_entered)


def _log(bench: Bench, handle: RunHandle, place: int, *, lines: int) -> list[str]:
    """The log of a replica, once it has so many lines: a service may deliver them late."""

    def found() -> list[str]:
        have = list(bench.executor().logs(handle, place))
        return have if len(have) >= lines else []

    return until(bench, f"the log of replica {place} has {lines} lines", found)


def _stored(bench: Bench, ordered: Order) -> list[int]:
    keys = RunKeys(ordered.run_id)
    return sorted(keys.parse_outcome(key)[0] for key in bench.store.list(keys.outcomes_prefix()))
