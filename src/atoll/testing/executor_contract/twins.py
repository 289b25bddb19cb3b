"""Clauses about starting once and only once: E18 E19."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from threading import Barrier

import pytest

from atoll import journal
from atoll.errors import BackendError, Conflict
from atoll.handle import RunHandle
from atoll.runs.run import Run
from atoll.status import ReplicaState
from atoll.testing.bench import (
    Bench,
    Call,
    Fault,
    Order,
    assert_each_rank_once,
    assert_ranks,
    cleared,
    entered,
    launched,
    let_go,
    order,
)
from atoll.testing.other_process import Elsewhere, spread, steps_of_submit, submit_at_once, submit_killed_at

AT_ONCE = 4


class TwinClauses:
    """Launchers that race, die or never hear the answer. Every process that enters user code is counted."""

    launchers: int = 16
    """How many submit one run at the same moment in E18."""
    most_steps: int = 12
    """How many of the steps of a launch are tried in E19: spread over all there are, most of them inside `submit`."""

    # E18 a lost create answer, or many launchers at once, give exactly N replicas

    def test_e18_sixteen_threads_submit_one_plan(self, bench: Bench) -> None:
        draft = order(bench, "hold", 2).draft(bench.executor(), bench.store_uri)
        journal.record_run(draft.store, draft.spec, executor=draft.executor.name)
        gate = Barrier(self.launchers)

        def submit() -> RunHandle:
            executor = bench.executor()
            gate.wait()
            return executor.submit(draft.plan)

        with cleared(bench, draft.spec.run_id), ThreadPoolExecutor(self.launchers) as pool:
            handles = [each.result() for each in [pool.submit(submit) for _ in range(self.launchers)]]
            assert len(set(handles)) == 1, f"one plan, several handles: {set(handles)}"
            run = Run(draft.spec, draft.executor, draft.store, handles[0])
            assert let_go(bench, run).state is ReplicaState.SUCCEEDED
            assert_each_rank_once(bench, run.id, 2)

    def test_e18_sixteen_launchers_in_four_processes(self, bench: Bench) -> None:
        ordered = order(bench, "hold", 2)
        with cleared(bench, ordered.run_id):
            handles = submit_at_once(bench, ordered, processes=4, threads=self.launchers // 4)
            assert len(handles) == self.launchers, "a launcher came back without a handle"
            assert len(set(handles)) == 1, f"one run, several handles: {set(handles)}"
            assert let_go(bench, _found(bench, ordered)).state is ReplicaState.SUCCEEDED
            assert_each_rank_once(bench, ordered.run_id, 2)

    def test_e18_a_later_submit_adopts_what_runs_and_what_is_over(self, bench: Bench) -> None:
        with launched(bench, "hold", 2) as run:
            plan = run.plan()
            assert bench.executor().submit(plan) == run.handle
            assert let_go(bench, run).state is ReplicaState.SUCCEEDED
            assert bench.executor().submit(plan) == run.handle
            assert run.executor.status(run.handle).state is ReplicaState.SUCCEEDED
            assert_each_rank_once(bench, run.id, 2)

    def test_e18_another_plan_of_the_same_name_is_not_adopted(self, bench: Bench) -> None:
        with launched(bench, "hold", 2) as run:
            other = bench.placed({"env": {"CONTRACT_OTHER": "content"}})
            draft = _replaced(run, other).draft(bench.executor(), bench.store_uri)
            with pytest.raises(Conflict):
                draft.executor.submit(draft.plan)
            assert let_go(bench, run).state is ReplicaState.SUCCEEDED
            assert_each_rank_once(bench, run.id, 2)

    @pytest.mark.parametrize(
        ("nth", "fault"),
        [(1, Fault.BROKEN), (2, Fault.BROKEN), (3, Fault.BROKEN), (1, Fault.SILENT), (3, Fault.SILENT)],
    )
    def test_e18_a_create_whose_answer_was_lost_starts_no_twin(self, bench: Bench, nth: int, fault: Fault) -> None:
        faults = bench.need_faults(Call.CREATE)
        if nth > bench.creates(3):
            pytest.skip("this backend starts a whole run with fewer calls")
        ordered = order(bench, "hold", 3)
        with cleared(bench, ordered.run_id):
            draft = ordered.draft(bench.executor(**bench.impatient), bench.store_uri)
            faults.fail(Call.CREATE, fault, nth=nth, times=1, after_effect=True)
            run = draft.submit()
            faults.heal()
            assert let_go(bench, run).state is ReplicaState.SUCCEEDED
            assert_each_rank_once(bench, run.id, 3)

    def test_e18_a_launcher_that_is_refused_leaves_the_run_of_another_alone(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.CREATE)
        with launched(bench, "hold", 2) as run:
            entered(bench, run)
            faults.fail(Call.CREATE, Fault.FORBIDDEN)
            with suppress(BackendError):
                bench.executor().submit(run.plan())
            faults.heal()
            states = [r.state for r in run.executor.status(run.handle).replicas]
            assert states == [ReplicaState.RUNNING] * 2, f"a second launcher ended the run of the first: {states}"
            assert let_go(bench, run).state is ReplicaState.SUCCEEDED

    # E19 a submit killed at any point is finished by the next launcher with the same run id

    def test_e19_a_launcher_killed_at_any_of_its_steps_is_followed_by_the_next(self, bench: Bench) -> None:
        rehearsal = order(bench, "hold", 2)
        with cleared(bench, rehearsal.run_id):
            steps = steps_of_submit(bench, rehearsal)

        def kill_and_finish(step: str) -> None:
            ordered = order(bench, "hold", 2)
            with cleared(bench, ordered.run_id):
                submit_killed_at(bench, ordered, step)
                self._finish(bench, ordered, f"killed at {step}")

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(kill_and_finish, spread(steps, self.most_steps)))

    def test_e19_a_launcher_killed_while_the_service_works_is_followed_by_the_next(self, bench: Bench) -> None:
        for point in bench.kill_points(2):
            ordered = order(bench, "hold", 2)
            other = Elsewhere(bench, "submit", order=asdict(ordered), threads=1)
            try:
                with cleared(bench, ordered.run_id):
                    other.until_ready()
                    bench.at_point(point, other.kill)
                    assert other.go().answer() is None, f"the launcher outlived {point}"
                    self._finish(bench, ordered, f"killed {point}")
            finally:
                other.end()

    def _finish(self, bench: Bench, ordered: Order, when: str) -> None:
        """The next launcher finds the run in a state it can name, and brings it to its end."""
        store, run_id = bench.store, ordered.run_id
        draft = ordered.draft(bench.executor(), bench.store_uri)
        found = Run(draft.spec, draft.executor, store, journal.read_handle(store, run_id))
        assert_ranks(found.status(), ordered.replicas)
        run = draft.submit()
        assert journal.read_handle(store, run_id) == run.handle, when
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED, when
        assert run.result().values == list(range(ordered.replicas)), when
        assert_each_rank_once(bench, run_id, ordered.replicas)


def _replaced(run: Run, placement: dict[str, object]) -> Order:
    """The order of a run, with another placement."""
    entry = run.spec.task.entry.rpartition(":")[2]
    return Order(run.id, entry, run.spec.placement.replicas, run.spec.task.args, placement)


def _found(bench: Bench, ordered: Order) -> Run:
    """The run, from what its launchers left in the store."""
    draft = ordered.draft(bench.executor(), bench.store_uri)
    return Run(draft.spec, draft.executor, draft.store, journal.read_handle(draft.store, ordered.run_id))
