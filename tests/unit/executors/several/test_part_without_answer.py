"""A part whose backend does not answer: the others are shown and stopped, and the store is read where it knows more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from atoll.context import RunContext
from atoll.errors import AtollError, BackendUnavailable, ConfigError, StopFailed
from atoll.executors.base import Capabilities, Plan, StoreReader
from atoll.executors.several.executor import SeveralExecutor
from atoll.executors.several.parts import joined_handle
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import Progress, Reason, ReplicaState, ReplicaStatus, RunStatus

DOWN = BackendUnavailable("nobody answers", executor="place")


class Place:
    """A backend with two replicas, which fails if it has an error."""

    capabilities = Capabilities(code=frozenset({"bundle"}))

    def __init__(self, name: str, error: AtollError | None = None) -> None:
        self.name, self.error = name, error
        self.stopped: list[Sequence[int] | None] = []

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        raise NotImplementedError

    def submit(self, plan: Plan) -> RunHandle:
        raise NotImplementedError

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        raise NotImplementedError

    def status(self, handle: RunHandle) -> RunStatus:
        if self.error is not None:
            raise self.error
        return RunStatus.uniform(handle.replicas, ReplicaState.SUCCEEDED, Reason.OK, "")

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.stopped.append(ranks)


class Reporting(Place):
    """Its replicas report to the store."""

    def stored_status(self, handle: RunHandle, problem: str) -> RunStatus:
        progress = Progress(problem=problem)
        rows = (
            ReplicaStatus(rank, ReplicaState.RUNNING, Reason.OK, problem, progress=progress)
            for rank in range(handle.replicas)
        )
        return RunStatus(tuple(rows))


def several(*places: Place) -> tuple[SeveralExecutor, RunHandle]:
    handles = [RunHandle(place.name, "here", "exp", 2, 2 * number) for number, place in enumerate(places)]
    given: Any = places
    return SeveralExecutor(executors=given), joined_handle(handles)


def test_the_store_answers_for_a_part_whose_backend_does_not() -> None:
    executor, handle = several(Place("one"), Reporting("two", DOWN))
    rows = executor.status(handle).replicas
    assert [(row.rank, row.backend, row.state) for row in rows] == [
        (0, "one", ReplicaState.SUCCEEDED),
        (1, "one", ReplicaState.SUCCEEDED),
        (2, "two", ReplicaState.RUNNING),
        (3, "two", ReplicaState.RUNNING),
    ]
    assert [row.progress and row.progress.problem for row in rows[2:]] == ["nobody answers"] * 2


def test_a_part_that_does_not_report_to_the_store_has_no_status_without_its_backend() -> None:
    executor, handle = several(Place("one", DOWN), Reporting("two"))
    with pytest.raises(BackendUnavailable, match="nobody answers"):
        executor.status(handle)


def test_without_any_answer_the_caller_decides_whether_the_store_is_enough() -> None:
    executor, handle = several(Reporting("one", DOWN), Reporting("two", DOWN))
    assert isinstance(executor, StoreReader)
    with pytest.raises(BackendUnavailable, match="nobody answers"):
        executor.status(handle)
    rows = executor.stored_status(handle, "why").replicas
    assert [(row.rank, row.backend, row.message) for row in rows] == [
        (0, "one", "why"),
        (1, "one", "why"),
        (2, "two", "why"),
        (3, "two", "why"),
    ]


def test_parts_that_do_not_report_to_the_store_are_asked_also_then() -> None:
    executor, handle = several(Place("one"), Reporting("two", DOWN))
    assert [row.message for row in executor.stored_status(handle, "why").replicas] == ["", "", "why", "why"]
    executor, handle = several(Place("one", DOWN), Reporting("two", DOWN))
    with pytest.raises(BackendUnavailable, match="nobody answers"):
        executor.stored_status(handle, "why")


@pytest.mark.parametrize("error", [DOWN, ConfigError("the store cannot be opened here")])
def test_a_cancel_stops_the_other_parts(error: AtollError) -> None:
    other = Place("two")
    executor, handle = several(Place("one", error), other)
    with pytest.raises(StopFailed, match=error.message):
        executor.cancel(handle)
    assert other.stopped == [None]
