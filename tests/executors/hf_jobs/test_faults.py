"""The Hub loses answers of every request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from atoll.errors import BackendUnavailable, SubmitError
from atoll.handle import RunHandle
from atoll.status import ReplicaState
from atoll.testing.bench import assert_each_rank_once, cleared, entered, launched, let_go, order
from services.hf_jobs.faults import Refusal
from services.hf_jobs.job import Job

OPERATIONS = {"hardware", "run", "list", "inspect", "cancel", "logs"}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_run_survives_lost_answers_of_every_request(bench, hub, lost):
    executor = bench.executor(patience_s=30.0, list_lag_s=1.0)
    hub.list_lag = 2
    for operation in OPERATIONS:
        hub.faults.refuse(operation, 502, "Bad Gateway", times=lost, after_effect=True)
    told = {"lines": ["rank {rank}"], "then_hold": True}
    with launched(bench, "say", 2, executor=executor, args=told, gpu="A10G") as run:
        entered(bench, run)
        executor.cancel(run.handle, [1])
        ended = let_go(bench, run).replicas
        assert [r.state for r in ended] == [ReplicaState.SUCCEEDED, ReplicaState.CANCELLED]
        assert list(executor.logs(run.handle, 0, follow=True)) == ["rank 0"]
        assert Counter(job.labels["atoll-rank"] for job in hub.jobs.values()) == Counter({"0": 1, "1": 1})
        assert_each_rank_once(bench, run.id, 2)
    assert set(hub.calls) == OPERATIONS
    assert hub.unimplemented == []


def test_a_cancel_is_quiet_while_a_list_shows_that_an_ended_job_runs(bench, hub):
    with launched(bench, "echo", 1) as run:
        let_go(bench, run)
        hub.old_stages[next(iter(hub.jobs))] = "RUNNING"
        bench.executor().cancel(run.handle)
        assert hub.calls["cancel"] == 1
        hub.old_stages.clear()
        assert bench.executor().status(run.handle).state is ReplicaState.SUCCEEDED


def test_a_cancel_waits_for_jobs_that_an_earlier_one_stops(bench, hub, monkeypatch):
    """The service refuses a second stop of a job, and has lost the answer to the first one."""
    cancel, stopping = hub.cancel, set[str]()

    def strict(namespace: str, job_id: str) -> dict[str, Any]:
        if job_id in stopping:
            raise Refusal(409, "Job is being canceled")
        stopping.add(job_id)
        return cancel(namespace, job_id)

    monkeypatch.setattr(hub, "cancel", strict)
    hub.faults.refuse("cancel", 502, "Bad Gateway", times=1, after_effect=True)
    with launched(bench, "hold", 2, args={"stubborn": True}, grace_s=1.0) as run:
        entered(bench, run)
        bench.executor(patience_s=30.0).cancel(run.handle, [0])
        bench.executor().cancel(run.handle)
        assert [r.state for r in run.executor.status(run.handle).replicas] == [ReplicaState.CANCELLED] * 2


def test_jobs_of_others_in_a_list_are_not_taken_for_replicas(bench, hub, monkeypatch):
    """A server that ignores the filter by label shows the jobs of every user and of every run."""
    listed = hub.list
    monkeypatch.setattr(hub, "list", lambda namespace, query: listed(namespace, {**query, "label": []}))
    hub.page_size = 2
    other = {"command": ["sleep", "60"], "arguments": [], "environment": {}, "flavor": "cpu-basic", "dockerImage": "x"}
    hub.run("tester", {**other, "labels": {"atoll-run": "another", "atoll-rank": "0", "atoll-token": "t"}})
    hub.run("tester", other)
    with launched(bench, "hold", 2) as run:
        own = {job.id for job in hub.jobs.values() if job.labels.get("atoll-run") == run.handle.native_id}
        assert {replica.native_id for replica in run.executor.status(run.handle).replicas} == own
        assert {stray.native_id for stray in run.executor.strays()} == own
        run.cancel()
    assert [job.is_over for job in hub.jobs.values() if job.id not in own] == [False, False]


def test_a_job_whose_times_cannot_be_read_is_left_neither_running_nor_unnamed(bench, hub, monkeypatch):
    """The client reads one form of times; it raises a `ValueError` for others when the job exists already."""
    info = Job.info
    draft = order(bench, "hold").draft(bench.executor(patience_s=0.3), bench.store_uri)
    with cleared(bench, draft.spec.run_id):
        with monkeypatch.context() as patch:
            patch.setattr(Job, "info", lambda job: {**info(job), "createdAt": "2026-01-01 00:00:00+02:00"})
            with pytest.raises(SubmitError) as caught:
                draft.submit()
        assert caught.value.left_running
        draft.executor.cancel(draft.executor.handle(draft.plan))
        assert bench.running(draft.spec.run_id) == []


@pytest.mark.parametrize(
    "answer", [{"error": "later"}, [None], [{"id": "1", "owner": None}], [{"id": "1", "createdAt": "yesterday"}]]
)
def test_a_list_that_is_none_is_an_error_of_the_service(hub, executor, monkeypatch, answer):
    monkeypatch.setattr(hub, "list", lambda *_: (answer, None))
    with pytest.raises(BackendUnavailable) as caught:
        executor(patience_s=0.3).status(RunHandle("hf_jobs", "tester", "some-run", 1))
    assert (caught.value.executor, caught.value.retryable) == ("hf_jobs", True)
