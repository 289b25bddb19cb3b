"""Clauses about stopping: what may run is stopped, or the caller gets its name. E20 to E28."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from atoll import journal
from atoll._threads import Unanswered, answer_within
from atoll.errors import AtollError, BackendError, ConfigError, StopFailed, SubmitError, WaitTimeout
from atoll.executors.base import Plan, Starter
from atoll.handle import RunHandle
from atoll.replica import processes
from atoll.runs.run import Run
from atoll.status import ReplicaState
from atoll.testing import contract_jobs
from atoll.testing.bench import Bench, Call, Fault, Order, cleared, entered, launched, let_go, order, over
from atoll.testing.other_process import Interrupted, spread, steps_of_submit, submit_interrupted_at

AT_ONCE = 4


class StoppingClauses:
    """A store that is lost, answers that are lost, lists that lag, stops that are refused, launchers that are
    interrupted. Most tests hold the replicas in the queue of the backend, if it has one."""

    most_interrupts: int = 6
    """At how many steps of a launch E24 interrupts the launcher."""

    # E20 a stop needs no store

    def test_e20_cancel_by_handle_needs_no_store(self, bench: Bench) -> None:
        with _held(bench, 2) as run, bench.store_lost():
            bench.executor().cancel(RunHandle.parse(str(run.handle)))
            assert not bench.running(run.id), "something runs after cancel returned"

    def test_e20_a_run_is_stopped_though_the_store_cannot_record_it(self, bench: Bench) -> None:
        with _held(bench, 2) as run, bench.store_lost():
            run.cancel()
            assert not bench.running(run.id), "something runs after cancel returned"

    # E21 what may exist is stopped or named

    @pytest.mark.parametrize("nth", [1, 2])
    def test_e21_a_replica_that_a_lost_answer_may_have_created_is_stopped(self, bench: Bench, nth: int) -> None:
        """A create takes effect, its answer is lost, and the service refuses every further create."""
        faults = bench.need_faults(Call.CREATE)
        if bench.creates(3) == 1:
            pytest.skip("this backend starts a whole run with one call")
        draft = order(bench, "hold", 3).draft(bench.executor(), bench.store_uri)
        with cleared(bench, draft.spec.run_id), bench.queue_held():
            faults.fail(Call.CREATE, Fault.BROKEN, nth=nth, times=1, after_effect=True)
            faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=nth + 1)
            with pytest.raises(BackendError) as caught:
                draft.submit()
            faults.heal()
            left = caught.value.left_running if isinstance(caught.value, SubmitError) else ()
            assert not left, f"these could have been stopped: {caught.value}"
            assert not bench.running(draft.spec.run_id), f"something runs, and the error says: {caught.value}"

    def test_e21_a_replica_that_a_lost_answer_may_have_created_is_named(self, bench: Bench) -> None:
        """The same, and the service refuses every stop."""
        faults = bench.need_faults(Call.CREATE, Call.STOP)
        if bench.creates(3) == 1:
            pytest.skip("this backend starts a whole run with one call")
        draft = order(bench, "hold", 3).draft(bench.executor(), bench.store_uri)
        with cleared(bench, draft.spec.run_id), bench.queue_held():
            faults.fail(Call.CREATE, Fault.BROKEN, nth=2, times=1, after_effect=True)
            faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=3)
            faults.fail(Call.STOP, Fault.FORBIDDEN)
            with pytest.raises(BackendError) as caught:
                draft.submit()
            faults.heal()
            left = caught.value.left_running if isinstance(caught.value, SubmitError) else ()
            running = set(bench.running(draft.spec.run_id))
            assert len(running) == 2
            assert running <= set(left), f"{running} run, and the error says: {caught.value}"
            bench.executor().cancel(_handle(bench, draft.plan))

    def test_e21_cancel_stops_replicas_that_no_list_shows(self, bench: Bench) -> None:
        with bench.lists_late(), _held(bench, 2) as run:
            bench.executor().cancel(run.handle)
            assert not bench.running(run.id), "something runs after cancel returned"

    # E22 cancel never creates

    def test_e22_the_handle_follows_from_the_plan_and_cancel_needs_no_more(self, bench: Bench) -> None:
        draft = order(bench, "hold", 2).draft(bench.executor(), bench.store_uri)
        handle = _handle(bench, draft.plan)
        with cleared(bench, draft.spec.run_id), bench.queue_held():
            bench.executor().cancel(handle)
            assert not bench.running(draft.spec.run_id), "cancel has started a run"
            run = draft.submit()
            assert run.handle == handle == _handle(bench, draft.plan), "the handle changed when the run was started"
            bench.executor().cancel(handle)
            assert not bench.running(run.id), "something runs after cancel returned"

    def test_e22_cancel_of_a_half_launched_run_creates_nothing(self, bench: Bench) -> None:
        """The last create was refused, no replica could be stopped, and from then on no create works."""
        faults = bench.need_faults(Call.CREATE, Call.STOP)
        draft = order(bench, "hold", 3).draft(bench.executor(), bench.store_uri)
        with cleared(bench, draft.spec.run_id), bench.queue_held():
            faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=bench.creates(3))
            faults.fail(Call.STOP, Fault.FORBIDDEN)
            with pytest.raises(BackendError):
                draft.submit()
            faults.heal()
            faults.fail(Call.CREATE, Fault.FORBIDDEN)
            bench.executor().cancel(_handle(bench, draft.plan))
            faults.heal()
            assert not bench.running(draft.spec.run_id), "something runs after cancel returned"

    # E23 an undone launch leaves a clean name

    def test_e23_after_an_undo_the_same_run_id_starts_every_replica(self, bench: Bench) -> None:
        ordered = order(bench, "hold", 2)
        draft = ordered.draft(bench.executor(), bench.store_uri)
        with cleared(bench, ordered.run_id):
            with bench.queue_held():
                with bench.start_broken(draft.plan, 1), pytest.raises(BackendError):
                    draft.submit()
                run = ordered.draft(bench.executor(), bench.store_uri).submit()
                _assert_alive(bench, run, "an undone launch was launched again")
            assert let_go(bench, run).state is ReplicaState.SUCCEEDED
            assert run.result().values == [0, 1]

    def test_e23_two_launchers_race_and_the_report_of_each_is_true(self, bench: Bench) -> None:
        """The service refuses the last create of the first launcher while a second one starts the same run."""
        faults, last = bench.need_faults(Call.CREATE), bench.creates(2)
        ordered, reports = order(bench, "hold", 2), list[Run | AtollError]()

        def launch() -> None:
            try:
                reports.append(ordered.draft(bench.executor(), bench.store_uri).submit())
            except AtollError as exc:
                reports.append(exc)

        with cleared(bench, ordered.run_id), bench.queue_held():
            bench.at_point(f"before create {last}", launch)
            faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=last, times=1)
            launch()
            faults.heal()
            assert len(reports) == 2
            for report in reports:
                _assert_true(bench, report, ordered)

    # E24 an interrupted launcher leaves a handle, nothing, or names

    def test_e24_ctrl_c_at_any_step_leaves_a_handle_or_nothing_or_names(self, bench: Bench) -> None:
        rehearsal = order(bench, "hold", 2)
        with cleared(bench, rehearsal.run_id):
            steps = steps_of_submit(bench, rehearsal)

        def interrupt(step: str, ordered: Order) -> None:
            self._account_for(bench, ordered, submit_interrupted_at(bench, ordered, step), f"at {step}")

        orders = {step: order(bench, "hold", 2) for step in spread(steps, self.most_interrupts)}
        with (
            cleared(bench, *(ordered.run_id for ordered in orders.values())),
            bench.queue_held(),
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            list(pool.map(interrupt, orders.keys(), orders.values()))

    def _account_for(self, bench: Bench, ordered: Order, ended: Interrupted, when: str) -> None:
        handle = journal.read_handle(bench.store, ordered.run_id)
        if handle is not None:
            draft = ordered.draft(bench.executor(), bench.store_uri)
            _assert_alive(bench, Run(draft.spec, draft.executor, draft.store, handle), f"interrupted {when}")
        elif running := bench.running(ordered.run_id):
            assert set(running) <= set(ended.left_running), f"interrupted {when}: {running} run, and nothing names them"

    # E25 deadlines

    @pytest.mark.parametrize("fault", [Fault.SILENT, Fault.THROTTLED])
    def test_e25_a_wait_keeps_its_deadline_whatever_the_service_does(self, bench: Bench, fault: Fault) -> None:
        faults = bench.need_faults(Call.DESCRIBE)
        with _held(bench, 2) as run:
            faults.fail(Call.DESCRIBE, fault)
            with pytest.raises(WaitTimeout) as caught:
                _within_patience(bench, lambda: run.wait(0.2))
            faults.heal()
            assert caught.value.status is None, "a service that does not answer has told no status"

    # E26 a refusal to stop names every replica that it concerns

    def test_e26_a_refusal_to_stop_names_every_replica(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.STOP)
        with _held(bench, 3) as run:
            faults.fail(Call.STOP, Fault.FORBIDDEN)
            with pytest.raises(StopFailed) as caught:
                bench.executor().cancel(run.handle)
            faults.heal()
            running = set(bench.running(run.id))
            assert running == set(caught.value.left_running), f"{running} run, and the error says: {caught.value}"
            bench.executor().cancel(run.handle)
            assert not bench.running(run.id), "something runs after cancel returned"

    # E27 one list without a replica does not make it LOST

    def test_e27_a_replica_that_one_list_lacks_is_not_lost(self, bench: Bench) -> None:
        with _held(bench, 2) as run:
            for rank in (0, 1):
                bench.hide_once(run.handle, rank)
                _assert_alive(bench, run, f"one list lacks rank {rank}")

    # E28 single ranks are stopped, or the backend says that it cannot

    def test_e28_cancel_of_one_rank_stops_it_alone_or_is_refused(self, bench: Bench) -> None:
        with launched(bench, "hold", 3) as run:
            entered(bench, run)
            if _cancels_together(bench):
                _assert_refused(bench, run, [1])
                return
            for _ in range(2):
                bench.executor().cancel(run.handle, [1])
                states = _states(bench, run)
                assert states[1] is ReplicaState.CANCELLED, f"rank 1 is {states[1]} after cancel returned"
                others = (states[0], states[2])
                assert not any(state.is_terminal for state in others), f"the other ranks are {others}"
            assert _processes_of(bench, run, 1) == [], "a process of rank 1 runs after cancel returned"
            assert contract_jobs.farewells(bench.store, run.id) == [1], "rank 1, and no other, is asked to stop"
            let_go(bench, run)
            assert _states(bench, run) == [ReplicaState.SUCCEEDED, ReplicaState.CANCELLED, ReplicaState.SUCCEEDED]

    def test_e28_cancel_of_a_rank_is_quiet_before_its_start_and_after_its_end(self, bench: Bench) -> None:
        chosen = [0, 1, 2] if _cancels_together(bench) else [2]
        draft = order(bench, "hold", 3).draft(bench.executor(), bench.store_uri)
        with cleared(bench, draft.spec.run_id):
            with bench.queue_held():
                run = draft.submit()
                bench.executor().cancel(run.handle, chosen)
                bench.executor().cancel(run.handle, chosen)
            let_go(bench, run)
            ended = _states(bench, run)
            succeeded = [rank for rank, state in enumerate(ended) if state is ReplicaState.SUCCEEDED]
            assert succeeded == [rank for rank in range(3) if rank not in chosen], f"the ranks are {ended}"
            bench.executor().cancel(run.handle, chosen)
            bench.executor().cancel(run.handle, [0, 1, 2])
            bench.executor().cancel(bench.stranger(run.handle), chosen)
            assert _states(bench, run) == ended, "a cancel after the end has changed how a rank ended"

    def test_e28_ranks_that_the_run_does_not_have_are_refused(self, bench: Bench) -> None:
        with _held(bench, 3) as run:
            for ranks in ([], [3], [-1], [0, 3]):
                _assert_refused(bench, run, ranks)

    def test_e28_a_refusal_to_stop_names_only_these_ranks(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.STOP)
        chosen = [0, 1, 2] if _cancels_together(bench) else [1]
        with _held(bench, 3) as run:
            faults.fail(Call.STOP, Fault.FORBIDDEN)
            with pytest.raises(StopFailed) as caught:
                bench.executor().cancel(run.handle, chosen)
            faults.heal()
            left = caught.value.left_running
            assert len(left) == 1, f"one job was not stopped, and the error says: {caught.value}"
            assert set(left) <= set(bench.running(run.id)), f"what the error names does not run: {caught.value}"

    def test_e28_the_others_of_a_strict_run_end_and_name_the_cancelled_rank(self, bench: Bench) -> None:
        with launched(bench, "one_round", 3, args={"absent": 2}) as run:
            entered(bench, run)
            if _cancels_together(bench):
                _assert_refused(bench, run, [2])
                run.cancel([0, 1, 2])
                assert [r.state for r in run.status(progress=False).replicas] == [ReplicaState.CANCELLED] * 3
                return
            run.cancel([2])
            over(bench, run)
            ends = run.result().outcomes
            states = [str(end.state) for end in ends]
            assert states == ["failed", "failed", "cancelled"], f"the ranks ended {states}"
            for end in ends[:2]:
                assert end.error is not None
                assert end.error.type.endswith("QuorumLost"), end.error.message
                assert end.error.ranks == (2,), end.error.message


@contextmanager
def _held(bench: Bench, replicas: int) -> Iterator[Run]:
    """A run whose replicas wait in the queue of the backend. When the block ends, they start and end."""
    draft = order(bench, "hold", replicas).draft(bench.executor(), bench.store_uri)
    with cleared(bench, draft.spec.run_id), bench.queue_held():
        yield draft.submit()


def _cancels_together(bench: Bench) -> bool:
    return bench.executor().capabilities.cancels_together


def _states(bench: Bench, run: Run) -> list[ReplicaState]:
    return [replica.state for replica in bench.executor().status(run.handle).replicas]


def _processes_of(bench: Bench, run: Run, rank: int) -> list[int]:
    """The processes of this rank that entered user code on this machine and run."""
    here = os.uname().nodename
    found = [start for start in contract_jobs.starts(bench.store, run.id) if (start.rank, start.host) == (rank, here)]
    return [start.pid for start in found if not processes.is_dead(start.pid)]


def _assert_refused(bench: Bench, run: Run, ranks: list[int]) -> None:
    """Assert that a cancel of these ranks is an error of the caller's input, and that it stops nothing."""
    try:
        bench.executor().cancel(run.handle, ranks)
    except ConfigError:
        _assert_alive(bench, run, f"the cancel of ranks {ranks} was refused")
    else:
        raise AssertionError(f"the cancel of ranks {ranks} was not refused")


def _handle(bench: Bench, plan: Plan) -> RunHandle:
    """The handle that follows from the plan, from a fresh adapter."""
    executor = bench.executor()
    if not isinstance(executor, Starter):
        pytest.skip("this adapter learns the names of its replicas from the service")
    return executor.handle(plan)


def _assert_alive(bench: Bench, run: Run, when: str) -> None:
    """Assert that no rank of the handle is over."""
    states = [replica.state for replica in bench.executor().status(run.handle).replicas]
    assert not any(state.is_terminal for state in states), f"{when}, and its replicas are {[str(s) for s in states]}"


def _assert_true(bench: Bench, report: Run | AtollError, ordered: Order) -> None:
    """A launcher that returned has a run whose replicas run; one that failed names what runs."""
    if isinstance(report, Run):
        _assert_alive(bench, report, "the other launcher of this run failed")
        return
    named = set(report.left_running) if isinstance(report, SubmitError) else set()
    running = set(bench.running(ordered.run_id))
    assert running <= named, f"{running} run, and the error says: {report}"


def _within_patience(bench: Bench, call: Callable[[], object]) -> None:
    """Let the call raise; fail if it takes as long as a call without an answer."""
    try:
        answer_within(min(bench.patience_s, 20.0), call)
    except Unanswered:
        raise AssertionError("the wait did not end at its deadline") from None
