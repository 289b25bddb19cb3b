"""A limit for waiting: asked when replicas wait, and again only when its time is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.handle import RunHandle
from atoll.runs.queue_limit import QueueLimit, WaitedTooLong
from atoll.status import ReplicaState, ReplicaStatus, RunStatus
from atoll.testing.fakes import FakeClock

HANDLE = RunHandle("x", "y", "z", 2)


class Limited:
    """An executor whose replicas may wait until the clock shows 100."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.asked = clock, 0

    def queue_left_s(self, handle: RunHandle) -> float:
        self.asked += 1
        return 100.0 - self.clock.monotonic()


def status(*states: ReplicaState) -> RunStatus:
    return RunStatus(tuple(ReplicaStatus(rank, state, message="no node") for rank, state in enumerate(states)))


def test_it_asks_once_and_again_at_the_end_of_the_time():
    clock = FakeClock()
    executor = Limited(clock)
    limit = QueueLimit(executor, HANDLE, clock)
    waiting = status(ReplicaState.RUNNING, ReplicaState.PENDING)
    began = clock.monotonic()
    for _ in range(3):
        assert limit.checked(waiting) is waiting
    assert executor.asked == 1
    clock.sleep(100.0 - began)
    with pytest.raises(WaitedTooLong, match="rank 1: no node"):
        limit.checked(waiting)


def test_it_asks_again_when_replicas_wait_for_something_else():
    clock = FakeClock()
    executor = Limited(clock)
    limit = QueueLimit(executor, HANDLE, clock)
    waiting = status(ReplicaState.PENDING)
    other = waiting.with_replicas(replace(row, message="never fits") for row in waiting.replicas)
    for each in (waiting, waiting, other, other):
        limit.checked(each)
    assert executor.asked == 2
    executor.queue_left_s = lambda handle: float("-inf")  # type: ignore[method-assign]
    with pytest.raises(WaitedTooLong, match="can never start; rank 0: no node"):
        limit.checked(waiting)


def test_a_run_that_does_not_wait_and_an_executor_without_a_limit_are_not_asked():
    clock = FakeClock()
    executor = Limited(clock)
    running = status(ReplicaState.RUNNING, ReplicaState.SUCCEEDED)
    assert QueueLimit(executor, HANDLE, clock).checked(running) is running
    assert QueueLimit(executor, None, clock).checked(status(ReplicaState.PENDING)) is not None
    assert executor.asked == 0
    pending = status(ReplicaState.PENDING)
    assert QueueLimit(object(), HANDLE, clock).checked(pending) is pending  # type: ignore[arg-type]
