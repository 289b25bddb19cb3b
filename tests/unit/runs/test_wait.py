"""The one waiting loop, on a fake clock."""

from __future__ import annotations

from threading import Event

import pytest

from atoll.errors import AuthError, BackendUnavailable, StoreUnavailable, WaitTimeout
from atoll.runs.wait import wait, watching
from atoll.status import Reason, ReplicaState, RunStatus
from atoll.testing.fakes import FakeClock

RUNNING = RunStatus.uniform(2, ReplicaState.RUNNING, Reason.OK)
DONE = RunStatus.uniform(2, ReplicaState.SUCCEEDED, Reason.OK)
MIXED = RUNNING.with_replicas([RUNNING.replicas[0], RunStatus.uniform(2, ReplicaState.FAILED, Reason.OK).replicas[1]])


def script(*steps):
    """Answers one after the other, the last one for ever; exceptions are raised."""
    left = list(steps)

    def status():
        step = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(step, BaseException):
            raise step
        return step

    return status


def test_wait_returns_when_the_run_is_over():
    assert wait(script(RUNNING, RUNNING, DONE), clock=FakeClock()) == DONE


def test_wait_has_a_deadline_and_does_not_sleep_past_it():
    clock = FakeClock()
    began = clock.monotonic()
    with pytest.raises(WaitTimeout, match="2 running"):
        wait(script(RUNNING), timeout_s=30, clock=clock)
    assert clock.monotonic() - began == pytest.approx(30)


def test_a_wait_for_some_ranks_does_not_wait_for_the_others():
    assert wait(script(RUNNING, MIXED), ranks=[1], clock=FakeClock()) == MIXED
    with pytest.raises(WaitTimeout):
        wait(script(RUNNING, MIXED), ranks=[0], timeout_s=1, clock=FakeClock())


def test_fail_fast_returns_at_the_first_failure():
    assert wait(script(RUNNING, MIXED), fail_fast=True, clock=FakeClock()) == MIXED
    with pytest.raises(WaitTimeout):
        wait(script(RUNNING, MIXED), timeout_s=1, clock=FakeClock())


def test_a_cancel_that_is_not_recorded_yet_is_not_taken_for_a_loss():
    lost = RunStatus.lost(2, "no such job")
    cancelled, seen = RunStatus.uniform(2, ReplicaState.CANCELLED, Reason.CANCELLED), []
    assert wait(script(RUNNING, lost, cancelled), on_change=seen.append, clock=FakeClock()) == cancelled
    assert seen == [RUNNING, cancelled]
    assert wait(script(RUNNING, lost), clock=FakeClock()) == lost
    assert wait(script(RUNNING, lost), timeout_s=2, clock=FakeClock()) == lost


def test_a_backend_briefly_out_of_reach_is_asked_again():
    assert wait(script(RUNNING, BackendUnavailable("x"), BackendUnavailable("x"), DONE), clock=FakeClock()) == DONE
    with pytest.raises(BackendUnavailable):
        wait(script(BackendUnavailable("x")), clock=FakeClock())
    with pytest.raises(AuthError):
        wait(script(RUNNING, AuthError("x")), clock=FakeClock())


def test_whoever_waits_is_told_that_nobody_answers_and_that_somebody_does_again():
    first, second, heard = BackendUnavailable("1"), StoreUnavailable("2"), []
    wait(script(RUNNING, first, second, RUNNING, DONE), on_trouble=heard.append, clock=FakeClock())
    assert heard == [first, second, None]


def test_nobody_is_asked_again_for_ever():
    clock, heard = FakeClock(), []
    with pytest.raises(StoreUnavailable):
        wait(script(RUNNING, StoreUnavailable("x")), on_trouble=heard.append, clock=clock)
    assert 300 <= clock.monotonic() < 310
    assert len(heard) > 100


def test_only_changes_are_told():
    seen = []
    wait(script(RUNNING, RUNNING, MIXED, DONE), on_change=seen.append, clock=FakeClock())
    assert seen == [RUNNING, MIXED, DONE]


def hanging(*steps):
    """Answers one after the other, then never again."""
    left, never = list(steps), Event()

    def status():
        if left:
            return left.pop(0)
        never.wait(60)
        raise AssertionError("nobody waits for this any more")

    return status


@pytest.mark.parametrize(("steps", "last"), [((), None), ((RUNNING,), RUNNING), ((RUNNING, MIXED), MIXED)])
def test_a_reading_that_hangs_does_not_delay_the_deadline_and_the_last_status_is_known(steps, last):
    with pytest.raises(WaitTimeout) as caught:
        wait(hanging(*steps), timeout_s=0.2)
    assert caught.value.status == last


def test_a_wait_without_time_returns_the_end_of_a_run_that_is_over():
    assert wait(script(DONE), timeout_s=0) == DONE
    with pytest.raises(WaitTimeout) as caught:
        wait(script(RUNNING), timeout_s=0)
    assert caught.value.status == RUNNING


def test_an_error_of_a_reading_with_a_deadline_is_raised_where_the_wait_is():
    with pytest.raises(AuthError):
        wait(script(AuthError("x")), timeout_s=60, clock=FakeClock())
    with pytest.raises(KeyboardInterrupt):
        wait(script(KeyboardInterrupt()), timeout_s=60, clock=FakeClock())


def test_a_pause_of_the_caller_is_no_longer_than_the_deadline():
    clock, pauses = FakeClock(), []

    def pause(seconds):
        pauses.append(seconds)
        clock.sleep(seconds)

    with pytest.raises(WaitTimeout):
        wait(script(RUNNING), timeout_s=3, pause=pause, clock=clock)
    assert sum(pauses) == pytest.approx(3)
    assert max(pauses) <= 2.0


def test_an_executor_that_cannot_watch_is_asked_again_after_each_pause():
    class Polled:
        def status(self, handle):
            return {"run": DONE}[handle]

    clock = FakeClock()
    began = clock.monotonic()
    with watching(Polled(), "run", clock) as watch:
        assert watch.status() == DONE
        watch.wait(2.5)
    assert clock.monotonic() - began == pytest.approx(2.5)
