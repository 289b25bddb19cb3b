"""The 24 defects of an earlier executor for Kubernetes, which Atoll must not have: one test for each, in its order.

Tests that need a cluster read what the real control plane answered in the scenario of that name (`transcripts`), or
make requests to a stand-in that gives such answers.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import atoll.kube
from atoll.context import TIMEOUT, RunContext
from atoll.errors import AuthError, InvalidSpec, RunNotFound, Unsupported
from atoll.executors.base import Plan
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.handle import RunHandle
from atoll.kube.errors import Refusal, translated
from atoll.kube.names import context_of, job_annotations, job_name
from atoll.kube.reading import run_status
from atoll.runs.wait import wait
from atoll.spec import Placement, RunSpec
from atoll.status import Reason, ReplicaState
from atoll.testing.fakes import FakeClock
from services.kubernetes.transcripts import FOLDER, Answers, Transcript

Object = dict[str, Any]
PENDING, RUNNING, SUCCEEDED = ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.SUCCEEDED
FAILED, CANCELLED, LOST = ReplicaState.FAILED, ReplicaState.CANCELLED, ReplicaState.LOST
CONTEXT = RunContext("run", "s3://bucket/runs")


def rounds(scenario: str) -> list[list[Object]]:
    """The rows of each reading of a scenario."""
    return [each["rows"] for each in Transcript.load(FOLDER / f"{scenario}.json").rounds]


def ended(scenario: str) -> list[Object]:
    return rounds(scenario)[-1]


def executor(answers: list[Object] | None = None, **settings: Any) -> KubernetesExecutor:
    given = {"image": "image", "namespace": "ns", "patience_s": 5.0, "stop_s": 5.0, "clock": FakeClock(), **settings}
    return KubernetesExecutor(api_client=Answers(answers or []), **given)


def plan(placement: Placement | None = None, **settings: Any) -> Plan:
    return executor(**settings).plan(CONTEXT, placement or Placement(replicas=2))


def container(found: Plan) -> Object:
    return dict(found.request["job"]["spec"]["template"]["spec"]["containers"][0])


def answer(path: str, body: Object, *, method: str = "GET", status: int = 200) -> Object:
    return {"method": method, "path": path, "status": status, "text": json.dumps(body)}


def job(name: str, replicas: int, **status: Any) -> Object:
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "annotations": job_annotations(CONTEXT)}
    return {"metadata": metadata, "spec": {"completions": replicas, "backoffLimitPerIndex": 0}, "status": status}


JOBS, PODS = "/apis/batch/v1/namespaces/ns/jobs", "/api/v1/namespaces/ns/pods"


def of_job(name: str, replicas: int, **status: Any) -> list[Object]:
    """The answers to the two requests of a status."""
    return [answer(f"{JOBS}/{name}", job(name, replicas, **status)), answer(PODS, {"items": []})]


def test_01_a_plain_job_is_not_called_a_gang():
    notes = [note for note in plan().notes if note.startswith("gang")]
    assert [note.partition(".")[0] for note in notes] == ["gang: none"]
    assert "kueue.x-k8s.io/queue-name" in json.dumps(plan(gang="kueue:team", default_cpus=1).request["job"])


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [("no-node-has-enough-gpus", Reason.UNSCHEDULABLE), ("the-image-cannot-be-pulled", Reason.IMAGE)],
)
def test_02_a_rank_that_cannot_start_is_not_called_running(scenario: str, reason: Reason):
    rows = [row for each in rounds(scenario) for row in each]
    assert {row["state"] for row in rows} == {PENDING}
    assert reason in {row["reason"] for row in rows}


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("a-quota-forbids-every-pod", Reason.QUOTA),
        ("a-service-account-is-missing", Reason.CONFIG),
        ("pod-security-that-the-namespace-enforces-later", Reason.CONFIG),
    ],
)
def test_03_a_job_without_pods_does_not_wait_without_a_reason(scenario: str, reason: Reason):
    row = ended(scenario)[0]
    assert (row["state"], row["reason"]) == (PENDING, reason)
    assert "FailedCreate" in row["message"]


def test_04_a_job_that_is_failing_is_not_pending_again():
    rows = [each[0] for each in rounds("the-decision-of-the-job-counts-before-its-pods-have-ended")]
    started = next(number for number, row in enumerate(rows) if row["state"] == RUNNING)
    assert PENDING not in {row["state"] for row in rows[started:]}
    assert ended("a-fail-fast-run-ends-although-a-node-is-lost")[0]["state"] in (FAILED, CANCELLED)


def test_05_a_job_that_is_complete_leaves_no_rank_pending():
    condition = {"type": "SuccessCriteriaMet", "status": "True", "reason": "SuccessPolicy"}
    status = run_status(job("j", 2, conditions=[condition], completedIndexes="0"), [], replicas=2)
    assert [row.state for row in status.replicas] == [SUCCEEDED, CANCELLED]


def test_06_a_failure_of_one_rank_is_not_said_of_all_with_an_invented_exit_code():
    rows = ended("one-rank-fails-and-the-run-ends-with-it")
    assert [row["state"] for row in rows] == [CANCELLED, FAILED, CANCELLED]
    assert [row["exit_code"] for row in rows] == [None, 3, None]
    assert "rank 1 failed" in rows[0]["message"]


def test_07_an_eviction_does_not_end_the_run():
    row = ended("an-evicted-rank-is-replaced-and-the-eviction-is-not-counted")[0]
    assert (row["state"], row["attempt"]) == (SUCCEEDED, 1)
    rule = plan().request["job"]["spec"]["podFailurePolicy"]["rules"][0]
    assert (rule["action"], rule["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")


def test_08_a_job_that_is_not_there_is_not_called_cancelled():
    rows = ended("a-finished-run-that-kubernetes-removed-is-answered-from-the-store")
    assert {row["state"] for row in rows} == {LOST}
    none = executor([answer(f"{JOBS}/gone", {}, status=404), answer(PODS, {"items": []})])
    assert none.status(RunHandle("kubernetes", "ns", "gone", 2)).replicas[1].state is LOST
    assert plan().request["job"]["spec"]["ttlSecondsAfterFinished"] == 86_400


def test_09_cancel_does_not_return_while_pods_run():
    pod = {"metadata": {"name": "j-0-x", "uid": "p"}, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}}
    path = f"{JOBS}/j"
    answers = Answers([
        answer(path, job("j", 1)),
        answer(PODS, {"items": [pod]}),
        answer(path, {}, method="DELETE"),
        answer(path, job("j", 1)),
        answer(path, {}, status=404),
        answer(PODS, {"items": [pod]}),
        answer(PODS, {"items": []}),
    ])  # fmt: skip
    stopping = KubernetesExecutor(api_client=answers, image="image", namespace="ns", clock=FakeClock())
    stopping.cancel(RunHandle("kubernetes", "ns", "j", 1))
    kinds = [(method, path.rpartition("/")[2]) for method, path, _ in answers.asked]
    assert kinds[-1] == ("GET", "pods")
    assert kinds.count(("GET", "pods")) == 3
    deleted = next(json.loads(body) for method, _, body in answers.asked if method == "DELETE")
    assert (deleted["propagationPolicy"], deleted["preconditions"]) == ("Foreground", {"uid": "uid-j"})


def test_10_a_status_does_not_cost_a_request_for_each_rank():
    asking = executor(of_job("j", 500, completedIndexes="0-499"))
    status = asking.status(RunHandle("kubernetes", "ns", "j", 500))
    assert status.counts() == {SUCCEEDED: 500}
    assert [(method, path) for method, path, _ in asking._api_client.asked] == [("GET", f"{JOBS}/j"), ("GET", PODS)]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_11_a_moment_of_trouble_does_not_lose_every_result(status: int):
    trouble = [answer(f"{JOBS}/j", {}, status=status)] * 3
    asking = executor([*trouble, *of_job("j", 2, completedIndexes="0,1")])
    found = wait(lambda: asking.status(RunHandle("kubernetes", "ns", "j", 2)), clock=FakeClock())
    assert found.counts() == {SUCCEEDED: 2}


def test_12_runs_with_the_same_ranks_are_not_confused():
    asking = executor([*of_job("a", 2, completedIndexes="0,1"), *of_job("b", 2, failedIndexes="0,1")])
    first, second = (asking.status(RunHandle("kubernetes", "ns", name, 2)) for name in ("a", "b"))
    assert (first.counts(), second.counts()) == ({SUCCEEDED: 2}, {FAILED: 2})


def test_13_no_entry_point_and_no_argument_is_dropped():
    args = {"nested": {"list": [1, None, True]}, "flag": True, "text": "ü"}
    assert RunSpec.build("module:function", replicas=2, args=args).task.args == args
    with pytest.raises(InvalidSpec):
        RunSpec.build("module:function", replicas=2, args={"thing": object()})


def test_14_arguments_do_not_become_variables_and_reserved_names_are_refused():
    names = [each["name"] for each in container(plan(Placement(replicas=2, env={"LR": "1", "lr": "2"})))["env"]]
    assert len(names) == len(set(names))
    assert {"LR", "lr", "REPLICA_RANK", "WORLD_SIZE"} <= set(names)
    with pytest.raises((InvalidSpec, Unsupported)):
        plan(Placement(replicas=2, env={"WORLD_SIZE": "7"}))


@pytest.mark.parametrize("run_id", ["My_Run", "my.run", "9abc", "x" * 63])
@pytest.mark.parametrize("replicas", [1, 2, 11, 101, 1001])
def test_15_no_run_id_gives_a_name_that_kubernetes_refuses(run_id: str, replicas: int):
    name = job_name(RunContext(run_id, CONTEXT.store_uri), replicas)
    assert len(name) <= 62 - len(str(replicas - 1))
    assert name == name.lower()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name == job_name(RunContext(run_id, CONTEXT.store_uri), replicas)


def test_16_no_label_of_the_job_controller_is_set_by_hand():
    found = plan().request["job"]
    labels = {**found["metadata"]["labels"], **found["spec"]["template"]["metadata"]["labels"]}
    assert not {"job-name", "controller-uid"} & labels.keys()
    with pytest.raises(Unsupported):
        plan(labels={"job-name": "other"})


def test_17_a_log_is_not_one_part_of_an_old_attempt():
    logs = Transcript.load(FOLDER / "a-log-is-followed-over-the-end-of-a-pod-and-a-restart.json").logs
    assert [each.lines for each in logs] == [["one", "two", "one", "three"], ["one", "three"], ["three"]]
    forbidden, missing = (translated(Refusal(status, {}), "the log", "logs", "kubernetes") for status in (403, 404))
    assert isinstance(forbidden, AuthError)
    assert isinstance(missing, RunNotFound)


def test_18_a_job_without_a_record_still_leads_to_its_results():
    assert context_of(plan().request["job"]) == CONTEXT


@pytest.mark.parametrize("gpu", ["H900", "any-thing", "H100:0"])
def test_19_an_unknown_gpu_does_not_become_any_gpu(gpu: str):
    with pytest.raises((InvalidSpec, Unsupported)):
        plan(Placement(replicas=2, gpu=gpu))  # type: ignore[arg-type]


def test_20_waiting_does_not_count_as_running():
    found = plan(Placement(replicas=2, timeout_s=100))
    assert "activeDeadlineSeconds" not in found.request["job"]["spec"]
    assert {"name": TIMEOUT, "value": "100"} in container(found)["env"]
    assert found.request["job"]["spec"]["template"]["spec"]["activeDeadlineSeconds"] > 100


def test_21_the_configuration_of_the_whole_process_is_not_touched(tmp_path: Path):
    from kubernetes.client import Configuration

    content = {
        "contexts": [{"name": name, "context": {"cluster": name, "user": "u"}} for name in ("one", "two")],
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}.test"}} for name in ("one", "two")],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "current-context": "one",
    }
    (tmp_path / "config").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **content}))
    before = Configuration.get_default_copy().host
    own = KubernetesExecutor(kubeconfig=str(tmp_path / "config"), context="two", image="image")
    assert own._jobs(None).client.connection.host == "https://two.test"
    assert Configuration.get_default_copy().host == before


def test_22_the_page_does_not_repeat_what_is_wrong():
    page = (Path(atoll.kube.__file__).parents[3] / "docs" / "kubernetes.md").read_text().lower()
    assert "network-isolated" not in page
    assert "gang-atomic" not in page
    assert "required for indexed" not in page


def test_23_nothing_that_a_pod_needs_is_left_out():
    found = plan(pull_secrets=["key"], shm_size="1Gi", priority_class="high", ephemeral_storage="2Gi",
                 volumes=[{"pvc": "data", "mount": "/data"}], annotations={"a": "b"})  # fmt: skip
    template = found.request["job"]["spec"]["template"]
    pod = template["spec"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(found)["securityContext"]["allowPrivilegeEscalation"] is False
    assert (pod["imagePullSecrets"], pod["priorityClassName"]) == ([{"name": "key"}], "high")
    assert {each["mountPath"] for each in container(found)["volumeMounts"]} >= {"/dev/shm", "/data"}
    assert container(found)["resources"]["limits"]["ephemeral-storage"] == "2Gi"
    assert template["metadata"]["annotations"]["a"] == "b"
    assert RunHandle.parse(str(executor().handle(found))).scope == "ns"


def test_24_no_deadline_follows_the_clock_on_the_wall():
    folder = Path(atoll.kube.__file__).parents[1]
    files = [*(folder / "kube").glob("*.py"), *(folder / "executors" / "kubernetes").glob("*.py")]
    assert files
    imports = {
        (path.name, name.name)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert not {(file, name) for file, name in imports if name == "time"}
