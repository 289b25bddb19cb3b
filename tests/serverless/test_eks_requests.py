"""What `EKSExecutor` would send, and what it refuses or warns of. Nothing is sent here."""

from __future__ import annotations

import inspect
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from atoll.errors import InvalidSpec, RunNotFound, Unsupported
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.handle import RunHandle
from atoll.runs.prepare import Draft
from atoll.serverless import EKSExecutor, K8sExecutor, ReplicaHandle
from atoll.serverless.facade import Facade
from atoll.serverless.handles import Replica
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus
from atoll.testing.fakes import FakeClock

CASES = sorted((Path(__file__).parent / "golden_eks").glob("*.json"))
IMAGE, STORE = "registry.invalid/train:1", "s3://bucket/exp"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"


class Planned(Exception):
    """Instead of a launch."""


class Planner(EKSExecutor):
    def _submitted(self, draft: Draft) -> Any:
        raise Planned(draft)


def planned(executor: EKSExecutor, *args: Any, **options: Any) -> tuple[Draft, list[str]]:
    """The draft of a launch, and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Planned) as raised:
            executor.launch_replicas(*(args or (2, "train:main", {"lr": 0.5})), **options)
    return raised.value.args[0], [str(each.message) for each in caught]


def launched(_gpu: str | None = None, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """The pod of a launch, and the warnings."""
    draft, said = planned(Planner(IMAGE, store=STORE, context="prod", **settings), gpu=_gpu)
    return draft.plan.request["job"]["spec"]["template"]["spec"], said


def requests_of(pod: dict[str, Any]) -> dict[str, str]:
    return pod["containers"][0]["resources"]["requests"]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_request_is_the_golden_one(path: Path, pytestconfig: pytest.Config) -> None:
    """`pytest tests/golden tests/serverless/test_eks_requests.py --update-golden` writes the requests anew."""
    case = json.loads(path.read_text())
    draft, said = planned(Planner(**case["constructor"]), *case["launch"], **case["options"])
    found = {"placement": draft.spec.placement.to_json(), "request": dict(draft.plan.request), "warnings": said}
    if pytestconfig.getoption("--update-golden", default=False):
        path.write_text(json.dumps({**case, **found}, indent=2, ensure_ascii=False) + "\n")
        return
    assert found == {name: case.get(name) for name in found}, f"{path} has another request"


def test_there_is_a_golden_file_for_each_way_to_launch():
    assert {path.stem for path in CASES} == {"defaults", "everything", "command", "t4"}


def test_the_constructor_has_these_arguments():
    parameters = inspect.signature(EKSExecutor.__init__).parameters
    wanted = {
        "image": inspect.Parameter.empty,
        "namespace": "default",
        "service_account_name": None,
        "node_selector": None,
        "tolerations": None,
        "runtime_class_name": None,
        "command": None,
        "cpu_request": "4",
        "memory_request": "16Gi",
        "ttl_seconds_after_finished": 3600,
        "backoff_limit": 0,
        "gpu_resource_key": "nvidia.com/gpu",
        "run_id": None,
        "batch_api": None,
        "core_api": None,
        "store": None,
        "idempotency_key": None,
        "queue_timeout": None,
        "context": None,
        "kubeconfig": None,
    }
    assert {name: p.default for name, p in parameters.items() if name != "self"} == wanted
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["self", "image"]
    assert K8sExecutor is EKSExecutor
    assert (EKSExecutor.backend_name, EKSExecutor.supports_inter_replica_network) == ("eks", False)


# ── tolerations ─────────────────────────────────────────────────────────────────────────────────────────────────────


def of_client_29(**values: Any) -> Any:
    """A `V1Toleration` of the client 29: plain attributes, None for those that are not set."""
    unset = dict.fromkeys(("key", "operator", "value", "effect", "toleration_seconds"))
    return SimpleNamespace(**{**unset, **values})


def of_client_37(**values: Any) -> Any:
    from kubernetes.client import V1Toleration

    return V1Toleration(**values)


@pytest.mark.parametrize("make", [of_client_29, of_client_37, dict], ids=["client 29", "client 37", "snake case"])
def test_tolerations_of_clients_and_in_their_style_are_read(make):
    given = make(key="team", operator="Exists", effect="NoExecute", toleration_seconds=60)
    pod, _ = launched(tolerations=[given])
    wanted = {"key": "team", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    assert pod["tolerations"][0] == wanted
    assert launched(tolerations=(wanted,))[0]["tolerations"] == pod["tolerations"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([7], "tolerations"),
        ("team", "tolerations"),
        (of_client_29(key="team"), "tolerations"),
        ([{"kee": "team"}], "tolerations[0].kee"),
    ],
)
def test_other_tolerations_are_refused(given, field):
    with pytest.raises((InvalidSpec, Unsupported)) as caught:
        launched(tolerations=given)
    assert caught.value.fields == (field,)


# ── clients of the caller ───────────────────────────────────────────────────────────────────────────────────────────


def api(host: object = "https://cluster.invalid", **lacking: Any) -> Any:
    client = {
        "configuration": SimpleNamespace(host=host, auth_settings=dict),
        "rest_client": SimpleNamespace(pool_manager=SimpleNamespace(request=print)),
    }
    return SimpleNamespace(api_client=SimpleNamespace(**{**client, **lacking}))


@pytest.mark.parametrize(
    ("apis", "fields"),
    [
        ({"batch_api": object()}, ["batch_api"]),
        ({"core_api": object(), "batch_api": api()}, ["core_api"]),
        ({"batch_api": MagicMock(), "core_api": MagicMock()}, ["batch_api", "core_api"]),
        ({"batch_api": api(""), "core_api": api(None)}, ["batch_api", "core_api"]),
        ({"batch_api": api(rest_client=None)}, ["batch_api"]),
        ({"batch_api": api("https://a.invalid"), "core_api": api("https://b.invalid")}, ["core_api"]),
        ({"batch_api": api(), "context": "prod", "kubeconfig": "config"}, ["context", "kubeconfig"]),
    ],
)
def test_clients_that_cannot_be_used_are_refused(apis, fields):
    with pytest.raises(InvalidSpec) as caught:
        EKSExecutor(IMAGE, **apis)
    assert list(caught.value.fields) == fields


def test_what_a_client_lacks_is_named():
    for lacking, path in (
        ({"configuration": None}, "configuration.host"),
        ({"configuration": SimpleNamespace(host="https://x")}, "configuration.auth_settings"),
        ({"rest_client": SimpleNamespace(pool_manager=object())}, "rest_client.pool_manager.request"),
    ):
        with pytest.raises(InvalidSpec, match=f"`{path}`"):
            EKSExecutor(IMAGE, core_api=api(**lacking))


def test_a_launch_that_the_cluster_refuses_is_also_a_runtime_error(store):
    """The error names the arguments of the facade, and a program that expects either kind of error catches it."""

    def request(method: str, url: str, **_: Any) -> Any:
        body = {"gitVersion": "v1.36.3", "major": "1", "minor": "36"} if url.endswith("/version") else {}
        status, content = (200, body) if method == "GET" else (404, {"message": 'namespaces "team" not found'})
        return SimpleNamespace(status=status, read=json.dumps(content).encode, headers={}, release_conn=bool)

    client = api(rest_client=SimpleNamespace(pool_manager=SimpleNamespace(request=request)))
    jobs = KubernetesExecutor(image=IMAGE, namespace="team", api_client=client, store_is_mounted=True)
    executor = EKSExecutor.over(jobs, store=store)
    with pytest.raises(RuntimeError, match="namespace=`team`") as caught:
        executor.launch_replicas(2, "atoll.testing.protocol_jobs:echo", {})
    assert isinstance(caught.value, InvalidSpec)
    assert caught.value.fields == ("namespace",)


def test_clients_of_one_cluster_need_not_share_an_api_client():
    executor = EKSExecutor(IMAGE, batch_api=api(), core_api=api())
    assert executor._jobs._api_client is executor.batch_api
    assert EKSExecutor(IMAGE, core_api=executor.core_api)._jobs._api_client is executor.core_api


# ── machines and sizes ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("A100", "p4d.24xlarge"),
        ("H100", "p5.48xlarge"),
        ("H100:8", "p5.48xlarge"),
        ("A10G", "g5.xlarge"),
        ("T4", "g4dn.xlarge"),
        ("T4:4", None),
        ("L4", None),
    ],
)
def test_some_gpus_have_one_machine(gpu, machine):
    pod, _ = launched(gpu)
    assert pod.get("nodeSelector", {}).get(INSTANCE_TYPE) == machine
    assert ("affinity" in pod) == (machine is None)
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == (gpu.partition(":")[2] or "1")


def test_the_machine_of_the_caller_counts():
    pod, said = launched("A100", node_selector={INSTANCE_TYPE: "p4de.24xlarge"})
    assert pod["nodeSelector"] == {INSTANCE_TYPE: "p4de.24xlarge"}
    pod, said = launched(None, node_selector={INSTANCE_TYPE: "m5.xlarge"})
    assert requests_of(pod) == {"cpu": "3500m", "memory": "13Gi"}
    assert [text.partition(":")[0] for text in said] == ["cpu_request", "memory_request"]


@pytest.mark.parametrize("gpu", ["A10G", "T4"])
def test_defaults_are_lowered_to_the_machine_with_a_warning(gpu):
    pod, said = launched(gpu)
    assert requests_of(pod) == {"cpu": "3500m", "memory": "13Gi"}
    assert [text.partition(":")[0] for text in said] == ["cpu_request", "memory_request"]


def test_given_sizes_are_kept_with_a_warning_also_if_they_are_the_defaults():
    pod, said = launched("A10G", cpu_request="4", memory_request="16Gi")
    assert requests_of(pod) == {"cpu": "4", "memory": "16Gi"}
    assert [text.partition("=")[0] for text in said] == ["cpu_request", "memory_request"]
    pod, said = launched("A10G", cpu_request="3")
    assert requests_of(pod) == {"cpu": "3", "memory": "13Gi"}
    assert [text.partition(":")[0] for text in said] == ["memory_request"]


def test_quantities_keep_their_value():
    pod, said = launched(cpu_request="1500m", memory_request="2G")
    assert requests_of(pod) == {"cpu": "1500m", "memory": "1953125Ki"}
    assert said == []


def test_a_lone_gpu_of_eight_warns_with_the_price():
    _, said = launched("A100")
    assert len(said) == 1
    assert "$21.96/h for 8 GPUs" in said[0]


def test_the_resource_key_is_that_of_the_gpu_unless_it_is_given():
    def key(gpu: str, **settings: Any) -> str:
        limits = launched(gpu, **settings)[0]["containers"][0]["resources"]["limits"]
        return next(name for name in limits if "gpu" in name)

    assert key("L4") == "nvidia.com/gpu"
    assert key("MI300X") == "amd.com/gpu"
    assert key("L4", gpu_resource_key="example.com/gpu") == "example.com/gpu"
    assert launched(gpu_resource_key="example.com/gpu")[1] == []


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"cpu_request": "four"}, "cpu_request"),
        ({"memory_request": "16 GB"}, "memory_request"),
        ({"memory_request": "0"}, "memory_request"),
        ({"backoff_limit": -1}, "backoff_limit"),
        ({"ttl_seconds_after_finished": -1}, "ttl_seconds_after_finished"),
        ({"queue_timeout": 0}, "queue_timeout"),
        ({"service_account_name": "No Name"}, "service_account_name"),
        ({"runtime_class_name": ""}, "runtime_class_name"),
        ({"node_selector": ["gpu"]}, "node_selector"),
        ({"namespace": "Team"}, "namespace"),
        ({"command": "python train.py"}, "command"),
        ({"gpu_resource_key": "a b"}, "gpu_resource_key"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_own_name(settings, field):
    with pytest.raises((InvalidSpec, Unsupported)) as caught:
        launched("L4", **settings)
    assert caught.value.fields == (field,)
    assert "--setting" not in str(caught.value)


def test_an_own_command_has_a_file_of_all_arguments():
    executor = Planner(IMAGE, store=STORE, context="prod", command=["train"])
    draft, _ = planned(executor, 1, "", {"lr": 0.5, "layers": [1, {"two": None}], "rank_env": "MY_RANK"})
    (config_map,) = draft.plan.request["extras"]
    assert json.loads(config_map["data"]["args.json"]) == {
        "lr": 0.5,
        "layers": [1, {"two": None}],
        "rank_env": "MY_RANK",
    }
    env = {each["name"] for each in draft.plan.request["job"]["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert {"LR", "ATOLL_ARGS", "MY_RANK", "REPLICA_RANK"} <= env
    assert "LAYERS" not in env
    with pytest.raises(Unsupported) as caught:
        planned(executor, 1, "", {"layers": ["x" * 1_000_000]})
    assert caught.value.fields == ("entrypoint_args",)


def test_the_protocol_over_an_executor_keeps_its_settings():
    jobs = KubernetesExecutor(image=IMAGE, context="prod", spot=True, service_account="trainer", ttl_s=7200)
    executor = Planner.over(jobs, store=STORE, backoff_limit=2)
    assert (executor.service_account_name, executor.ttl_seconds_after_finished) == ("trainer", 7200)
    draft, _ = planned(executor, gpu="H100")
    spec = draft.plan.request["job"]["spec"]
    assert (spec["backoffLimitPerIndex"], "maxFailedIndexes" in spec) == (2, False)
    assert INSTANCE_TYPE not in spec["template"]["spec"].get("nodeSelector", {})


def test_the_polls_of_a_round_read_the_status_once(monkeypatch):
    executor, clock = EKSExecutor(IMAGE, context="prod", store=STORE), FakeClock()
    executor._clock = clock
    states: dict[str, list[ReplicaState]] = {}
    read: list[str] = []

    def run_status(replica: Replica) -> RunStatus:
        read.append(replica.run_id)
        found = states[replica.run_id]
        return RunStatus(tuple(ReplicaStatus(rank, state, Reason.OK) for rank, state in enumerate(found)))

    monkeypatch.setattr(executor, "_run_status", run_status)
    states["a"], states["b"] = [ReplicaState.RUNNING] * 100, [ReplicaState.PENDING] * 2
    handles = {name: handles_of(name, len(found)) for name, found in states.items()}
    assert {executor.poll(each) for each in handles["a"]} == {"running"}
    assert read == ["a"]
    states["a"] = [ReplicaState.SUCCEEDED] * 100
    assert executor.poll(handles["a"][0]) == "succeeded"  # the same handle again: a new round
    assert {executor.poll(each) for each in handles["a"][1:]} == {"succeeded"}
    assert read == ["a", "a"]
    assert [executor.poll(each) for each in handles["b"]] == ["pending"] * 2
    assert read == ["a", "a", "b"]
    executor.poll(handles["a"][0])
    clock.sleep(1.0)
    executor.poll(handles["a"][1])
    assert read[3:] == ["a", "a"]
    monkeypatch.setattr(Facade, "cancel", lambda *_: None)
    executor.cancel(handles["a"][0])
    executor.poll(handles["a"][2])
    assert read[5:] == ["a"]


def test_a_log_that_is_gone_is_not_called_empty(monkeypatch):
    executor, (handle,) = EKSExecutor(IMAGE, context="prod", store=STORE), handles_of("a", 1)
    row = ReplicaStatus(0, ReplicaState.CANCELLED, Reason.CANCELLED)
    run = MagicMock(logs=MagicMock(side_effect=RunNotFound("Kubernetes has no log of rank 0 of Job `a`")))
    monkeypatch.setattr(executor, "_run", lambda _: run)
    monkeypatch.setattr(executor, "_run_status", lambda _: RunStatus((row,)))
    wanted = "<replica 0: no logs: the replica was cancelled, and Kubernetes has no log of rank 0 of Job `a`>"
    assert executor.stream_logs(handle) == wanted
    run.logs = MagicMock(return_value=iter(()))
    assert executor.stream_logs(handle).endswith("was cancelled and has printed nothing>")


def test_a_poll_of_another_thread_that_began_earlier_takes_no_state_back(monkeypatch):
    executor, clock = EKSExecutor(IMAGE, context="prod", store=STORE), FakeClock()
    executor._clock = clock
    first, second = handles_of("a", 2)
    has_begun, may_end = Event(), Event()

    def run_status(replica: Replica) -> RunStatus:
        state = ReplicaState.SUCCEEDED
        if replica.rank == 0 and not has_begun.is_set():
            state = ReplicaState.RUNNING  # it was read before the end, and arrives after it
            has_begun.set()
            assert may_end.wait(30)
        return RunStatus(tuple(ReplicaStatus(rank, state, Reason.OK) for rank in range(2)))

    monkeypatch.setattr(executor, "_run_status", run_status)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(executor.poll, first)
        assert has_begun.wait(30)
        clock.sleep(0.1)
        assert executor.poll(second) == "succeeded"
        may_end.set()
        assert slow.result(30) == "running"
    assert [executor.poll(each) for each in (second, first)] == ["succeeded"] * 2


def handles_of(run_id: str, replicas: int) -> list[ReplicaHandle]:
    run = str(RunHandle("kubernetes", "prod/default", run_id, replicas))
    return [
        ReplicaHandle(rank, "eks", {"run_id": run_id, "run": run, "store": STORE, "launch": 1, "rank": rank})
        for rank in range(replicas)
    ]
