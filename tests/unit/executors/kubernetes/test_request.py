"""The request of a run on Kubernetes: golden files, what every field changes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from atoll.context import RESERVED, RunContext
from atoll.kube.bootstrap import Wheel
from atoll.kube.gpus import INSTANCE_TYPE
from atoll.kube.request import CAPABILITIES, job_request
from atoll.kube.settings import KubernetesSettings, plan_hint
from atoll.kube.volumes import SOURCES
from atoll.spec import Placement
from atoll.testing.executor_contract.plan import CHANGES
from atoll.validation import annotated_kinds, check_settings

CONTEXT = RunContext("exp", "s3://bucket/exp")
WHEEL = Wheel("atoll-0.1.0-py3-none-any.whl", "ab" * 32)
CASES = sorted((Path(__file__).parent / "golden").glob("*.json"))


def planned(settings: dict[str, Any] | None = None, context: RunContext = CONTEXT, **placement: Any):
    checked = {"image": "registry.invalid/train:1", **(settings or {})}
    made = KubernetesSettings(**check_settings("kubernetes", checked, KubernetesSettings))
    return job_request(context, Placement(**placement), made, namespace="team-a", version="0.1.0", wheel=WHEEL)


def request(settings: dict[str, Any] | None = None, context: RunContext = CONTEXT, **placement: Any) -> dict[str, Any]:
    found, problems, _ = planned(settings, context, **placement)
    assert problems == []
    return found


def refused(settings: dict[str, Any], context: RunContext = CONTEXT, **placement: Any) -> set[str]:
    """The fields that the problems name."""
    return {p.partition(":")[0].partition("=")[0] for p in planned(settings, context, **placement)[1]}


def pod(found: dict[str, Any]) -> dict[str, Any]:
    return found["job"]["spec"]["template"]["spec"]


def container(found: dict[str, Any]) -> dict[str, Any]:
    return pod(found)["containers"][0]


def env(found: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(found)["env"]}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_request_is_the_golden_one(path: Path, pytestconfig: pytest.Config) -> None:
    """`pytest tests/golden tests/unit/executors/kubernetes --update-golden` writes the requests anew."""
    case = json.loads(path.read_text())
    found = request(case["settings"], RunContext(case["run_id"], case["store"]), **case["placement"])
    if pytestconfig.getoption("--update-golden", default=False):
        path.write_text(json.dumps({**case, "request": found}, indent=2, ensure_ascii=False) + "\n")
        return
    assert found == case.get("request"), f"{path} has another request"


def test_there_are_golden_files_for_every_gang() -> None:
    assert {"plain", "everything", "kueue", "coscheduling", "volcano", "native", "bootstrap", "own_command"} <= {
        path.stem for path in CASES
    }


def test_every_setting_of_a_pod_is_in_a_golden_file() -> None:
    given = {name for path in CASES for name in json.loads(path.read_text())["settings"]}
    assert {field.name for field in fields(KubernetesSettings)} - set(ELSEWHERE) <= given
    volumes = [each for path in CASES for each in json.loads(path.read_text())["settings"].get("volumes", [])]
    assert set(SOURCES) <= {name for volume in volumes for name in volume}


def test_an_openshift_cluster_chooses_the_user() -> None:
    (case,) = [json.loads(path.read_text()) for path in CASES if path.stem == "openshift"]
    assert pod(case["request"])["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_a_lone_gpu_of_a_large_machine_is_warned_of_with_its_price() -> None:
    for settings in ({"instance_type": "p5.48xlarge"}, {"node_selector": {INSTANCE_TYPE: "p5.48xlarge"}}):
        _, problems, notes = planned(settings, gpu="H100:1", cpus=400)
        assert problems == []
        warnings = [note for note in notes if note.startswith("warning: gpu=")]
        assert ["$55.04/h" in note for note in warnings] == [True]
        assert [note.partition("=")[0] for note in notes if "never fit" in note] == ["warning: cpus"]
        assert "the usual machine" not in notes[-1]


def test_the_request_is_json_and_the_same_every_time():
    placement = {"replicas": 3, "env": {"B": "2", "A": "1"}, "gpu": "H100:8"}
    assert request(**placement) == json.loads(json.dumps(request(**placement)))
    swapped = {**placement, "env": {"A": "1", "B": "2"}}
    assert json.dumps(request(**placement)) == json.dumps(request(**swapped))


@pytest.mark.parametrize("name", [field.name for field in fields(Placement) if field.name != "parts"])
def test_every_field_of_a_placement_changes_the_request(name):
    values = CHANGES[name] if name != "secrets" else [{"T": "kubernetes:a/b"}, {"T": "kubernetes:a/c"}]
    found = [request(), *(request(**{name: value}) for value in values)]
    texts = [json.dumps(each, sort_keys=True) for each in found]
    assert len(set(texts)) == len(texts)
    tokens = [each["job"]["metadata"]["annotations"]["atoll.dev/token"] for each in found]
    assert len(set(tokens)) == len(tokens)


SETTINGS: dict[str, Any] = {
    "image": "registry.invalid/train:2",
    "pull_secrets": ["registry"],
    "image_pull_policy": "Always",
    "service_account": "trainer",
    "mount_service_account_token": True,
    "command": ["bash", "-c", "train"],
    "command_args": ({"command": ["train"]}, {"a": [1]}),
    "python": "python3.12",
    "bootstrap": "pip",
    "pip_index": ({"bootstrap": "pip"}, "https://packages.invalid/simple"),
    "pip_extras": ({"bootstrap": "pip"}, ["train"]),
    "default_cpus": 2.0,
    "default_memory_gib": 8.0,
    "ephemeral_storage": "10Gi",
    "shm_size": "2Gi",
    "gpu_resource_key": ({}, "example.com/gpu", {"gpu": "any:1"}),
    "gpu_selector": ({}, "product", {"gpu": "H100:8"}),
    "instance_type": "g5.xlarge",
    "efa": ({"default_cpus": 1.0}, 4),
    "hyperpod": True,
    "spot": True,
    "do_not_disrupt": False,
    "node_lost_s": 60.0,
    "tolerations": [{"key": "team", "operator": "Exists"}],
    "node_selector": {"pool": "a"},
    "affinity": {"podAntiAffinity": {}},
    "topology_spread": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    "runtime_class": "gvisor",
    "priority_class": "high",
    "volumes": [{"pvc": "data", "mount": "/data"}],
    "labels": {"team": "a"},
    "annotations": {"note": "b c"},
    "pod_security": ({"run_as_user": 1000}, "restricted"),
    "run_as_user": 1000,
    "fs_group": 2000,
    "overlay": {"spec": {"template": {"spec": {"hostNetwork": True}}}},
    "gang": "volcano:default",
    "queue_priority": ({"gang": "kueue:team-a", "default_cpus": 1.0}, "high"),
    "queue_timeout_s": 600.0,
    "fail_fast": True,
    "ttl_s": 3600,
}
"""For each setting a value that must change the request; a tuple has the other settings that it needs first."""
ELSEWHERE = {
    "namespace": "the executor resolves it, and passes it to `job_request`",
    "context": "the connection uses it",
    "kubeconfig": "the connection uses it",
    "prices": "changes the notes",
    "image_is_non_root": "allows pod_security=restricted",
    "store_is_mounted": "allows a file store",
}


@pytest.mark.parametrize("name", [field.name for field in fields(KubernetesSettings)])
def test_every_setting_changes_the_request_or_is_used_elsewhere(name):
    assert (name in SETTINGS) != (name in ELSEWHERE), f"`{name}` is new: add a value that must change the request"
    if name in ELSEWHERE:
        return
    value = SETTINGS[name]
    others, value, placement = (*value, {})[:3] if isinstance(value, tuple) else ({}, value, {})
    assert request({**others, name: value}, **placement) != request(others, **placement)


def test_every_setting_has_a_rule():
    rules = annotated_kinds(KubernetesSettings)
    assert {field.name for field in fields(KubernetesSettings)} == set(rules)


def test_prices_the_image_and_the_mount_are_used():
    _, _, notes = planned({"prices": {"g5.xlarge": 7.0}, "instance_type": "g5.xlarge"})
    assert "$7.00/h" in notes[-1]
    hyperpod = {"hyperpod": True, "instance_type": "ml.p5.48xlarge", "prices": {"ml.p5.48xlarge": 7.0}}
    unknown = {"instance_type": "x9.large", "prices": {"x9.large": 7.0}}
    selected = {"node_selector": {INSTANCE_TYPE: "x9.large"}, "prices": {"x9.large": 7.0}}
    for settings in (hyperpod, unknown, selected):
        assert "$7.00/h each, at most $14.00/h" in planned(settings, replicas=2, gpu="H100:8")[2][-1]
    assert refused({"pod_security": "restricted"}) == {"pod_security"}
    assert refused({"pod_security": "restricted", "image_is_non_root": True}) == set()
    store = RunContext("exp", "file:///shared")
    assert refused({}, store) == {"store"}
    assert refused({"store_is_mounted": True}, store) == set()


def test_no_label_or_annotation_of_the_user_is_replaced():
    own = {"karpenter.sh/do-not-disrupt": "30m"}
    found = request({"annotations": own})["job"]["spec"]["template"]["metadata"]["annotations"]
    assert found == {**own, "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    queue, group = "kueue.x-k8s.io/queue-name", "scheduling.x-k8s.io/pod-group"
    members = "scheduling.volcano.sh/group-min-member"
    kueue = {"gang": "kueue:team-a", "default_cpus": 1.0}
    assert refused({**kueue, "labels": {queue: "team-a"}}) == set()
    assert refused({**kueue, "labels": {queue: "team-b"}}) == {f"labels.{queue}"}
    assert refused({"gang": "coscheduling:s", "labels": {group: "g"}}) == {f"labels.{group}"}
    assert refused({"gang": "volcano:q", "annotations": {members: "1"}}, replicas=2) == {f"annotations.{members}"}


def test_the_job_is_indexed_and_a_rank_fails_alone():
    spec = request(replicas=4, max_restarts=2)["job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (spec["backoffLimitPerIndex"], spec["podReplacementPolicy"]) == (2, "Failed")
    assert not {"backoffLimit", "maxFailedIndexes", "activeDeadlineSeconds", "suspend"} & spec.keys()
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    assert spec["ttlSecondsAfterFinished"] == 86_400
    assert request({"fail_fast": True})["job"]["spec"]["maxFailedIndexes"] == 0
    assert "ttlSecondsAfterFinished" not in request({"ttl_s": None})["job"]["spec"]


def test_every_exit_code_of_an_own_command_is_restarted():
    rules = [
        request(more, max_restarts=2)["job"]["spec"]["podFailurePolicy"]["rules"] for more in ({}, {"command": ["x"]})
    ]
    assert [[rule["action"] for rule in each] for each in rules] == [["Ignore", "FailIndex"], ["Ignore"]]


def test_a_rank_comes_from_the_annotation_and_nothing_of_the_task_is_in_the_environment():
    found = request(replicas=3, rank_env="MY_RANK", env={"A": "1"})
    rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    assert env(found)["REPLICA_RANK"] == env(found)["MY_RANK"] == rank
    assert env(found)["WORLD_SIZE"] == "3"
    assert set(env(found)) <= {*RESERVED, "MY_RANK", "A"}
    names = [each["name"] for each in container(found)["env"]]
    assert len(names) == len(set(names))
    assert container(found)["command"] == ["python", "-m", "atoll.replica"]


@pytest.mark.parametrize(
    ("value", "sent"), [("$HOME", "$HOME"), ("$(HOME)", "$$(HOME)"), ("a$$b", "a$$$$b"), ("$$(A) $B", "$$$$(A) $$B")]
)
def test_values_reach_the_replica_unchanged(value, sent):
    assert env(request(env={"A": value}))["A"] == sent


def test_secrets_are_references():
    found = request(secrets={"TOKEN": "kubernetes:hub/token"})
    assert env(found)["TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    for wrong in ("kubernetes:hub", "kubernetes:/key", "kubernetes:Hub/key", "kubernetes:hub/a b"):
        assert refused({}, secrets={"TOKEN": wrong}) == {"secrets.TOKEN"}
    assert refused({}, secrets={"A": "env:A", "B": "kubernetes:x"}) == {"secrets.A", "secrets.B"}


def test_time_limits_count_running_time():
    plain, own = request(timeout_s=100.5, grace_s=7), request({"command": ["x"]}, timeout_s=100.5, grace_s=7)
    assert (env(plain)["ATOLL_TIMEOUT_S"], env(plain)["ATOLL_GRACE_S"]) == ("100.5", "7")
    assert pod(plain)["activeDeadlineSeconds"] == 108 + 3600
    assert pod(plain)["terminationGracePeriodSeconds"] == 7 + 15
    assert pod(own)["activeDeadlineSeconds"] == 101
    assert pod(own)["terminationGracePeriodSeconds"] == 7
    assert pod(request({"command": ["x"]}, grace_s=0))["terminationGracePeriodSeconds"] == 1
    assert refused({}, timeout_s=2.0**31) == {"timeout_s"}


def test_waiting_has_its_own_limit():
    job = request({"queue_timeout_s": 600.0}, timeout_s=100, grace_s=10, max_restarts=2)["job"]
    assert job["spec"]["activeDeadlineSeconds"] == 600 + 3 * 110 + 10 + 20
    assert job["metadata"]["annotations"]["atoll.dev/queue-timeout-s"] == "600"


def test_memory_is_limited_and_cores_are_not():
    resources = container(request(cpus=2.5, memory_gib=4, gpu="any:2"))["resources"]
    assert resources["requests"] == {"cpu": "2500m", "memory": "4Gi"}
    assert resources["limits"] == {"memory": "4Gi", "nvidia.com/gpu": "2"}
    assert container(request())["resources"] == {}


def test_a_default_is_lowered_to_the_machine_and_a_given_size_is_not():
    defaults = {"default_cpus": 4.0, "default_memory_gib": 16.0, "instance_type": "g5.xlarge"}
    found, _, notes = planned(defaults, gpu="A10G:1")
    assert container(found)["resources"]["requests"] == {"cpu": "3500m", "memory": "13Gi"}
    assert [note.split(": ")[:2] for note in notes if "lowered" in note] == [
        ["warning", "cpus"],
        ["warning", "memory_gib"],
    ]
    found, problems, notes = planned({"instance_type": "g5.xlarge"}, gpu="A10G:1", cpus=4, memory_gib=16)
    assert container(found)["resources"]["requests"] == {"cpu": "4", "memory": "16Gi"}
    assert problems == []
    assert [note.partition("=")[0] for note in notes if "never fit" in note] == ["warning: cpus", "warning: memory_gib"]


def test_gpus_of_a_fixed_machine_must_be_there():
    assert refused({"instance_type": "g5.xlarge"}, gpu="H100:1") == {"instance_type"}
    assert refused({"instance_type": "g5.xlarge"}, gpu="A10G:2") == {"instance_type"}
    assert refused({"instance_type": "m5.large"}, gpu="any:1") == {"instance_type"}
    assert refused({"instance_type": "p4de.24xlarge"}, gpu="A100:8") == set()
    assert refused({"instance_type": "q9.huge"}, gpu="H100:1") == set()
    assert "affinity" not in pod(request({"instance_type": "p5.48xlarge"}, gpu="H100:8"))
    assert refused({"instance_type": "p5.48xlarge", "gpu_selector": "gke"}, gpu="H100:8") == {"gpu_selector"}


@pytest.mark.parametrize(
    ("name", "gpu"), [("g5.xlarge", "H100"), ("g5.xlarge", "A10G:4"), ("m5.large", "any"), ("p4d.24xlarge", "T4")]
)
def test_a_gpu_that_the_selected_machine_does_not_have_is_warned_of(name, gpu):
    _, problems, notes = planned({"node_selector": {INSTANCE_TYPE: name}}, gpu=gpu)
    (warning,) = (note for note in notes if "can never fit" in note)
    assert warning.startswith(f"warning: gpu=`{gpu}")
    assert name in warning
    assert problems == []
    for fits in ("A10G", "any"):
        _, _, notes = planned({"node_selector": {INSTANCE_TYPE: "g5.xlarge"}}, gpu=fits)
        assert not [note for note in notes if "can never fit" in note]


def test_a_sandbox_with_a_gpu_is_warned_of():
    for name, is_warned in (("gvisor", True), ("nvidia", False)):
        _, _, notes = planned({"runtime_class": name}, gpu="any:1")
        assert any(note.startswith("warning: runtime_class") for note in notes) is is_warned


def test_pod_security_is_strict_and_sets_no_user():
    found = request()
    assert pod(found)["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert container(found)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    restricted = pod(request({"pod_security": "restricted", "run_as_user": 1000}))["securityContext"]
    assert (restricted["runAsNonRoot"], restricted["runAsUser"]) == (True, 1000)
    assert refused({"pod_security": "restricted", "run_as_user": 0}) == {"run_as_user"}
    assert refused({"image_is_non_root": True}) == {"image_is_non_root"}


def test_an_own_command_gets_its_arguments_in_a_file():
    found = request({"command": ["train", "$(WORLD_SIZE)"], "command_args": {"b": {"c": [1]}, "a": "ü"}})
    assert container(found)["command"] == ["train", "$(WORLD_SIZE)"]
    assert env(found)["ATOLL_ARGS"] == "/etc/atoll/args.json"
    (config_map,) = found["extras"]
    assert json.loads(config_map["data"]["args.json"]) == {"b": {"c": [1]}, "a": "ü"}
    assert pod(found)["volumes"] == [{"name": "atoll-args", "configMap": {"name": config_map["metadata"]["name"]}}]


def test_the_bootstrap_installs_what_the_store_needs():
    found = request({"bootstrap": "pip", "pip_extras": ["train"]})
    assert container(found)["command"][-1].startswith("atoll[cloud,train] @ file:///opt/atoll/wheel/")
    assert found["wheel"] == {"file": WHEEL.file, "sha256": WHEEL.sha256}
    from_index = request({"bootstrap": "pip", "pip_index": "https://packages.invalid/simple"})
    assert (from_index["extras"], "wheel" in from_index) == ([], False)
    made = KubernetesSettings(image="i", bootstrap="pip")
    _, problems, _ = job_request(CONTEXT, Placement(), made, namespace="n", version="1")
    assert [problem.partition(":")[0] for problem in problems] == ["bootstrap"]


def test_every_problem_is_reported_at_once():
    settings = {
        "image": "x",
        "command_args": {"a": 1},
        "pip_index": "https://x/simple",
        "shm_size": "1Gi",
        "volumes": [{"pvc": "a", "mount": "/dev/shm"}, {"pvc": "b"}],
        "labels": {"atoll.dev/run": "x", "kueue.x-k8s.io/queue-name": "q"},
        "tolerations": [{"keys": "x"}],
        "affinity": {"node": {}},
        "topology_spread": [{"maxSkew": 1}],
        "instance_type": "ml.g5.xlarge",
        "overlay": {"spec": {"completions": 9}},
        "efa": 1,
    }
    assert refused(settings, RunContext("r", "memory://x"), env={"ATOLL_ARGS": "x", "BIG": "x" * 131_000}) == {
        "store", "command_args", "pip_index", "shm_size", "volumes[1].mount", "labels.atoll.dev/run",
        "labels.kueue.x-k8s.io/queue-name", "tolerations[0].keys", "affinity.node", "topology_spread[0].topologyKey",
        "topology_spread[0].whenUnsatisfiable", "instance_type", "overlay.spec.completions", "efa",
        "env.ATOLL_ARGS", "env.BIG",
    }  # fmt: skip


@pytest.mark.parametrize("gpu", [None, "A100"])
def test_a_node_affinity_of_another_shape_is_refused(gpu):
    name = "requiredDuringSchedulingIgnoredDuringExecution"
    where = "affinity.nodeAffinity"
    assert refused({"affinity": {"nodeAffinity": "zone-a"}}, gpu=gpu) == {where}
    assert refused({"affinity": {"nodeAffinity": {name: ["a"]}}}, gpu=gpu) == {f"{where}.{name}"}
    for terms, end in (({"a": 1}, ""), (["a"], "[0]"), ([{"matchExpressions": "a"}], "[0]")):
        settings = {"affinity": {"nodeAffinity": {name: {"nodeSelectorTerms": terms}}}}
        assert refused(settings, gpu=gpu) == {f"{where}.{name}.nodeSelectorTerms{end}"}
    for given in (None, {name: None}, {name: {"nodeSelectorTerms": [{"matchExpressions": None}]}}):
        assert request({"affinity": {"nodeAffinity": given}}, gpu=gpu)


def test_a_run_without_an_image_and_a_huge_environment_are_refused():
    _, problems, _ = job_request(CONTEXT, Placement(), KubernetesSettings(), namespace="n", version="1")
    assert [problem.partition(":")[0] for problem in problems] == ["image"]
    assert plan_hint(problems, "kubernetes", KubernetesSettings) is not None
    assert refused({}, env={f"V{i}": "x" * 120_000 for i in range(12)}) == {"env"}
    assert plan_hint(["store=`x`: no"], "kubernetes", KubernetesSettings) is None


def test_capabilities_say_what_differs():
    assert CAPABILITIES.cancels_together
    assert CAPABILITIES.forgets_cancelled
    assert CAPABILITIES.secret_schemes == {"kubernetes"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gang", "slurm"),
        ("namespace", "Team"),
        ("shm_size", "2 GB"),
        ("pull_secrets", "registry"),
        ("labels", {"a b": "c"}),
        ("labels", {"a": "b c"}),
        ("annotations", {"a": 3}),
        ("queue_timeout_s", 0),
        ("ttl_s", -1),
        ("pod_security", "privileged"),
        ("gpu_selector", "magic"),
        ("bootstrap", "conda"),
        ("tolerations", [3]),
        ("overlay", {"a": float("nan")}),
        ("command", "python train.py"),
        ("default_cpus", 0),
        ("spot", "yes"),
        ("prices", {"g5.xlarge": -1}),
        ("shm", "1Gi"),
    ],
)
def test_wrong_values_of_single_settings_are_refused(name, value):
    from atoll.errors import InvalidSpec

    with pytest.raises(InvalidSpec) as caught:
        check_settings("kubernetes", {name: value}, KubernetesSettings)
    assert caught.value.fields == (name,)
