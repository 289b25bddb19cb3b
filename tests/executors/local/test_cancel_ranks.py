"""Single ranks of a run on this machine are cancelled, and the others go on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import atoll
from atoll import journal
from atoll.errors import Conflict, InvalidSpec, StopFailed
from atoll.executors.local.executor import LocalExecutor
from atoll.handle import RunHandle
from atoll.replica import processes
from atoll.replica.spool import Spool
from atoll.runs.attach import UnrecordedRun, attach
from atoll.runs.run import Run
from atoll.status import ReplicaState

pytestmark = pytest.mark.process

LIMIT_S = 60.0
RUNNING, CANCELLED = ReplicaState.RUNNING, ReplicaState.CANCELLED


@pytest.fixture
def hanging(jobs: Path, store: str):
    """Launches a run of three replicas that hang, and cancels it at the end."""
    runs: list[Run] = []

    def start(**options) -> Run:
        args = options.pop("args", {})
        run = atoll.launch("jobs:hang", replicas=3, store=store, args=args, **{"grace_s": 0.3, **options})
        runs.append(run)
        until(lambda: all("hanging" in list(run.logs(rank)) for rank in range(3)), "all replicas hang")
        return run

    yield start
    for run in runs:
        run.executor.cancel(run.handle)


def until(claim, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.01)


def spool_of(run: Run) -> Spool:
    return Spool(f"/{run.handle.native_id}")


def states(run: Run) -> list[ReplicaState]:
    return [replica.state for replica in run.status().replicas]


def pid_of(run: Run, rank: int) -> int:
    return int(run.executor.status(run.handle).replicas[rank].native_id or 0)


@pytest.mark.parametrize("escape", [False, True])
def test_no_process_of_the_rank_is_left_and_every_process_of_the_others_is(hanging, escape):
    run = hanging(args={"stubborn": True, "children": 2, "escape": escape})
    before = len(processes.of_label(str(spool_of(run).root)))
    run.cancel([1])
    assert len(processes.of_label(str(spool_of(run).root))) == before - 3
    assert states(run) == [RUNNING, CANCELLED, RUNNING]
    assert not processes.below({spool_of(run).attempts_folder(1)})
    assert len(processes.below({spool_of(run).attempts_folder(0)})) == 2


def test_a_cancelled_rank_is_not_restarted(hanging):
    run = hanging(max_restarts=5, args={"stubborn": True})
    run.cancel([0])
    run.cancel([0])
    assert states(run) == [CANCELLED, RUNNING, RUNNING]
    assert spool_of(run).attempts(0) == [0]


def test_a_rank_that_waits_for_its_restart_is_cancelled(jobs, store):
    run = atoll.launch("jobs:fail_until", replicas=2, store=store, args={"attempt": 20}, max_restarts=20)
    until(lambda: run.executor.status(run.handle).replicas[1].attempt >= 2, "rank 1 was restarted twice")
    run.cancel([1])
    attempts = spool_of(run).attempts(1)
    until(lambda: len(spool_of(run).attempts(0)) > len(attempts), "rank 0 was restarted again")
    assert spool_of(run).attempts(1) == attempts
    assert run.status().replicas[1].state is CANCELLED
    run.cancel()


def test_a_suspended_supervisor_is_woken(hanging):
    run = hanging()
    os.kill(spool_of(run).supervisor_pid(), signal.SIGSTOP)
    run.cancel([2])
    assert states(run) == [RUNNING, RUNNING, CANCELLED]


def test_a_rank_of_a_run_whose_supervisor_died_is_quiet(hanging):
    run = hanging()
    pid = pid_of(run, 1)
    os.kill(spool_of(run).supervisor_pid(), signal.SIGKILL)
    run.executor.cancel(run.handle, [1])
    assert processes.is_dead(pid)


def test_a_hangup_without_a_request_stops_nothing(hanging):
    run = hanging()
    os.kill(spool_of(run).supervisor_pid(), signal.SIGHUP)
    run.cancel([1])
    assert states(run) == [RUNNING, CANCELLED, RUNNING]


def test_a_rank_cancelled_before_the_supervisor_starts_does_not_start(jobs, store):
    """The launcher has written the plan, and has not started the supervisor."""
    draft = atoll.prepare("jobs:echo", replicas=3, store=store, run_id="early")
    executor = LocalExecutor()
    handle = executor.handle(draft.plan)
    spool = Spool(draft.plan.request["label"])
    spool.root.mkdir(parents=True)
    spool.plan.write_text(json.dumps(draft.plan.request, sort_keys=True))
    executor.cancel(handle, [1])
    waiting = ReplicaState.PENDING
    assert [r.state for r in executor.status(handle).replicas] == [waiting, CANCELLED, waiting]
    journal.record_run(draft.store, draft.spec, executor="local")
    executor.start(draft.plan)
    until(lambda: executor.status(handle).is_terminal, "the run ends")
    ends = executor.status(handle).replicas
    assert [r.state for r in ends] == [ReplicaState.SUCCEEDED, CANCELLED, ReplicaState.SUCCEEDED]
    assert spool.attempts(1) == []
    assert list(draft.store.list(journal.RunKeys("early").beats_prefix())) == [
        journal.RunKeys("early").beat(rank) for rank in (0, 2)
    ]


def test_cancels_while_the_run_starts_stop_that_rank_only(jobs, store):
    """Another process cancels a rank again and again while the launcher starts the run."""
    draft = atoll.prepare("jobs:hang", replicas=3, store=store, run_id="racing", grace_s=1)
    executor, ended = LocalExecutor(), threading.Event()
    handle = executor.handle(draft.plan)

    def cancel() -> None:
        while not ended.is_set():
            executor.cancel(handle, [2])

    journal.record_rank_cancel(draft.store, "racing", 2, journal.RankCancel())
    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        run = draft.submit()
        until(lambda: states(run)[2].is_terminal, "rank 2 has ended")
        assert states(run) == [RUNNING, RUNNING, CANCELLED]
    finally:
        ended.set()
        thread.join()
        executor.cancel(handle)


def test_a_rank_that_is_over_stays_as_it_ended(jobs, store):
    run = atoll.launch("jobs:fail", replicas=2, store=store)
    run.wait(LIMIT_S)
    stopped = run.cancel([1])
    assert stopped.record_error is None
    assert [r.state for r in run.status().replicas] == [ReplicaState.FAILED] * 2
    assert journal.read_rank_cancels(run.store, run.id) == {}


def test_cancelling_one_rank_after_the_other_cancels_all(hanging):
    run = hanging()
    for rank in (2, 0, 1):
        run.cancel([rank])
    assert states(run) == [CANCELLED] * 3
    assert [outcome.state for outcome in run.result().outcomes] == [CANCELLED] * 3
    with pytest.raises(Conflict) as caught:
        atoll.launch("jobs:hang", replicas=3, store=run.store.uri, run_id=run.id, grace_s=0.3)
    assert caught.value.reason == "cancelled"


def test_all_ranks_at_once_are_the_whole_run(hanging):
    run = hanging()
    run.cancel([2, 1, 0, 0])
    assert states(run) == [CANCELLED] * 3
    assert journal.is_cancelled(run.store, run.id)


def test_a_cancelled_rank_does_not_make_the_run_a_cancelled_one(hanging):
    run = hanging()
    run.cancel([1])
    assert not journal.is_cancelled(run.store, run.id)
    again = atoll.launch("jobs:hang", replicas=3, store=run.store.uri, run_id=run.id, grace_s=0.3)
    assert again.was_there
    assert states(again) == [RUNNING, CANCELLED, RUNNING]


def test_a_stopped_rank_without_a_record_is_still_a_conflict(hanging):
    """A launcher cannot know whether the whole run was to be stopped."""
    run = hanging()
    run.executor.cancel(run.handle, [1])
    with pytest.raises(Conflict) as caught:
        atoll.launch("jobs:hang", replicas=3, store=run.store.uri, run_id=run.id, grace_s=0.3)
    assert caught.value.reason == "cancelled"


def test_a_rank_of_an_unfinished_launch_is_stopped_when_the_launch_is_finished(jobs, store):
    draft = atoll.prepare("jobs:hang", replicas=3, store=store, run_id="half", grace_s=0.3)
    journal.record_run(draft.store, draft.spec, executor="local")
    journal.record_intent(draft.store, "half", draft.plan.request, draft.executor.handle(draft.plan))
    attach("half", store=store).cancel([1])
    run = draft.submit()
    assert states(run)[1] is CANCELLED
    assert not any(state.is_terminal for state in (states(run)[0], states(run)[2]))
    run.cancel()


def test_a_run_without_its_record_is_stopped_by_rank(hanging):
    run = hanging()
    run.store.delete(journal.RunKeys(run.id).run())
    found = attach(str(run.handle))
    assert isinstance(found, UnrecordedRun)
    stopped = found.cancel([1])
    assert stopped.record_error is not None
    assert states(found) == [RUNNING, CANCELLED, RUNNING]
    assert found.cancel([1]).record_error is None, "the rank had ended"


def test_bad_ranks_are_refused_before_anything_happens(hanging):
    run = hanging()
    unrecorded = UnrecordedRun(run.id, run.handle, InvalidSpec("x", []), run.executor)
    for ranks in ([], [3], [-1], [1, 9], ["1"], [True], [1.0], "12", 1):
        for found in (run, unrecorded):
            with pytest.raises(InvalidSpec) as caught:
                found.cancel(ranks)
            assert caught.value.fields == ("ranks",)
    assert states(run) == [RUNNING] * 3


def test_a_mark_that_cannot_be_written_names_the_rank(hanging):
    """The spool is full: the supervisor cannot see which rank is meant, so the caller gets its name."""
    run = hanging()
    spool_of(run).cancel_rank(1).symlink_to("/nowhere/at/all")
    with pytest.raises(StopFailed) as caught:
        run.executor.cancel(run.handle, [1])
    assert caught.value.left_running == ("rank 1",)
    assert states(run) == [RUNNING] * 3


def test_a_run_that_this_machine_never_had_is_quiet(jobs, store):
    draft = atoll.prepare("jobs:hang", replicas=3, store=store, run_id="never")
    handle: RunHandle = LocalExecutor().handle(draft.plan)
    LocalExecutor().cancel(handle, [1])
    assert not Path(draft.plan.request["label"]).exists()
