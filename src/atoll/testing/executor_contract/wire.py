"""Clauses about a service that fails, and about how often it is asked: E10 E14 E17."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import pytest

from atoll.errors import (
    AtollError,
    AuthError,
    BackendError,
    BackendUnavailable,
    ConfigError,
    Conflict,
    RunNotFound,
    SubmitError,
)
from atoll.executors.base import Executor, Plan
from atoll.handle import RunHandle
from atoll.runs.wait import wait
from atoll.status import ReplicaState
from atoll.testing.bench import (
    Bench,
    Call,
    Fault,
    assert_ranks,
    cleared,
    entered,
    gone,
    launched,
    let_go,
    logged,
    order,
)
from atoll.testing.other_process import Elsewhere

ERRORS: dict[Fault, type[AtollError]] = {
    Fault.UNAUTHORIZED: AuthError,
    Fault.FORBIDDEN: AuthError,
    Fault.NOT_FOUND: RunNotFound,
    Fault.CONFLICT: BackendError,
    Fault.THROTTLED: BackendUnavailable,
    Fault.BROKEN: BackendUnavailable,
    Fault.SILENT: BackendUnavailable,
}
"""What a caller gets to see when a call keeps failing. Exceptions to it are in the tests."""


class WireClauses:
    """A service that refuses, breaks, is throttled or silent. Backends without a service skip most of these."""

    # E10 failure at rank k leaves nothing running, or names what is left

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_e10_a_rank_that_cannot_start_leaves_nothing_running(self, bench: Bench, rank: int) -> None:
        draft = order(bench, "hold", 3).draft(bench.executor(), bench.store_uri)
        with cleared(bench, draft.spec.run_id), bench.start_broken(draft.plan, rank):
            try:
                run = draft.submit()
            except BackendError as exc:
                left = exc.left_running if isinstance(exc, SubmitError) else ()
                assert not left, f"it could have been stopped: {exc}"
                assert not bench.running(draft.spec.run_id), f"something runs, and the error does not say so: {exc}"
                return
            status = wait(lambda: run.executor.status(run.handle), timeout_s=bench.patience_s)
            assert status.replicas[rank].state is not ReplicaState.SUCCEEDED, status
            gone(bench, run.id)

    def test_e10_what_could_not_be_stopped_is_named(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.CREATE, Call.STOP)
        if bench.creates(3) == 1:
            pytest.skip("this backend starts a whole run with one call")
        draft = order(bench, "hold", 3).draft(bench.executor(), bench.store_uri)
        with cleared(bench, draft.spec.run_id):
            faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=3)
            faults.fail(Call.STOP, Fault.FORBIDDEN)
            with pytest.raises(SubmitError) as caught:
                draft.submit()
            faults.heal()
            assert len(caught.value.left_running) == 2, f"two ranks are left, and the error says: {caught.value}"
            _stop(bench, draft.plan)
            assert not bench.running(draft.spec.run_id)

    def test_e10_an_interrupted_submit_leaves_nothing_running(self, bench: Bench) -> None:
        """Ctrl-C, when the second of three replicas has just been made."""
        points = bench.kill_points(3)
        point = points[min(3, len(points) - 1)]
        ordered = order(bench, "hold", 3)
        other = Elsewhere(bench, "submit", order=asdict(ordered), threads=1)
        try:
            with cleared(bench, ordered.run_id):
                other.until_ready()
                bench.at_point(point, other.interrupt)
                other.go().ended()
                assert not bench.running(ordered.run_id), f"something runs, and its launcher was interrupted {point}"
        finally:
            other.end()

    # E14 what a service says becomes an error of ours, with its own as the cause

    def test_e14_a_failing_create_is_a_documented_error(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.CREATE)
        for fault in Fault:
            draft = order(bench, "hold").draft(_hasty(bench, fault), bench.store_uri)
            with cleared(bench, draft.spec.run_id):
                faults.fail(Call.CREATE, fault)
                error = _error_of(draft.submit, fault)
                faults.heal()
                wanted: tuple[type[AtollError], ...] = (ERRORS[fault],)
                if fault in (Fault.NOT_FOUND, Fault.CONFLICT):
                    wanted = (BackendError, Conflict, ConfigError)  # nobody can say in general what is missing or taken
                elif ERRORS[fault] is BackendUnavailable:
                    wanted = (BackendUnavailable, SubmitError)
                _assert_documented(error, fault, wanted)
                assert not bench.running(draft.spec.run_id), f"something runs after {fault}"

    def test_e14_a_failing_look_is_a_documented_error(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.DESCRIBE)
        with launched(bench, "hold") as run:
            entered(bench, run)
            for fault in Fault:
                look = partial(_hasty(bench, fault).status, run.handle)
                faults.fail(Call.DESCRIBE, fault)
                if fault is Fault.NOT_FOUND:
                    assert look().replicas[0].state is ReplicaState.LOST
                else:
                    _assert_documented(_error_of(look, fault), fault, (ERRORS[fault],))
                faults.heal()
            assert let_go(bench, run).state is ReplicaState.SUCCEEDED

    def test_e14_a_failing_stop_is_a_documented_error(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.STOP)
        with launched(bench, "hold", grace_s=0.2) as run:
            entered(bench, run)
            for fault in Fault:
                faults.fail(Call.STOP, fault)
                try:
                    _hasty(bench, fault).cancel(run.handle)
                except Exception as exc:  # noqa: BLE001  judged below
                    _assert_documented(exc, fault, (BackendError,) if fault is Fault.NOT_FOUND else (ERRORS[fault],))
                else:
                    assert not bench.running(run.id), f"cancel was quiet about {fault}, and something still runs"
                faults.heal()

    def test_e14_a_failing_log_is_a_documented_error(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.LOG)
        with launched(bench, "say", args={"lines": ["here"]}) as run:
            logged(bench, run, 0, ["here"])
            for fault in Fault:
                read = partial(_read, _hasty(bench, fault), run.handle)
                faults.fail(Call.LOG, fault)
                if fault is not Fault.NOT_FOUND:
                    _assert_documented(_error_of(read, fault), fault, (ERRORS[fault],))
                else:
                    with suppress(RunNotFound):
                        assert read() == [], "a log that is not there has no lines"
                faults.heal()

    @pytest.mark.parametrize("fault", [Fault.THROTTLED, Fault.BROKEN])
    def test_e14_a_wait_outlasts_a_burst_of_failures(self, bench: Bench, fault: Fault) -> None:
        faults = bench.need_faults(Call.DESCRIBE)
        with launched(bench, "hold", 2) as run:
            entered(bench, run)
            faults.fail(Call.DESCRIBE, fault, times=5)
            assert let_go(bench, run).state is ReplicaState.SUCCEEDED

    # E17 a group backend answers status in O(1) calls

    @pytest.mark.parametrize("replicas", [1, 6])
    def test_e17_the_number_of_calls_does_not_grow_with_replicas(self, bench: Bench, replicas: int) -> None:
        bench.calls()
        with launched(bench, "hold", replicas) as run:
            entered(bench, run)
            before = bench.calls()
            assert_ranks(run.executor.status(run.handle), replicas)
            made = bench.calls() - before
            most = bench.most_status_calls(replicas)
            assert made <= most, f"status of {replicas} replicas took {made} calls, and {most} would do"


def _hasty(bench: Bench, fault: Fault) -> Executor:
    """A fresh adapter that will not try for long where trying again is what it does."""
    return bench.executor(**bench.impatient) if ERRORS[fault] is BackendUnavailable else bench.executor()


def _read(executor: Executor, handle: RunHandle) -> list[str]:
    return list(executor.logs(handle, 0))


def _error_of(call: Callable[[], object], fault: Fault) -> Exception:
    """What the call raises; an assertion fails if that is nothing."""
    try:
        call()
    except Exception as exc:  # noqa: BLE001  judged by the caller
        return exc
    raise AssertionError(f"the service said {fault}, and the caller was told nothing")


def _assert_documented(error: Exception, fault: Fault, wanted: tuple[type[AtollError], ...]) -> None:
    """One of our errors, whose chain of causes ends in the service's own."""
    assert isinstance(error, wanted), f"{fault} became {type(error).__qualname__}: {error}"
    if isinstance(error, BackendUnavailable):
        assert error.retryable
    cause: BaseException | None = error
    while isinstance(cause, AtollError):
        cause = cause.__cause__
    assert cause is not None, f"{fault} became {type(error).__qualname__} without the service's own error as a cause"


def _stop(bench: Bench, plan: Plan) -> None:
    """Adopt what is left of a submit that failed, and cancel it."""
    executor = bench.executor()
    executor.cancel(executor.submit(plan))
