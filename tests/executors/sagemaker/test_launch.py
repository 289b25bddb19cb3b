"""Starting over the wire: all or none, adoption, lost answers, interruption."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from atoll.context import RunContext
from atoll.errors import CapacityError, Conflict, SubmitError
from atoll.executors.sagemaker.request import job_name
from atoll.spec import Placement
from atoll.status import ReplicaState
from atoll.testing import contract_jobs
from atoll.testing.bench import Call, Fault, entered, launched, let_go, until
from atoll.testing.fakes import FakeClock

CONTEXT = RunContext("exp", "s3://nowhere/exp")


@pytest.fixture
def held(peer):
    """Jobs wait for machines that do not come."""
    peer.engine.admits.clear()
    return peer


def plan_of(executor: Any, replicas: int = 3, **placement: Any) -> Any:
    return executor.plan(CONTEXT, Placement(replicas=replicas, **placement))


def going(peer: Any) -> list[str]:
    return sorted(name for name, job in peer.engine.jobs.items() if not job.is_over)


def test_a_full_quota_stops_the_ranks_before_and_says_why(held, executor):
    held.engine.quota = 2
    with pytest.raises(SubmitError) as caught:
        executor().submit(plan_of(executor()))
    assert isinstance(caught.value.__cause__, CapacityError)
    assert caught.value.left_running == ()
    assert "Service Quotas" in (caught.value.hint or "")
    assert going(held) == []
    assert len(held.engine.jobs) == 2


def test_accepted_jobs_that_no_lookup_finds_are_named(held, executor):
    held.engine.quota = 2
    plan = plan_of(executor())
    names = [body["TrainingJobName"] for body in plan.request["jobs"]]
    held.engine.unseen_looks = dict.fromkeys(("ListTrainingJobs", "DescribeTrainingJob", "StopTrainingJob"), 10_000)
    with pytest.raises(SubmitError) as caught:
        executor(clock=FakeClock()).submit(plan)
    assert sorted(caught.value.left_running) == names[:2] == going(held)


def test_a_name_that_is_being_deleted_is_not_taken_for_a_running_job(held, executor):
    plan = plan_of(executor(), 1)
    body = plan.request["jobs"][0]
    held.engine.seed(body, "Deleting", "Completed")
    handle = executor().submit(plan)
    assert executor().status(handle).replicas[0].state is ReplicaState.LOST


def test_what_could_not_be_stopped_is_named_exactly(held, executor):
    plan = plan_of(executor())
    names = [body["TrainingJobName"] for body in plan.request["jobs"]]
    held.faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=3)
    held.faults.fail(Call.STOP, Fault.FORBIDDEN, nth=2)
    with pytest.raises(SubmitError) as caught:
        executor().submit(plan)
    assert list(caught.value.left_running) == going(held)
    assert len(caught.value.left_running) == 1
    assert set(caught.value.left_running) <= set(names[:2])


@pytest.mark.parametrize("after_effect", [False, True])
def test_ctrl_c_at_any_create_leaves_nothing(held, executor, after_effect):
    def interrupt() -> None:
        raise KeyboardInterrupt

    class Interrupting:
        """A client whose k-th create is interrupted, before or after it took effect."""

        def __init__(self, inner: Any, nth: int) -> None:
            self._inner, self._left = inner, nth

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def create_training_job(self, **body: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not after_effect:
                interrupt()
            answer = self._inner.create_training_job(**body)
            if self._left == 0:
                interrupt()
            return answer

    import boto3

    for nth in (1, 2, 3):
        client = Interrupting(boto3.client("sagemaker"), nth)
        with pytest.raises(KeyboardInterrupt):
            executor(sagemaker_client=client).submit(plan_of(executor(), env={"N": str(nth)}))
        assert going(held) == []
        held.engine.jobs.clear()


def test_a_job_of_the_same_name_that_is_not_ours_is_a_conflict(held, executor):
    plan = plan_of(executor(), 1)
    foreign = copy.deepcopy(plan.request["jobs"][0])
    del foreign["Environment"], foreign["Tags"]
    held.engine.seed(foreign, "InProgress", "Training")
    with pytest.raises(Conflict) as caught:
        executor().submit(plan)
    (difference,) = caught.value.differences
    assert f"`{foreign['TrainingJobName']}`" in difference
    assert held.calls["sagemaker", "ListTags"] == 1


def test_our_own_job_is_known_by_its_tag_where_a_description_has_no_variables(held, executor):
    plan = plan_of(executor(), 2)
    held.engine.shows_environment = False
    assert executor().submit(plan) == executor().submit(plan)
    assert len(held.engine.jobs) == 2


def test_another_content_is_a_conflict_that_says_what_differs(held, executor):
    executor().submit(plan_of(executor(), 1))
    with pytest.raises(Conflict) as caught:
        executor().submit(plan_of(executor(), 1, timeout_s=60))
    assert any(
        "MaxRuntimeInSeconds" in line and "`86400`" in line and "`60`" in line for line in caught.value.differences
    )


def test_jobs_are_seen_when_submit_returns_though_the_service_shows_them_late(held, executor):
    held.engine.unseen_looks = {"ListTrainingJobs": 3, "DescribeTrainingJob": 2}
    handle = executor().submit(plan_of(executor()))
    states = {replica.state for replica in executor().status(handle).replicas}
    assert states == {ReplicaState.PENDING}


def test_a_lost_answer_while_descriptions_lag_starts_no_twin(held, executor):
    held.engine.unseen_looks = {"ListTrainingJobs": 1, "DescribeTrainingJob": 2}
    held.faults.fail(Call.CREATE, Fault.BROKEN, nth=2, times=1, after_effect=True)
    executor(patience_s=10.0).submit(plan_of(executor()))
    assert len(held.engine.jobs) == 3


def test_a_burst_of_throttling_does_not_stop_a_launch(held, executor):
    held.faults.fail(Call.CREATE, Fault.THROTTLED, nth=2, times=3)
    executor(patience_s=20.0).submit(plan_of(executor()))
    assert len(going(held)) == 3


def test_a_restart_on_a_new_spot_machine_is_a_new_attempt_whose_result_counts(bench, peer):
    with launched(bench, "hold", 2) as run:
        entered(bench, run)
        peer.engine.jobs[job_name(run.handle.native_id, 1)].interrupt()

        def is_back() -> bool:
            return any(start.attempt == 1 for start in contract_jobs.starts(bench.store, run.id))

        until(bench, "the second attempt runs", is_back)
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED
        assert run.result().raise_for_failures().values == [0, 1]


def test_the_handle_leads_back_to_run_and_store(held, executor):
    handle = executor().submit(plan_of(executor(), 1))
    assert executor().origin(handle) == CONTEXT
    held.engine.forget(handle.native_id)
    assert executor().origin(handle) is None


def test_a_client_for_the_handles_region_is_used_whatever_ours_is(held, executor):
    handle = executor().submit(plan_of(executor(), 1))
    assert executor(region="eu-west-3").status(handle).replicas[0].state is ReplicaState.PENDING


def test_a_job_whose_answer_was_lost_is_ours_to_stop(held, executor):
    held.faults.fail(Call.CREATE, Fault.BROKEN, nth=2, times=1, after_effect=True)
    held.faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=4)  # the third is the second try of rank 1
    with pytest.raises(SubmitError) as caught:
        executor(patience_s=10.0).submit(plan_of(executor()))
    assert (caught.value.left_running, going(held)) == ((), [])
    assert len(held.engine.jobs) == 2


def test_jobs_of_another_launcher_are_left_alone_and_named(held, executor):
    plan = plan_of(executor())
    first, second, _ = plan.request["jobs"]
    for body in (first, second):
        held.engine.answer("CreateTrainingJob", body)
    held.faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=3)
    with pytest.raises(SubmitError) as caught:
        executor().submit(plan)
    assert list(caught.value.left_running) == [first["TrainingJobName"], second["TrainingJobName"]] == going(held)


@pytest.mark.parametrize("after_effect", [False, True])
def test_an_answer_lost_at_any_call_of_a_runs_life_changes_nothing(held, executor, after_effect):
    """Start, look, follow, cancel, look, with one call after the other failing once."""

    def fresh() -> Any:
        return executor(patience_s=20.0, stop_s=300.0, clock=FakeClock())

    def live(number: int) -> int:
        held.calls.clear()
        plan = plan_of(executor(), 2, env={"NUMBER": str(number)})
        handle = fresh().submit(plan)
        assert fresh().submit(plan) == handle
        assert {r.state for r in fresh().status(handle).replicas} == {ReplicaState.PENDING}
        assert list(fresh().logs(handle, 1)) == []
        fresh().cancel(handle)
        assert {r.state for r in fresh().status(handle).replicas} == {ReplicaState.CANCELLED}
        assert len(held.engine.jobs) == 2
        held.engine.jobs.clear()
        return sum(held.calls.values())

    calls = live(0)
    for number in range(1, calls + 1):
        held.faults.fail("*", Fault.BROKEN, nth=number, times=1, after_effect=after_effect)
        live(number)
        held.faults.heal()
