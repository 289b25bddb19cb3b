"""What the store says about replicas on hosts that do not answer, and how it stops them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable

import pytest

from atoll import journal, registry
from atoll.context import RunContext
from atoll.errors import BackendError, BackendUnavailable
from atoll.executors.ssh.executor import SshExecutor
from atoll.executors.ssh.hosts import Host
from atoll.executors.ssh.request import Block, blocks_of
from atoll.executors.ssh.stored import stop_through_store, stored_rows
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.runs.run import Run
from atoll.spec import RunSpec
from atoll.status import Reason, ReplicaState, ReplicaStatus
from atoll.testing.fakes import FakeClock

SILENT = "host `b` cannot be reached"


@pytest.fixture
def blocks() -> list[Block]:
    """Three replicas on two hosts, of a run that is recorded, as ranks 4 to 6 of 7."""
    uri = f"memory://{uuid.uuid4().hex}"
    spec = RunSpec.build("m:f", run_id="exp", replicas=7, max_restarts=1, grace_s=5)
    journal.record_run(registry.open_store(uri), spec, executor="ssh")
    return blocks_of(RunContext("exp", uri, 1, 4, 7), 3, [Host("a"), Host("b")])


def write(block: Block, key: str, **record: object) -> None:
    registry.open_store(block.context.store_uri).put(key, json.dumps(record).encode())


def ended(block: Block, rank: int, state: str, attempt: int = 0) -> None:
    outcome = {"rank": rank, "attempt": attempt, "state": state, "reason": "ok", "message": "as it says"}
    write(block, RunKeys("exp").outcome(rank, attempt), **outcome)


def test_rows_are_pending_running_or_ended_as_the_store_knows(blocks) -> None:
    first = blocks[0]
    ended(first, 4, "succeeded")
    write(first, RunKeys("exp").beat(5), attempt=2)
    rows = stored_rows(first, SILENT)
    assert [(row.rank, row.state, row.attempt) for row in rows] == [
        (0, ReplicaState.SUCCEEDED, 0),
        (1, ReplicaState.RUNNING, 2),
    ]
    assert [row.progress.problem for row in rows] == ["", SILENT]
    (last,) = stored_rows(blocks[1], SILENT)
    assert (last.rank, last.state, last.host) == (2, ReplicaState.PENDING, "b")


def test_a_failure_that_a_restart_follows_is_no_end(blocks) -> None:
    ended(blocks[1], 6, "failed", attempt=0)
    assert not stored_rows(blocks[1], SILENT)[0].state.is_terminal
    ended(blocks[1], 6, "failed", attempt=1)
    assert stored_rows(blocks[1], SILENT)[0].state is ReplicaState.FAILED


def test_a_store_that_fails_too_is_part_of_the_problem() -> None:
    (block,) = blocks_of(RunContext("exp", "nowhere://x"), 1, [Host("a")])
    (row,) = stored_rows(block, SILENT)
    assert (row.state, SILENT in row.progress.problem, "nowhere" in row.message) == (ReplicaState.PENDING, True, True)


def test_a_stop_is_requested_for_the_chosen_ranks_and_waits_for_their_outcomes(blocks) -> None:
    clock = FakeClock(on_sleep=lambda _: ended(blocks[0], 5, "cancelled"))
    assert stop_through_store(blocks[:1], [1, 2], clock) == {blocks[0]: ""}
    assert journal.read_stops(registry.open_store(blocks[0].context.store_uri), "exp") == {5}


def test_a_rank_without_an_outcome_may_still_run(blocks) -> None:
    ended(blocks[0], 4, "succeeded")
    (problem,) = stop_through_store(blocks[:1], [0, 1], FakeClock()).values()
    assert "rank 5" in problem
    assert "rank 4" not in problem


def test_a_run_without_a_record_cannot_be_stopped_through_the_store() -> None:
    (block,) = blocks_of(RunContext("other", f"memory://{uuid.uuid4().hex}"), 1, [Host("a")])
    assert stop_through_store([block], [0], FakeClock())[block] != ""


def test_a_stop_is_requested_through_the_store_while_ssh_is_tried_again(blocks, monkeypatch) -> None:
    executor, block = SshExecutor(hosts=["a", "b"]), blocks[1]
    store = registry.open_store(block.context.store_uri)

    def call(*_: object, on_retry: Callable[[BackendError], None], **__: object) -> dict[str, object]:
        on_retry(BackendUnavailable("not yet", executor="ssh"))
        assert journal.read_stops(store, "exp", launch=1) == {6}
        return {}

    monkeypatch.setattr(executor._hosts, "call", call)
    executor._stop(block, [0, 1, 2])
    assert journal.read_stops(store, "exp", launch=1) == {6}


def test_a_host_that_is_gone_is_lost_when_the_run_was_abandoned(monkeypatch) -> None:
    """The other host answers, so the status does not come from the store alone."""
    uri = f"memory://{uuid.uuid4().hex}"
    spec, executor = RunSpec.build("m:f", run_id="exp", replicas=2), SshExecutor(hosts=["a", "b"])
    store, handle = registry.open_store(uri), RunHandle("ssh", "a,b", f"1/exp/{uri}", 2)
    journal.record_run(store, spec, executor="ssh")
    store.put(RunKeys("exp").beat(1), json.dumps({"attempt": 0, "beat_at": 5.0}).encode())

    def status(block: Block) -> list[ReplicaStatus]:
        if str(block.host) == "b":
            raise BackendUnavailable(SILENT, executor="ssh")
        return [ReplicaStatus(0, ReplicaState.CANCELLED, Reason.CANCELLED, "")]

    monkeypatch.setattr(executor, "_block_status", status)
    run = Run(spec, executor, store, handle)
    assert [(row.state, row.reason) for row in run.status().replicas] == [
        (ReplicaState.CANCELLED, Reason.CANCELLED),
        (ReplicaState.RUNNING, Reason.NO_ANSWER),
    ]
    journal.record_cancel(store, "exp", journal.Cancel("abandoned", is_abandoned=True))
    assert [row.state for row in run.status().replicas] == [ReplicaState.CANCELLED, ReplicaState.LOST]
