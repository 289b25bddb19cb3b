"""Clauses about a service that fails, and about the number of calls: E10 E14 E17."""

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
    StopFailed,
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
from atoll.testing.other_process import OtherProcess

ERRORS: dict[Fault, type[AtollError]] = {
    Fault.UNAUTHORIZED: AuthError,
    Fault.FORBIDDEN: AuthError,
    Fault.NOT_FOUND: RunNotFound,
    Fault.CONFLICT: BackendError,
    Fault.THROTTLED: BackendUnavailable,
    Fault.BROKEN: BackendUnavailable,
    Fault.SILENT: BackendUnavailable,
}
"""The error of a call that keeps failing. The tests have the exceptions to this table."""


class WireClauses:
    """A service that refuses, fails, throttles or does not answer. Backends without a service skip most of these."""

    # E10 failure at rank k leaves nothing running, or names what is left

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_e10_a_rank_that_cannot_start_leaves_nothing_running(self, bench: Bench, rank: int) -> None:
        draft = order(bench, "hold", 3).draft(bench.executor(), bench.store_uri)
        with cleared(bench, draft.spec.run_id), bench.start_broken(draft.plan, rank):
            try:
                run = draft.submit()
            except BackendError as exc:
                left = exc.left_running if isinstance(exc, SubmitError) else ()
                assert not left, f"these could have been stopped: {exc}"
                assert not bench.running(draft.spec.run_id), f"something runs, and the error does not name it: {exc}"
                return
            status = wait(lambda: run.executor.status(run.handle), timeout_s=bench.patience_s)
            assert status.replicas[rank].state is not ReplicaState.SUCCEEDED, status
            gone(bench, run.id)

    def test_e10_what_could_not_be_stopped_is_named(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.CREATE, Call.STOP)
        if bench.creates(3) == 1:
            pytest.skip("this backend starts a whole run with one call")
        draft = order(bench, "hold", 3).draft(bench.executor(), bench.store_uri)
        with cleared(bench, draft.spec.run_id), bench.queue_held():  # a replica that starts may see the undo and return
            faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=3)
            faults.fail(Call.STOP, Fault.FORBIDDEN)
            with pytest.raises(SubmitError) as caught:
                draft.submit()
            faults.heal()
            assert len(caught.value.left_running) == 2, f"two ranks are left, and the error says: {caught.value}"
            _stop(bench, draft.plan)
            assert not bench.running(draft.spec.run_id)

    def test_e10_an_interrupted_submit_leaves_nothing_running(self, bench: Bench) -> None:
        """Ctrl-C just after the second of three replicas was created."""
        points = bench.kill_points(3)
        point = points[min(3, len(points) - 1)]
        ordered = order(bench, "hold", 3)
        other = OtherProcess(bench, "submit", order=asdict(ordered), threads=1)
        try:
            with cleared(bench, ordered.run_id):
                other.until_ready()
                bench.at_point(point, other.interrupt)
                other.go().ended()
                assert not bench.running(ordered.run_id), f"something runs, and its launcher was interrupted {point}"
        finally:
            other.end()

    # E14 an error of the service becomes a documented error, with the original as its cause

    def test_e14_a_failing_create_is_a_documented_error(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.CREATE)
        for fault in Fault:
            draft = order(bench, "hold").draft(_executor_for(bench, fault), bench.store_uri)
            with cleared(bench, draft.spec.run_id):
                faults.fail(Call.CREATE, fault)
                error = _error_of(draft.submit, fault)
                faults.heal()
                wanted: tuple[type[AtollError], ...] = (ERRORS[fault],)
                if fault in (Fault.NOT_FOUND, Fault.CONFLICT):
                    wanted = (BackendError, Conflict, ConfigError)  # what is missing or taken depends on the service
                elif ERRORS[fault] is BackendUnavailable:
                    wanted = (BackendUnavailable, SubmitError)
                _assert_documented(error, fault, wanted)
                assert not bench.running(draft.spec.run_id), f"something runs after {fault}"

    def test_e14_a_failing_look_is_a_documented_error(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.DESCRIBE)
        with launched(bench, "hold") as run:
            entered(bench, run)
            for fault in Fault:
                look = partial(_executor_for(bench, fault).status, run.handle)
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
                    _executor_for(bench, fault).cancel(run.handle)
                except Exception as exc:  # noqa: BLE001  checked below
                    assert isinstance(exc, StopFailed), f"{fault} became {type(exc).__qualname__}: {exc}"
                    cause = exc.__cause__
                    assert isinstance(cause, Exception), "the refusal of the service is not the cause"
                    _assert_documented(cause, fault, (BackendError,) if fault is Fault.NOT_FOUND else (ERRORS[fault],))
                else:
                    assert not bench.running(run.id), f"cancel was quiet about {fault}, and something still runs"
                faults.heal()

    def test_e14_a_failing_log_is_a_documented_error(self, bench: Bench) -> None:
        faults = bench.need_faults(Call.LOG)
        with launched(bench, "say", args={"lines": ["here"]}) as run:
            logged(bench, run, 0, ["here"])
            for fault in Fault:
                read = partial(_read, _executor_for(bench, fault), run.handle)
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


def _executor_for(bench: Bench, fault: Fault) -> Executor:
    """A new adapter; with short retries if the adapter retries after this fault."""
    return bench.executor(**bench.impatient) if ERRORS[fault] is BackendUnavailable else bench.executor()


def _read(executor: Executor, handle: RunHandle) -> list[str]:
    return list(executor.logs(handle, 0))


def _error_of(call: Callable[[], object], fault: Fault) -> Exception:
    """The exception that the call raises. Fails if it raises none."""
    try:
        call()
    except Exception as exc:  # noqa: BLE001  checked by the caller
        return exc
    raise AssertionError(f"the service failed with {fault}, and the call raised nothing")


def _assert_documented(error: Exception, fault: Fault, wanted: tuple[type[AtollError], ...]) -> None:
    """Assert that this is one of the wanted errors, and that its chain of causes ends in the service's own error."""
    assert isinstance(error, wanted), f"{fault} became {type(error).__qualname__}: {error}"
    if isinstance(error, BackendUnavailable):
        assert error.retryable
    cause: BaseException | None = error
    while isinstance(cause, AtollError):
        cause = cause.__cause__
    assert cause is not None, f"{fault} became {type(error).__qualname__} without the service's own error as a cause"


def _stop(bench: Bench, plan: Plan) -> None:
    """Adopt the jobs that a failed submit left, and cancel them."""
    executor = bench.executor()
    executor.cancel(executor.submit(plan))
