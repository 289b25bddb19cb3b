"""A run whose image runs its own program: nothing is imported, and the exit code is the outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from atoll.context import RunContext
from atoll.entry import Entry
from atoll.errors import AuthError, BackendUnavailable, ConfigError, InvalidSpec, RunNotFound
from atoll.executors.base import Capabilities, Plan
from atoll.handle import RunHandle
from atoll.runs.prepare import prepare
from atoll.runs.run import Run
from atoll.spec import Code, Placement, RunSpec, Task
from atoll.status import Reason, ReplicaState, RunStatus

PROGRAM = ("./train", "--lr", "0.1 0.2")


class Images:
    """An executor whose replicas have ended with exit code 0; it has no logs."""

    name: ClassVar[str] = "images"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, command: Sequence[Any] = ()) -> None:
        self.command = tuple(command)

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        return Plan(self.name, context.run_id, placement.replicas, {})

    def submit(self, plan: Plan) -> RunHandle:
        return RunHandle(self.name, "here", plan.run_id, plan.replicas)

    def status(self, handle: RunHandle) -> RunStatus:
        return RunStatus.uniform(handle.replicas, ReplicaState.SUCCEEDED, Reason.OK, "")

    def cancel(self, handle: RunHandle) -> None:
        pass

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        raise BackendUnavailable("no answer")


def started(store: Path, *, program: Sequence[Any], **spec: object) -> Run:
    return prepare("", on=Images(program), store=store, replicas=2, program=program, **spec).submit()


def test_a_program_that_ends_with_code_0_has_succeeded(tmp_path: Path) -> None:
    run = started(tmp_path, program=PROGRAM, args={"lr": [0.1], "not a name": None})
    assert run.status().state is ReplicaState.SUCCEEDED
    result = run.result()
    assert result.ok
    assert result.values == [None, None]


def test_an_entry_point_that_wrote_no_outcome_has_still_failed(tmp_path: Path) -> None:
    run = prepare("train:main", on=Images(), store=tmp_path).submit()
    assert [replica.reason for replica in run.status().replicas] == [Reason.NO_OUTCOME]


def test_the_log_of_a_program_is_only_with_the_backend(tmp_path: Path) -> None:
    run = started(tmp_path, program=PROGRAM)
    with pytest.raises(BackendUnavailable):
        list(run.logs(0))
    for selection in ({"since": 1.0}, {"attempt": 0}):
        with pytest.raises(ConfigError):
            list(run.logs(0, **selection))  # type: ignore[arg-type]


class KeepsAttempts(Images):
    def attempt_logs(self, handle: RunHandle, rank: int, attempt: int, *, tail: int | None = None) -> Iterator[str]:
        if attempt > 1:
            raise RunNotFound("no such attempt")
        return iter([f"rank {rank}, attempt {attempt}, tail {tail}"])


def test_the_backend_may_keep_earlier_attempts_of_a_program(tmp_path: Path) -> None:
    run = prepare("", on=KeepsAttempts(PROGRAM), store=tmp_path, replicas=2, program=PROGRAM).submit()
    assert list(run.logs(1, attempt=0, tail=3)) == ["rank 1, attempt 0, tail 3"]
    with pytest.raises(RunNotFound):
        list(run.logs(1, attempt=2))
    with pytest.raises(ConfigError) as caught:
        list(run.logs(1, since=1.0))
    assert caught.value.reason == "program"


def test_an_attempt_that_the_store_lacks_is_asked_of_the_backend(tmp_path: Path) -> None:
    run = prepare("train:main", on=KeepsAttempts(), store=tmp_path, replicas=2).submit()
    assert list(run.logs(1, attempt=1)) == ["rank 1, attempt 1, tail None"]
    assert list(run.logs(1, attempt=2)) == []


def test_a_log_that_we_may_not_read_and_the_store_lacks_is_an_error(tmp_path: Path) -> None:
    class Forbids(Images):
        def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
            raise AuthError("no", reason="forbidden")

    run = prepare("train:main", on=Forbids(), store=tmp_path, replicas=1).submit()
    with pytest.raises(AuthError):
        list(run.logs(0))


def test_the_record_has_the_program_and_shows_it_as_a_command() -> None:
    built = RunSpec.build("", program=list(PROGRAM))
    assert RunSpec.from_json(built.to_json()) == built
    assert built.task.to_json()["program"] == list(PROGRAM)
    assert built.task.title == "./train --lr '0.1 0.2'"
    assert Task("train:main").title == "train:main"
    assert "program" not in Task("train:main").to_json()


@pytest.mark.parametrize("entry", ["", "legacy.replica_entrypoint", "train:main", Entry(dotted="train")])
def test_an_entry_beside_a_program_is_not_decided(entry: str | Entry, tmp_path: Path) -> None:
    draft = prepare(entry, on=Images(PROGRAM), store=tmp_path, program=PROGRAM)
    assert draft.spec.task.entry == str(entry)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"program": ["", "x"]}, "program"),
        ({"program": ["a\0b"]}, "program"),
        ({"program": [1]}, "program"),
        ({"program": ["x"], "argv": ["y"]}, "argv"),
        ({"program": ["x"], "args": {"a": {1}}}, "args.a"),
        ({"program": ["x"], "args": [1]}, "args"),
        ({"program": ["x"], "workspace": "."}, "workspace"),
        ({"program": []}, "entry"),
    ],
)
def test_what_is_no_program_is_refused(spec: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec) as caught:
        started(tmp_path, **spec)
    assert caught.value.fields == (field,)


def test_a_program_needs_an_image(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec) as caught:
        prepare("", on="local", store=tmp_path, program=PROGRAM)
    assert set(caught.value.fields) == {"program"}
    with pytest.raises(InvalidSpec):
        Task("", code=Code.in_place("/"), program=PROGRAM)
