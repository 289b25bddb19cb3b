"""A part whose backend does not answer: the others are shown and stopped, and the store is read where it knows more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from atoll import journal, registry
from atoll.context import RunContext
from atoll.errors import AtollError, BackendUnavailable, ConfigError, Conflict, MissingExtra, StopFailed
from atoll.executors.base import Capabilities, Plan, StoreReader
from atoll.executors.several.executor import SeveralExecutor
from atoll.executors.several.parts import joined_handle
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.registry import open_store
from atoll.result import ReplicaOutcome
from atoll.runs.over import check_is_over
from atoll.runs.run import Run
from atoll.spec import Part, Placement, RunSpec, Task
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


def test_a_part_that_does_not_report_to_the_store_does_not_hide_the_others() -> None:
    executor, handle = several(Place("one", DOWN), Place("two"))
    rows = executor.status(handle).replicas
    assert [(row.rank, row.backend, row.state, row.reason) for row in rows] == [
        (0, "one", ReplicaState.PENDING, Reason.NO_ANSWER),
        (1, "one", ReplicaState.PENDING, Reason.NO_ANSWER),
        (2, "two", ReplicaState.SUCCEEDED, Reason.OK),
        (3, "two", ReplicaState.SUCCEEDED, Reason.OK),
    ]
    assert [row.progress.problem for row in rows] == ["nobody answers"] * 2 + [""] * 2


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
    assert [row.message for row in executor.stored_status(handle, "why").replicas] == ["nobody answers"] * 2 + [
        "why"
    ] * 2
    executor, handle = several(Place("one", DOWN), Place("two", DOWN))
    with pytest.raises(BackendUnavailable, match="nobody answers"):
        executor.stored_status(handle, "why")


def test_the_status_of_a_run_has_what_the_store_knows_about_a_part_without_answer() -> None:
    """Rank 0 has succeeded, rank 1 runs, rank 2 has failed and may be restarted, rank 3 has not started."""
    places = Place("one", DOWN), Place("two", DOWN), Place("three")
    executor, handle = several(*places)
    placement = Placement(replicas=6, max_restarts=1, parts=tuple(Part(place.name, 2) for place in places))
    store, keys = open_store("memory://part-without-answer"), RunKeys("exp")
    beat = {"round_no": 3, "metrics": {}, "last_line": "", "beat_at": 5.0, "attempt": 1}
    store.put(keys.beat(1), json.dumps(beat).encode())
    for rank, state in ((0, ReplicaState.SUCCEEDED), (2, ReplicaState.FAILED)):
        each = ReplicaOutcome(rank, 0, state, Reason.OK)
        store.put(keys.outcome(each.rank, each.attempt), json.dumps(each.to_json()).encode())
    run = Run(RunSpec("exp", Task("train:main"), placement), executor, store, handle)
    for progress in (True, False):
        rows = run.status(progress=progress).replicas
        assert [(row.state, row.reason, row.attempt) for row in rows[:4]] == [
            (ReplicaState.SUCCEEDED, Reason.OK, 0),
            (ReplicaState.RUNNING, Reason.NO_ANSWER, 1),
            (ReplicaState.PENDING, Reason.NO_ANSWER, 0),
            (ReplicaState.PENDING, Reason.NO_ANSWER, 0),
        ]
        assert {row.progress.problem for row in rows[1:4]} == {"nobody answers"}


@pytest.mark.parametrize("is_cancelled", [True, False])
@pytest.mark.parametrize("others_answer", [True, False])
def test_a_cancelled_run_is_over_although_a_backend_no_longer_answers(is_cancelled: bool, others_answer: bool) -> None:
    """A cancellation is recorded when everything was stopped. Rank 0 was told to leave, rank 1 wrote nothing."""
    executor, handle = several(Place("one", DOWN), Place("two", None if others_answer else DOWN))
    placement = Placement(replicas=4, parts=(Part("one", 2), Part("two", 2)))
    store, keys = open_store(f"memory://cancelled-{is_cancelled}-{others_answer}"), RunKeys("exp")
    beat = {"round_no": 3, "metrics": {}, "last_line": "", "beat_at": 5.0, "attempt": 0}
    store.put(keys.beat(1), json.dumps(beat).encode())
    left = ReplicaOutcome(0, 0, ReplicaState.FAILED, Reason.PREEMPTED)
    store.put(keys.outcome(0, 0), json.dumps(left.to_json()).encode())
    run = Run(RunSpec("exp", Task("train:main"), placement), executor, store, handle)
    if is_cancelled:
        journal.record_cancel(store, "exp", journal.Cancel("on request", over=()))
        status = run.status()
        assert status.is_terminal
        assert [row.state for row in status.replicas[:2]] == [ReplicaState.CANCELLED] * 2
    elif others_answer:
        assert not run.status().is_terminal
    else:
        with pytest.raises(BackendUnavailable):
            run.status()


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_run_whose_part_is_gone_is_abandoned_and_the_other_part_is_stopped(max_restarts: int) -> None:
    """With restarts, a process that waits could start replicas; an abandoned run is over nevertheless."""
    gone, other = Place("one", DOWN), Place("two")
    executor, handle = several(gone, other)
    placement = Placement(replicas=4, max_restarts=max_restarts, parts=(Part("one", 2), Part("two", 2)))
    store = open_store(f"memory://abandoned-{max_restarts}")
    run = Run(RunSpec("exp", Task("train:main"), placement), executor, store, handle)
    stopped = run.cancel(abandon=True)
    assert other.stopped == [None]
    assert isinstance(stopped.left_running, StopFailed)
    status = run.status()
    assert status.is_terminal
    assert [row.state for row in status.replicas[:2]] == [ReplicaState.LOST] * 2
    gone.error = None
    run.cancel()
    assert gone.stopped == [None]


def test_a_cancelled_run_with_restarts_can_be_abandoned() -> None:
    """A process that waits could have started replicas after the stop, so its record alone does not make it over."""
    gone, other = Place("one"), Place("two")
    executor, handle = several(gone, other)
    placement = Placement(replicas=4, max_restarts=1, parts=(Part("one", 2), Part("two", 2)))
    store = open_store("memory://cancelled-then-abandoned")
    journal.record_cancel(store, "exp", journal.Cancel("on request"))
    run = Run(RunSpec("exp", Task("train:main"), placement), executor, store, handle)
    gone.error = DOWN
    with pytest.raises(Conflict) as caught:
        check_is_over(run, "wait")
    assert caught.value.hint.startswith("wait; if the backend is gone for good, `atoll cancel exp --abandon`")
    run.cancel(abandon=True)
    assert run.status().is_terminal


@pytest.mark.parametrize("error", [DOWN, ConfigError("the store cannot be opened here")])
def test_a_cancel_stops_the_other_parts(error: AtollError) -> None:
    other = Place("two")
    executor, handle = several(Place("one", error), other)
    with pytest.raises(StopFailed, match=error.message):
        executor.cancel(handle)
    assert other.stopped == [None]


def test_a_part_that_this_machine_cannot_ask_hides_no_other() -> None:
    executor, handle = several(Place("one", ConfigError("no login here")), Place("two"))
    assert [(row.reason, row.progress.problem) for row in executor.status(handle).replicas] == [
        (Reason.NO_ANSWER, "no login here"),
        (Reason.NO_ANSWER, "no login here"),
        (Reason.OK, ""),
        (Reason.OK, ""),
    ]
    executor, handle = several(Place("one", ConfigError("no login here")))
    with pytest.raises(ConfigError, match="no login here"):
        executor.status(handle)


def test_the_other_parts_of_one_whose_package_is_missing_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may lack what the launcher had installed. To abandon the run has to stop the others, too."""
    other = Place("two")
    _, handle = several(Place("one"), other)

    def made(name: str, **_: object) -> Place:
        if name == "one":
            raise MissingExtra("package", extra="one")
        return other

    monkeypatch.setattr(registry, "executor", made)
    executor = SeveralExecutor()
    assert [row.reason for row in executor.status(handle).replicas] == [Reason.NO_ANSWER] * 2 + [Reason.OK] * 2
    with pytest.raises(StopFailed, match="`package` is not installed") as caught:
        executor.cancel(handle)
    assert caught.value.left_running == ("one://here/exp?replicas=2",)
    assert other.stopped == [None]
    with pytest.raises(ConfigError, match="`package` is not installed"):
        executor.logs(handle, 0)
    placement = Placement(replicas=4, parts=(Part("one", 2), Part("two", 2)))
    run = Run(RunSpec("exp", Task("train:main"), placement), executor, open_store("memory://missing"), handle)
    run.cancel(abandon=True)
    assert other.stopped == [None, None]
    assert run.status().is_terminal
