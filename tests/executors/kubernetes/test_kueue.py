"""Runs in queues of the real Kueue: why they wait, what stops them, and that they come back."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import atoll
from atoll._time import SystemClock
from atoll.context import RunContext
from atoll.errors import AtollError, BackendUnavailable, CapacityError, InvalidSpec, SubmitError
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.kube.role import LOCAL_QUEUES, WORKLOADS, Right, role
from atoll.kube.role import PENDING as POSITION
from atoll.kube.settings import KubernetesSettings
from atoll.runs.prepare import prepare
from atoll.runs.run import Run
from atoll.runs.sweep import leftovers
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState
from atoll.testing import contract_jobs
from services.kubernetes.controllers.queues import Queue, QueueNamespace
from services.kubernetes.scenario import HOLD, LIMIT_S, Scenario, rows

PENDING, RUNNING, SUCCEEDED = ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.SUCCEEDED
FAILED, CANCELLED, LOST = ReplicaState.FAILED, ReplicaState.CANCELLED, ReplicaState.LOST
ONCE = (
    "[ -e {flag}$REPLICA_RANK ] && exit 0; trap 'touch {flag}$REPLICA_RANK; exit 9' TERM; echo ready; "
    "while :; do sleep 0.05; done"
)
"""Runs until it is told to end; the next attempt succeeds."""


TRAINER = '''
import time

import torch
from torch import nn

import atoll


def train(ctx: atoll.ReplicaContext) -> dict[str, object]:
    """Five rounds of four steps. The first attempt stops in the third round, and waits to be ended."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, steps = nn.Linear(8, 3), 0
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(100 + ctx.rank)
    batches = [torch.randn(16, 8, generator=data) for _ in range(20)]
    with atoll.DiLoCo(model, inner, ctx, inner_steps=4, codec="fp32", checkpoint=1) as outer:
        for x in outer.steps(batches, rounds=5):
            if ctx.attempt == 0 and steps == 9:
                print("held", flush=True)
                time.sleep(600)
            nn.functional.mse_loss(model(x), torch.sin(x[:, :3])).backward()
            inner.step()
            inner.zero_grad()
            steps += 1
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return {"weights": weights.hex(), "steps": steps}
'''


def queued(scenario: Scenario, queue: Queue, script: str = HOLD, *, cpus: float = 0.4, **options: Any) -> Run:
    """A run of two replicas in a queue."""
    return scenario.program(script, cpus=cpus, gang=f"kueue:{queue.name}", **options)


def another(scenario: Scenario, queue: Queue, word: str, script: str = HOLD, **options: Any) -> Run:
    return queued(scenario, queue, script, run_id=f"{scenario.name}-{word}", **options)


def job_path(scenario: Scenario, run: Run) -> str:
    return scenario.namespace.path("jobs", run.handle.native_id)


def workload(namespace: QueueNamespace, run: Run) -> str:
    """The path of the Workload of a run."""
    found = namespace.workload(namespace.get("jobs", run.handle.native_id)["metadata"]["uid"])
    assert found is not None
    return namespace.path("workloads", found["metadata"]["name"])


# Waiting.


def test_a_run_waits_in_a_full_queue_and_starts_when_there_is_room(
    queue_scenario: Scenario, queue_namespace: QueueNamespace
) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue(cpu="1")
    high, middle = (queue_namespace.priority_class(*each) for each in (("high", 100), ("middle", 50)))
    first = queued(scenario, queue, queue_priority=high)
    scenario.running(first)
    second = another(scenario, queue, "second", "true", queue_priority=middle)
    third = another(scenario, queue, "third", "true")
    row = scenario.with_reason(second, Reason.QUOTA)
    assert (row.state, row.attempt, row.native_id) == (PENDING, 0, None)
    assert "600m more cpu needed" in row.message
    assert "first in line" in row.message
    behind = scenario.until(third, lambda found: "position 2" in found.replicas[0].message).replicas[0]
    assert f"behind Job `{second.handle.native_id}`" in behind.message
    before = len(scenario.proxy.calls)
    scenario.status(third)
    assert len(scenario.proxy.calls) - before <= 3
    strays = {stray.handle for stray in third.executor.strays()}  # type: ignore[attr-defined]
    assert strays == {run.handle for run in (first, second, third)}
    assert leftovers(third.executor) == []  # type: ignore[arg-type]
    third.cancel()
    assert {row.state for row in third.status().replicas} == {CANCELLED}
    first.cancel()
    assert rows(scenario.ended(second)) == [(SUCCEEDED, Reason.OK, 0, 0)] * 2


def test_a_run_that_never_fits_is_refused_and_nothing_is_left(
    queue_scenario: Scenario, queue_namespace: QueueNamespace
) -> None:
    queue = queue_namespace.queue(cpu="1")
    cases: dict[str, dict[str, Any]] = {
        "large": {"cpus": 0.9},
        "gpu": {"cpus": 0.1, "gpu": "any:1", "gpu_selector": "none"},
    }
    for name, options in cases.items():
        with pytest.raises(SubmitError) as caught:
            queued(queue_scenario, queue, run_id=name, **options)
        cause = caught.value.__cause__
        assert isinstance(cause, CapacityError)
        assert (cause.reason, caught.value.left_running) == ("never_fits", ())
    assert "nvidia.com/gpu" in str(caught.value)
    assert queue_namespace.api.items(queue_namespace.path("jobs")) == []


def test_a_command_that_waits_ends_a_run_that_fits_no_longer(
    queue_scenario: Scenario, queue_namespace: QueueNamespace
) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue(cpu="1")
    first = queued(scenario, queue)
    scenario.running(first)
    second = another(scenario, queue, "second")
    scenario.with_reason(second, Reason.QUOTA)
    queue.set_quota(cpu="500m")
    row = scenario.until(second, lambda found: "never fits" in found.replicas[0].message).replicas[0]
    assert (row.state, row.reason) == (PENDING, Reason.QUOTA)
    ended = second.wait(LIMIT_S)
    assert {row.state for row in ended.replicas} == {CANCELLED}
    assert "maximum capacity" in ended.replicas[0].message
    first.cancel()


def test_a_queue_that_is_held_or_removed_after_the_launch(
    queue_scenario: Scenario, queue_namespace: QueueNamespace
) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue(cpu="1")
    first = queued(scenario, queue)
    scenario.running(first)
    second = another(scenario, queue, "second", "true")
    scenario.with_reason(second, Reason.QUOTA)
    queue.hold()
    held = scenario.with_reason(second, Reason.CONFIG)
    assert "is inactive" in held.message
    queue.release()
    scenario.with_reason(second, Reason.QUOTA)
    queue_namespace.api.delete(queue_namespace.path("localqueues", queue.name))
    gone = scenario.with_reason(second, Reason.CONFIG)
    assert "doesn't exist" in gone.message
    kind = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue"}
    body = {**kind, "metadata": {"name": queue.name}, "spec": {"clusterQueue": queue.cluster_name}}
    queue_namespace.make("localqueues", body)
    first.cancel()
    assert scenario.ended(second).state is SUCCEEDED


def test_a_person_holds_a_run_and_lets_it_go(queue_scenario: Scenario, queue_namespace: QueueNamespace) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue(cpu="1")
    run = queued(scenario, queue)
    scenario.running(run)
    path = workload(queue_namespace, run)
    queue_namespace.api.patch(path, {"spec": {"active": False}})
    held = scenario.until(run, lambda found: {(row.state, row.attempt) for row in found.replicas} == {(PENDING, 1)})
    assert held.replicas[0].reason is Reason.WAITING
    assert "active: false" in held.replicas[0].message
    queue_namespace.api.patch(path, {"spec": {"active": True}})
    assert rows(scenario.running(run)) == [(RUNNING, Reason.OK, None, 1)] * 2
    run.cancel()


# Checks before a launch.


def refused(scenario: Scenario, **settings: Any) -> tuple[str, ...]:
    with pytest.raises(InvalidSpec) as caught:
        scenario.program("true", cpus=0.1, **settings)
    return caught.value.fields


def test_the_queue_and_the_priority_class_are_checked_first(
    queue_scenario: Scenario, queue_namespace: QueueNamespace
) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue()
    high = queue_namespace.priority_class("high", 100)
    gang = f"kueue:{queue.name}"
    assert refused(scenario, gang="kueue:nope") == ("gang",)
    assert refused(scenario, gang=gang, queue_priority="nope") == ("queue_priority",)
    assert refused(scenario, gang=gang, labels={"kueue.x-k8s.io/priority-class": "nope"}) == ("queue_priority",)
    queue.hold()
    assert refused(scenario, gang=gang) == ("gang",)
    queue.release()
    assert queue_namespace.api.items(queue_namespace.path("jobs")) == []
    checks = scenario.executor(gang=gang, queue_priority="nope").diagnose()
    assert [check.name for check in checks if not check.ok] == ["gang"]
    assert all(check.ok for check in scenario.executor(gang=gang, queue_priority=high).diagnose())
    run = scenario.program("true", cpus=0.1, gang=gang, queue_priority=high)
    assert scenario.ended(run).state is SUCCEEDED


class _Ahead(SystemClock):
    """A clock that shows a minute later."""

    def time(self) -> float:
        return super().time() + 60


def test_a_class_that_is_removed_leaves_a_run_without_a_workload(
    queue_scenario: Scenario, queue_namespace: QueueNamespace
) -> None:
    queue = queue_namespace.queue()
    executor = queue_scenario.executor(command=("true",), gang=f"kueue:{queue.name}", queue_priority="nope")
    handle = executor.submit(executor.plan(RunContext("silent", queue_scenario.store), Placement(replicas=1, cpus=0.1)))
    row = executor.status(handle).replicas[0]
    assert (row.state, row.reason) == (PENDING, Reason.WAITING)
    later = queue_scenario.executor(clock=_Ahead()).status(handle).replicas[0]
    assert (later.state, later.reason) == (PENDING, Reason.CONFIG)
    assert "no Workload" in later.message
    executor.cancel(handle)


# Evictions.


def test_a_preempted_run_comes_back_as_a_new_attempt(
    queue_scenario: Scenario, queue_namespace: QueueNamespace, tmp_path
) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue(cpu="1")
    high = queue_namespace.priority_class("high", 100)
    run = queued(scenario, queue, ONCE.format(flag=tmp_path / "flag"))
    scenario.running(run)
    job = scenario.job(run)["metadata"]["uid"]
    other = another(scenario, queue, "by", queue_priority=high)
    row = scenario.until(run, lambda found: found.replicas[0].state is PENDING).replicas[0]
    assert (row.reason, row.attempt) == (Reason.PREEMPTED, 1)
    assert f"Job `{other.handle.native_id}`" in row.message
    assert "once" in row.message
    scenario.running(other)
    scenario.until(run, lambda found: "is full" in found.replicas[0].message)
    other.cancel()
    assert rows(scenario.ended(run)) == [(SUCCEEDED, Reason.OK, 0, 1)] * 2
    assert scenario.job(run)["metadata"]["uid"] == job
    assert run.executor.attempt_logs(run.handle, 0, 1) is not None  # type: ignore[attr-defined]


def test_a_preempted_run_of_an_entry_point_has_one_outcome_for_each_attempt(
    queue_scenario: Scenario, queue_namespace: QueueNamespace
) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue(cpu="1")
    high = queue_namespace.priority_class("high", 100)
    run = scenario.entry("hold", cpus=0.4, gang=f"kueue:{queue.name}")
    scenario.until(run, lambda _: len(contract_jobs.starts(run.store, run.id)) == 2)
    other = another(scenario, queue, "by", queue_priority=high)
    row = scenario.until(run, lambda found: {row.state for row in found.replicas} == {PENDING}).replicas[0]
    assert (row.reason, row.attempt) == (Reason.PREEMPTED, 1)
    other.cancel()
    scenario.until(run, lambda _: len(contract_jobs.starts(run.store, run.id)) == 4)
    contract_jobs.let_go(run.store, run.id)
    assert run.wait(LIMIT_S).state is SUCCEEDED
    assert [outcome.attempt for outcome in run.result().outcomes] == [1, 1]


@pytest.mark.slow
def test_training_goes_on_from_its_rounds_after_a_preemption(
    queue_scenario: Scenario, queue_namespace: QueueNamespace, tmp_path, monkeypatch
) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue(cpu="1")
    high = queue_namespace.priority_class("high", 100)
    (tmp_path / "held_trainer.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    run = atoll.launch(
        "held_trainer:train",
        replicas=2,
        on=scenario.executor(image="atoll-test", gang=f"kueue:{queue.name}"),
        store=scenario.store,
        run_id=scenario.name,
        cpus=0.4,
        workspace=".",
    )
    scenario.until(run, lambda _: "held" in {*_lines(run, 0)} & {*_lines(run, 1)})
    other = another(scenario, queue, "by", queue_priority=high)
    scenario.until(run, lambda found: {row.state for row in found.replicas} == {PENDING})
    other.cancel()
    assert run.wait(2 * LIMIT_S).state is SUCCEEDED
    result = run.result()
    assert [outcome.attempt for outcome in result.outcomes] == [1, 1]
    assert [value["steps"] for value in result.values] == [3 * 4] * 2, "of five rounds, two were there"
    assert len({value["weights"] for value in result.values}) == 1


def _lines(run: Run, rank: int) -> list[str]:
    try:
        return list(run.logs(rank))
    except AtollError:
        return []


# Runs that Kueue ends.


def test_a_run_at_kueues_time_limit_has_failed(queue_scenario: Scenario, queue_namespace: QueueNamespace) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue()
    run = queued(scenario, queue, labels={"kueue.x-k8s.io/max-exec-time-seconds": "2"})
    assert {row.state for row in run.wait(LIMIT_S).replicas} == {FAILED}
    status = scenario.ended(run)
    assert {(row.state, row.reason) for row in status.replicas} == {(FAILED, Reason.TIMEOUT)}
    assert scenario.job(run)["spec"]["suspend"]
    run.cancel()
    assert queue_namespace.api.items(queue_namespace.path("jobs")) == []


@pytest.mark.alone
def test_a_run_whose_pods_are_never_ready_has_failed(queue_scenario: Scenario, queue_namespace: QueueNamespace) -> None:
    strategy = {"backoffLimitCount": 1, "backoffBaseSeconds": 1}
    settings = {"waitForPodsReady": {"timeout": "1s", "requeuingStrategy": strategy}}
    queue_namespace.controllers("restart", name="kueue", settings=settings)
    scenario, queue = queue_scenario, queue_namespace.queue()
    run = queued(scenario, queue, node_selector={"there-is": "none"})
    tried = scenario.until(run, lambda found: found.is_terminal or "PodsReadyTimeout" in found.replicas[0].message)
    assert (tried.replicas[0].state, tried.replicas[0].reason) == (PENDING, Reason.PREEMPTED)
    assert {(row.state, row.reason) for row in scenario.ended(run).replicas} == {(FAILED, Reason.UNSCHEDULABLE)}
    run.cancel()


# Without answers, and without permissions.


@pytest.mark.alone
def test_a_launch_waits_for_kueue_and_names_its_webhook(
    queue_scenario: Scenario, queue_namespace: QueueNamespace
) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue()
    queue_namespace.controllers("stop", name="kueue")
    with pytest.raises(BackendUnavailable) as caught:
        queued(scenario, queue, patience_s=0.5)
    assert caught.value.reason == "webhook"
    assert ".kb.io`" in str(caught.value.hint)
    starting = threading.Thread(target=lambda: queue_namespace.controllers("start", name="kueue"))
    starting.start()
    run = another(scenario, queue, "again", "true", patience_s=60.0)
    starting.join()
    assert scenario.ended(run).state is SUCCEEDED


@pytest.mark.parametrize("missing", [(POSITION,), (WORKLOADS, POSITION, LOCAL_QUEUES), ()])
def test_a_launcher_without_a_permission_knows_less(
    queue_scenario: Scenario, queue_namespace: QueueNamespace, missing: tuple[Right, ...]
) -> None:
    scenario, queue = queue_scenario, queue_namespace.queue(cpu="1")
    high = queue_namespace.priority_class("high", 100)
    first = queued(scenario, queue, queue_priority=high)
    scenario.running(first)
    settings: dict[str, Any] = {"image": "busybox", "command": ("true",), "gang": f"kueue:{queue.name}"}
    denied = {(right.group, right.resource) for right in missing}
    rules = [
        rule
        for rule in role(queue_namespace.name, KubernetesSettings(**settings))["rules"]
        if (rule["apiGroups"][0], rule["resources"][0]) not in denied
    ]
    config = queue_namespace.user("launcher", rules)
    executor = KubernetesExecutor(kubeconfig=str(config), store_is_mounted=True, queue_priority=high, **settings)
    assert all(check.ok for check in executor.diagnose())
    run = prepare("", on=executor, store=scenario.store, program=("true",), replicas=2, cpus=0.4).submit()
    row = executor.status(run.handle).replicas[0]
    assert row.state is PENDING
    assert ("600m more" in row.message) == (WORKLOADS not in missing)
    assert ("first in line" in row.message) == (POSITION not in missing)
    run.cancel()
    first.cancel()
