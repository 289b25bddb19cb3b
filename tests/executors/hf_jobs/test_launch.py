"""Launches on Hugging Face Jobs when answers are lost, lists are late, and the service refuses."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from atoll import journal
from atoll.context import CLAIMED, RunContext
from atoll.errors import (
    AuthError,
    BackendError,
    BackendUnavailable,
    CapacityError,
    InvalidSpec,
    SubmitError,
    Unsupported,
)
from atoll.executors.base import Sweeper
from atoll.keys import RunKeys
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState
from atoll.testing.bench import Call, Fault, assert_each_rank_once, cleared, launched, let_go, order, over, until
from services.hf_jobs.faults import NO_CREDIT, UNAVAILABLE
from services.hf_jobs.job import Job


def created(hub) -> Counter[str]:
    return Counter(job.labels["atoll-rank"] for job in hub.jobs.values())


def test_a_create_is_repeated_only_after_a_list_without_the_job(bench, hub):
    hub.faults.refuse(Call.CREATE, 502, "Bad Gateway", nth=2, times=1, after_effect=True)
    with launched(bench, "hold", 3) as run:
        assert created(hub) == Counter({"0": 1, "1": 1, "2": 1})
        assert hub.calls["run"] == 3, "the lost answer was found by its label"
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED


def test_a_list_that_lags_delays_the_launch_and_starts_no_twin(bench, hub):
    hub.list_lag = 3
    hub.faults.refuse(Call.CREATE, 502, "Bad Gateway", times=1, after_effect=True)
    with launched(bench, "hold", 2) as run:
        assert created(hub) == Counter({"0": 1, "1": 1})
        assert bench.executor().status(run.handle).state is not ReplicaState.LOST
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED


def test_a_twin_that_came_to_be_after_all_runs_nothing(bench, hub):
    """The answer is lost, and no list shows the job for longer than the launcher waits."""
    ordered = order(bench, "hold", 1)
    with cleared(bench, ordered.run_id):
        hub.list_lag = 10**6
        hub.faults.refuse(Call.CREATE, 502, "Bad Gateway", times=1, after_effect=True)
        run = ordered.draft(bench.executor(list_lag_s=0.0), bench.store_uri).submit()
        for job in hub.jobs.values():
            job.unseen_lists = 0
        assert created(hub) == Counter({"0": 2})
        until(bench, "the twin is over", lambda: any(job.is_over for job in hub.jobs.values()))
        twin = next(job for job in hub.jobs.values() if job.is_over)
        assert twin.message == f"Job failed with exit code: {CLAIMED}. Reason: Error"
        assert bench.executor().status(run.handle).replicas[0].state is ReplicaState.RUNNING
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED
        assert bench.executor().status(run.handle).replicas[0].exit_code == 0
        assert_each_rank_once(bench, run.id, 1)


def test_a_job_of_a_cancelled_run_that_starts_late_runs_nothing(bench, hub):
    with launched(bench, "hold", 1) as run:
        run.cancel()
        plan = run.plan()
        late = hub.run("tester", {**next(iter(hub.jobs.values())).spec})
        until(bench, "the late job is over", lambda: hub.jobs[late["id"]].is_over)
        assert hub.jobs[late["id"]].message == f"Job failed with exit code: {CLAIMED}. Reason: Error"
        assert plan.replicas == 1


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (NO_CREDIT, CapacityError, "credit"),
        ((403, "no"), AuthError, ""),
        ((429, "slow down"), SubmitError, ""),
        (UNAVAILABLE, SubmitError, ""),
        ((400, '"flavor" must be one of'), BackendError, ""),
    ],
)
def test_refusals_become_the_documented_errors(bench, hub, answer, error, reason):
    hub.faults.refuse(Call.CREATE, *answer)
    draft = order(bench, "hold").draft(bench.executor(patience_s=0.2), bench.store_uri)
    with pytest.raises(error) as caught:
        draft.submit()
    assert caught.value.reason == reason
    assert isinstance(caught.value.__cause__, BackendUnavailable) == (error is SubmitError)
    assert hub.jobs == {}


def test_a_throttled_create_waits_as_long_as_the_service_says(bench, hub):
    tried: list[float] = []
    hub.faults.on(Call.CREATE, lambda: tried.append(time.monotonic()), times=None)
    hub.faults.fail(Call.CREATE, Fault.THROTTLED, times=1)
    with launched(bench, "hold", executor=bench.executor(patience_s=20.0)) as run:
        first, second = tried
        assert second - first >= 1.0, "the 429 has `RateLimit: t=1`"
        assert hub.calls["list"] <= 3, "a throttled create had no effect, so nothing has to be looked up"
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED


def test_a_wrong_flavor_or_a_missing_secret_is_told_before_anything_is_recorded(bench, hub):
    executor = bench.executor(flavor="a10g-smal", secrets=["NO_SUCH_VARIABLE"])
    with pytest.raises(InvalidSpec) as caught:
        order(bench, "hold").draft(executor, bench.store_uri).submit()
    assert caught.value.fields == ("secrets.NO_SUCH_VARIABLE", "flavor")
    assert "a10g-small" in caught.value.problems[1]
    assert list(bench.store.list()) == []
    assert hub.calls["run"] == 0


def test_a_launch_does_not_need_the_hardware_list(bench, hub):
    hub.faults.refuse("hardware", 503, "Service Unavailable")
    with launched(bench, "hold") as run:
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED


def test_an_answer_that_cannot_be_read_is_not_an_answer(bench, hub, monkeypatch):
    info = Job.info
    answers = iter([{"id": "cut"}])
    monkeypatch.setattr(Job, "info", lambda job: next(answers, None) or info(job))
    with launched(bench, "hold", 1) as run:
        assert created(hub) == Counter({"0": 1})
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED


def test_a_store_that_replicas_could_not_open_is_refused(executor):
    placement, context = Placement(), RunContext("r", "s3://bucket/x")
    with pytest.raises(Unsupported) as caught:
        executor(secrets=["AWS_ACCESS_KEY_ID"]).plan(context, placement)
    assert caught.value.fields == ("store",)
    keys = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    assert executor(secrets=keys).plan(context, placement).request["secrets"] == {key: f"env:{key}" for key in keys}
    assert executor(store_is_open=True).plan(context, placement).replicas == 1


def test_secrets_are_sent_as_secrets_and_never_come_back(bench, hub, monkeypatch):
    monkeypatch.setenv("VAULT", "hunter2")
    with launched(bench, "variables", args={"names": ["PASSWORD"]}, secrets={"PASSWORD": "env:VAULT"}) as run:
        let_go(bench, run)
        job = next(iter(hub.jobs.values()))
        assert job.spec["secrets"] == {"PASSWORD": "hunter2"}
        assert "hunter2" not in str(job.info())
        assert run.result().values == [{"PASSWORD": "hunter2"}]


def test_an_older_version_of_atoll_in_the_image_ends_before_user_code(bench, hub, monkeypatch):
    monkeypatch.setattr(journal, "__version__", "999.0.0")  # of the launcher: the container has its own
    with launched(bench, "hold") as run:
        until(bench, "the job is over", lambda: next(iter(hub.jobs.values())).is_over)
        replica = run.status().replicas[0]
        assert (replica.state, replica.reason) == (ReplicaState.FAILED, Reason.IMAGE)
        assert "999.0.0" in run.result().outcomes[0].message


@pytest.mark.parametrize("is_short", [False, True])
def test_sweep_finds_what_runs_in_the_namespace(bench, hub, is_short):
    hub.lists_are_short = is_short  # then each job is looked up
    executor = bench.executor()
    assert isinstance(executor, Sweeper)
    with launched(bench, "hold", 2) as run:
        strays = executor.strays()
        assert sorted(stray.native_id for stray in strays) == sorted(hub.jobs)
        assert {stray.handle for stray in strays} == {run.handle}
        assert {stray.context for stray in strays} == {RunContext(run.id, bench.store_uri)}
        assert executor.origin(run.handle) == RunContext(run.id, bench.store_uri)
        let_go(bench, run)
        assert executor.strays() == []


@pytest.mark.parametrize("is_short", [False, True])
def test_the_exit_code_comes_from_the_store_if_the_message_of_the_service_has_none(bench, hub, monkeypatch, is_short):
    info = Job.info
    monkeypatch.setattr(Job, "info", lambda job: {**info(job), "status": {"stage": job.stage, "message": None}})
    hub.lists_are_short = is_short
    with launched(bench, "act", 3, args={"parts": ["sys_exit", "sigkill", "return"]}) as run:
        over(bench, run)
        wanted = [
            (ReplicaState.FAILED, Reason.USER_ERROR, 3),
            (ReplicaState.FAILED, Reason.KILLED, 137),
            (ReplicaState.SUCCEEDED, Reason.OK, 0),
        ]
        for status in (run.status(), bench.executor().status(run.handle)):
            assert [(r.state, r.reason, r.exit_code) for r in status.replicas] == wanted
        bench.store.delete(RunKeys(run.id).outcome(0, 0))
        [alone, *_] = bench.executor().status(run.handle).replicas
        assert (alone.state, alone.reason, alone.exit_code) == (ReplicaState.FAILED, Reason.USER_ERROR, None)


def test_a_deleted_job_is_lost(bench, hub):
    with launched(bench, "echo") as run:
        let_go(bench, run)
        next(iter(hub.jobs.values())).stage = "DELETED"
        assert bench.executor().status(run.handle).replicas[0].state is ReplicaState.LOST
        assert run.status().replicas[0].state is ReplicaState.SUCCEEDED, "the store knows how it ended"
