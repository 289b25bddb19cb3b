"""Clauses about the states of replicas: E5 E6 E7 E8 E12."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from atoll.errors import RunNotFound
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus
from atoll.testing import contract_jobs
from atoll.testing.bench import Bench, assert_ranks, entered, launched, let_go, over, until, verdicts

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
        with launched(bench, "act", len(self.PARTS), args={"parts": list(self.PARTS)}) as run:
            replicas = over(bench, run).replicas
            outcomes = run.result().outcomes
        for (part, code), replica, outcome in zip(self.PARTS.items(), replicas, outcomes, strict=True):
            _assert_ended(bench, part, replica, code)
            assert (outcome.state, outcome.exit_code) == (replica.state, code), f"{part}: the result says {outcome}"
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
            assert run.executor.status(run.handle).replicas[0].state is ReplicaState.RUNNING
            assert let_go(bench, run).replicas[0].state is ReplicaState.SUCCEEDED

    # E7 cancel is quiet before the start, while running, after the end and twice; afterwards nothing runs

    def test_e07_cancel_before_the_start_is_quiet_and_nothing_starts(self, bench: Bench) -> None:
        with bench.queue_held(), launched(bench, "hold", 2) as run:
            bench.executor().cancel(run.handle)
            assert not bench.running(run.id), "something runs after cancel returned"
            status = run.executor.status(run.handle)
            assert [r.state for r in status.replicas] == [ReplicaState.CANCELLED] * 2, status

    def test_e07_cancel_while_running_returns_when_nothing_runs(self, bench: Bench) -> None:
        with launched(bench, "hold", 2) as run:
            entered(bench, run)
            run.executor.cancel(run.handle)
            assert not bench.running(run.id), "something runs after cancel returned"
            status = bench.executor().status(run.handle)
            assert {(r.state, r.reason) for r in status.replicas} == {(ReplicaState.CANCELLED, Reason.CANCELLED)}
            run.executor.cancel(run.handle)
            bench.executor().cancel(run.handle)
            assert verdicts(run.executor.status(run.handle)) == verdicts(status)

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
            for _ in range(3):
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
        with launched(bench, "act", 2, args={"parts": ["return", "sys_exit"]}) as run:
            before = over(bench, run)
            bench.forget(run.handle)
            after = run.status()
            assert [r.state for r in after.replicas] == [r.state for r in before.replicas]
            outcomes = run.result().outcomes
            assert [outcome.exit_code for outcome in outcomes] == [0, 3]
            assert outcomes[0].result == "return"

    # E12 a replica past its time limit fails

    def test_e12_a_replica_past_its_limit_fails_with_timeout(self, bench: Bench) -> None:
        with launched(bench, "hold", 2, timeout_s=bench.limit_s) as run:
            status = over(bench, run)
            assert {(r.state, r.reason) for r in status.replicas} == {(ReplicaState.FAILED, Reason.TIMEOUT)}, status
            assert not bench.running(run.id), "something runs past its time limit"
            reasons = [outcome.reason for outcome in run.result().outcomes]
            assert reasons == [Reason.TIMEOUT] * 2, "result and backend give different reasons"

    def test_e12_nor_does_it_help_not_to_listen(self, bench: Bench) -> None:
        with launched(bench, "hold", args={"stubborn": True}, timeout_s=bench.limit_s, grace_s=0.2) as run:
            replica = over(bench, run).replicas[0]
            assert (replica.state, replica.reason) == (ReplicaState.FAILED, Reason.TIMEOUT), replica
            assert not bench.running(run.id), "something runs past its time limit"


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
