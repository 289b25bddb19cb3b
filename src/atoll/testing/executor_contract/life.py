"""Clauses about the states of replicas: E5 E6 E7 E8 E12 E29."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import ClassVar

import pytest

from atoll._threads import Unanswered, answer_within
from atoll._time import Deadline
from atoll.errors import RunNotFound
from atoll.executors.base import RunWatch, Watcher
from atoll.result import ReplicaOutcome
from atoll.runs.run import Run
from atoll.runs.wait import watching
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus
from atoll.testing import contract_jobs
from atoll.testing.bench import Bench, assert_ranks, cancelled, entered, launched, let_go, over, until, verdicts

NO_FAILURE = (
    Reason.OK,
    Reason.WAITING,
    Reason.STARTING,
    Reason.RESTARTING,
    Reason.CANCELLED,
    Reason.STOPPING,
    Reason.LOST,
)


class LifeClauses:
    """Replicas that return, raise, exit, are killed or cancelled, pass their time limit, or are forgotten."""

    # E5 status has every rank, once, in order, from the moment submit returns

    def test_e05_status_has_every_rank_in_order_at_any_moment(self, bench: Bench) -> None:
        replicas = 3
        with launched(bench, "hold", replicas) as run:
            assert_ranks(run.executor.status(run.handle), replicas)
            assert_ranks(bench.executor().status(run.handle), replicas)
            entered(bench, run)
            status = run.executor.status(run.handle)
            assert_ranks(status, replicas)
            assert [r.state for r in status.replicas] == [ReplicaState.RUNNING] * replicas
            contract_jobs.let_go(bench.store, run.id)
            until(bench, "the run is over", lambda: _checked(run.executor.status(run.handle), replicas).is_terminal)

    # E6 status and result say how a replica ended

    PARTS: ClassVar[dict[str, int]] = {"return": 0, "raise": 1, "sys_exit": 3, "os_exit": 3, "sigkill": 137}

    def test_e06_return_succeeds_and_raise_exit_and_sigkill_fail_with_reason_and_code(self, bench: Bench) -> None:
        outcomes: list[ReplicaOutcome] = []
        for parts in _runs_of(bench, list(self.PARTS)):
            with launched(bench, "act", len(parts), args={"parts": parts}) as run:
                replicas = over(bench, run).replicas
                found = run.result().outcomes
            for part, replica, outcome in zip(parts, replicas, found, strict=True):
                code = self.PARTS[part]
                _assert_ended(bench, part, replica, code)
                assert (outcome.state, outcome.exit_code) == (replica.state, code), f"{part}: the result says {outcome}"
            outcomes += found
        assert outcomes[0].result == "return"
        assert outcomes[1].error is not None
        assert "as it was told to" in outcomes[1].error.traceback

    def test_e06_a_replica_killed_from_outside_has_failed_alone(self, bench: Bench) -> None:
        with launched(bench, "hold", 2) as run:
            entered(bench, run)
            bench.kill_replica(run.id, 1)
            killed = until(bench, "the killed rank is over", lambda: _ended(run.executor.status(run.handle), 1))[0]
            assert killed.state is ReplicaState.FAILED, killed
            assert killed.reason not in (*NO_FAILURE, Reason.TIMEOUT), killed
            if bench.executor().capabilities.fails_together:
                other = over(bench, run).replicas[0]
                assert (other.state, other.reason) == (ReplicaState.CANCELLED, Reason.CANCELLED), other
                return
            assert run.executor.status(run.handle).replicas[0].state is ReplicaState.RUNNING
            assert let_go(bench, run).replicas[0].state is ReplicaState.SUCCEEDED

    # E7 cancel is quiet before the start, while running, after the end and twice; afterwards nothing runs

    def test_e07_cancel_before_the_start_is_quiet_and_nothing_starts(self, bench: Bench) -> None:
        with bench.queue_held(), launched(bench, "hold", 2) as run:
            status = cancelled(bench, run)
            assert not bench.running(run.id), "something runs after cancel returned"
            assert [r.state for r in status.replicas] == [ReplicaState.CANCELLED] * 2, status

    def test_e07_cancel_while_running_returns_when_nothing_runs(self, bench: Bench) -> None:
        with launched(bench, "hold", 2) as run:
            entered(bench, run)
            status = cancelled(bench, run)
            assert not bench.running(run.id), "something runs after cancel returned"
            assert {(r.state, r.reason) for r in status.replicas} == {(ReplicaState.CANCELLED, Reason.CANCELLED)}
            run.executor.cancel(run.handle)
            bench.executor().cancel(run.handle)
            assert verdicts(cancelled(bench, run)) == verdicts(status)

    def test_e07_a_replica_has_its_grace_to_say_farewell(self, bench: Bench) -> None:
        with launched(bench, "hold", 2) as run:
            entered(bench, run)
            run.executor.cancel(run.handle)
            assert contract_jobs.farewells(bench.store, run.id) == [0, 1], "a replica was killed before its grace ended"

    def test_e07_a_replica_that_does_not_listen_is_ended_all_the_same(self, bench: Bench) -> None:
        with launched(bench, "hold", 2, args={"stubborn": True}, grace_s=0.2) as run:
            entered(bench, run)
            run.executor.cancel(run.handle)
            assert not bench.running(run.id), "something runs after cancel returned"

    def test_e07_cancel_after_the_end_is_quiet_and_changes_nothing(self, bench: Bench) -> None:
        with launched(bench, "act", 2, args={"parts": ["return", "raise"]}) as run:
            before = over(bench, run)
            run.executor.cancel(run.handle)
            assert verdicts(bench.executor().status(run.handle)) == verdicts(before)

    def test_e07_two_cancels_at_once_are_quiet(self, bench: Bench) -> None:
        with launched(bench, "hold", 2) as run, ThreadPoolExecutor(2) as pool:
            entered(bench, run)
            for cancel in [pool.submit(bench.executor().cancel, run.handle) for _ in range(2)]:
                cancel.result()
                assert not bench.running(run.id), "something runs after cancel returned"

    # E8 a terminal state never changes; a run that the backend forgot is LOST, unless the store has its outcome

    def test_e08_a_terminal_state_never_changes(self, bench: Bench) -> None:
        with launched(bench, "act", 3, args={"parts": ["return", "raise", "os_exit"]}) as run:
            first = verdicts(over(bench, run))
            is_together = bench.executor().capabilities.fails_together
            for _ in range(3):
                with suppress(RunNotFound) if is_together else nullcontext():  # the log of a stopped rank may be gone
                    list(run.executor.logs(run.handle, 0))
                run.executor.cancel(run.handle)
                assert verdicts(bench.executor().status(run.handle)) == first

    def test_e08_what_the_backend_forgot_is_lost(self, bench: Bench) -> None:
        with launched(bench, "echo", 2) as run:
            over(bench, run)
            bench.forget(run.handle)
            status = bench.executor().status(run.handle)
            assert_ranks(status, 2)
            assert {(r.state, r.reason) for r in status.replicas} == {(ReplicaState.LOST, Reason.LOST)}, status
            run.executor.cancel(run.handle)
            with pytest.raises(RunNotFound):
                list(run.executor.logs(run.handle, 0))

    def test_e08_a_run_nobody_ever_had_is_lost(self, bench: Bench) -> None:
        with launched(bench, "echo") as run:
            stranger = bench.stranger(run.handle)
            assert run.executor.status(stranger).replicas[0].state is ReplicaState.LOST
            run.executor.cancel(stranger)
            over(bench, run)

    def test_e08_unless_the_store_knows_better(self, bench: Bench) -> None:
        outcomes: list[ReplicaOutcome] = []
        for parts in _runs_of(bench, ["return", "sys_exit"]):
            with launched(bench, "act", len(parts), args={"parts": parts}) as run:
                before = over(bench, run)
                bench.forget(run.handle)
                after = run.status()
                assert [r.state for r in after.replicas] == [r.state for r in before.replicas]
                outcomes += run.result().outcomes
        assert [outcome.exit_code for outcome in outcomes] == [0, 3]
        assert outcomes[0].result == "return"

    # E12 a replica past its time limit fails

    def test_e12_a_replica_past_its_limit_fails_with_timeout(self, bench: Bench) -> None:
        with launched(bench, "hold", 2, timeout_s=bench.limit_s) as run:
            status = over(bench, run)
            late = {(r.state, r.reason) for r in status.replicas}
            if bench.executor().capabilities.fails_together:  # the first one ends the other
                late.discard((ReplicaState.CANCELLED, Reason.CANCELLED))
            assert late == {(ReplicaState.FAILED, Reason.TIMEOUT)}, status
            assert not bench.running(run.id), "something runs past its time limit"
            reasons = [outcome.reason for outcome in run.result().outcomes]
            assert reasons == [r.reason for r in status.replicas], "result and backend give different reasons"

    def test_e12_nor_does_it_help_not_to_listen(self, bench: Bench) -> None:
        with launched(bench, "hold", args={"stubborn": True}, timeout_s=bench.limit_s, grace_s=0.2) as run:
            replica = over(bench, run).replicas[0]
            assert (replica.state, replica.reason) == (ReplicaState.FAILED, Reason.TIMEOUT), replica
            assert not bench.running(run.id), "something runs past its time limit"

    # E29 a watch shows what `status` shows, ends its pause when a replica changes, and leaves nothing behind

    def test_e29_a_watch_shows_every_change_and_leaves_nothing(self, bench: Bench) -> None:
        before = _threads()
        with launched(bench, "hold", 2) as run:
            entered(bench, run)
            with watching(run.executor, run.handle) as watch:
                assert verdicts(watch.status()) == verdicts(run.executor.status(run.handle))
                contract_jobs.let_go(bench.store, run.id)
                deadline = Deadline(bench.patience_s)
                while not (status := watch.status()).is_terminal:
                    assert not deadline.is_past, f"the watch still shows {status}"
                    _wait_for_change(bench, run, watch)
                assert verdicts(status) == verdicts(over(bench, run))
            left = _threads() - before
            assert not left, f"the watch left {left}"


def _runs_of(bench: Bench, parts: list[str]) -> list[list[str]]:
    """One run of all parts; one for each part if a replica that fails ends the others."""
    return [[part] for part in parts] if bench.executor().capabilities.fails_together else [parts]


def _assert_ended(bench: Bench, part: str, replica: ReplicaStatus, code: int) -> None:
    wanted = ReplicaState.SUCCEEDED if code == 0 else ReplicaState.FAILED
    assert replica.state is wanted, f"{part}: {replica}"
    if code == 0:
        assert replica.reason is Reason.OK, f"{part}: {replica}"
    elif part == "sigkill":
        assert replica.reason in (Reason.KILLED, Reason.OOM), f"{part}: {replica}"
    else:
        assert replica.reason is Reason.USER_ERROR, f"{part}: {replica}"
    silent = (None,) if not bench.tells_exit_codes else ()
    assert replica.exit_code in (code, *silent), f"{part}: {replica}"


def _checked(status: RunStatus, replicas: int) -> RunStatus:
    assert_ranks(status, replicas)
    return status


def _ended(status: RunStatus, rank: int) -> list[ReplicaStatus]:
    """The status of the rank if it is over, else nothing."""
    return [replica for replica in status.replicas if replica.rank == rank and replica.state.is_terminal]


def _wait_for_change(bench: Bench, run: Run, watch: RunWatch) -> None:
    """Wait for a change that will come: for a short time if the executor cannot watch, otherwise for long."""
    if not isinstance(run.executor, Watcher):
        watch.wait(0.1)
        return
    try:
        answer_within(bench.patience_s, partial(watch.wait, 3600.0))
    except Unanswered:
        pytest.fail("the replicas have ended, and the watch goes on waiting")


def _threads() -> set[threading.Thread]:
    """The threads of this process, without those in which a bench serves requests."""
    return {each for each in threading.enumerate() if "process_request_thread" not in each.name}
