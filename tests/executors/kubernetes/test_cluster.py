"""The cluster of the tests: the control plane is real, and the kubelet that runs pods as processes acts like one."""

from __future__ import annotations

import base64
import contextlib
import signal
from typing import Any

import pytest

from services.kubernetes.api import STRATEGIC_MERGE, ApiError
from services.kubernetes.cluster import on_node
from services.kubernetes.control_plane import api_of
from services.kubernetes.kubelet.node import NodeSpec
from services.kubernetes.namespace import Namespace

Object = dict[str, Any]
TERMINAL = {"Complete", "Failed"}
RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def shell(script: str, *, image: str = "busybox", **more: Any) -> Object:
    return {"name": "main", "image": image, "command": ["sh", "-c", script], **more}


def pod(container: Object, **more: Any) -> Object:
    return {"restartPolicy": "Never", "containers": [container], "automountServiceAccountToken": False, **more}


def job(name: str, spec: Object, count: int = 1, **more: Any) -> Object:
    behaviour = {"completionMode": "Indexed", "completions": count, "parallelism": count, "backoffLimitPerIndex": 0}
    return {"metadata": {"name": name}, "spec": {**behaviour, "template": {"spec": spec}, **more}}


def conditions(found: Object) -> dict[str, Object]:
    every = found.get("status", {}).get("conditions", [])
    return {one["type"]: one for one in every if one["status"] == "True"}


def ended(namespace: Namespace, name: str) -> tuple[str, Object]:
    """Wait for the end of a Job; its last condition, and the Job."""
    found = namespace.until("jobs", name, lambda job: job is not None and bool(conditions(job).keys() & TERMINAL))
    assert found is not None
    return next(iter(conditions(found).keys() & TERMINAL)), found


def state(one: Object) -> Object:
    """The only key of a container's state, with its value under it."""
    statuses = one.get("status", {}).get("containerStatuses", [{"state": {}}])
    found: Object = statuses[0]["state"]
    return found


def waiting_for(reason: str) -> Any:
    return lambda pods: any(state(one).get("waiting", {}).get("reason") == reason for one in pods)


def running(pods: list[Object]) -> bool:
    return bool(pods) and all("running" in state(one) for one in pods)


def log_of(namespace: Namespace, name: str, **query: object) -> str:
    return namespace.api.text(f"{namespace.path('pods', name)}/log", **query)


def test_an_indexed_job_succeeds_and_every_rank_knows_its_index(namespace: Namespace):
    rank = {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": RANK}}}
    script = shell("echo $RANK $JOB_COMPLETION_INDEX $HOSTNAME", env=[rank])
    namespace.make("jobs", job("hello", pod(script), 3))
    how, done = ended(namespace, "hello")
    assert how == "Complete"
    assert done["status"]["completedIndexes"] == "0-2"
    assert done["status"]["succeeded"] == 3
    logs = [log_of(namespace, one["metadata"]["name"]) for one in namespace.pods("hello")]
    assert logs == [f"{index} {index} hello-{index}\n" for index in range(3)]


def test_one_rank_fails_alone_with_its_exit_code(namespace: Namespace):
    namespace.make("jobs", job("one", pod(shell("[ $JOB_COMPLETION_INDEX != 1 ] || exit 3")), 3))
    how, failed = ended(namespace, "one")
    assert how == "Failed"
    assert (failed["status"]["failedIndexes"], failed["status"]["completedIndexes"]) == ("1", "0,2")
    end = state(namespace.pods("one")[1])["terminated"]
    assert (end["exitCode"], end["reason"]) == (3, "Error")


def test_logs_in_part(namespace: Namespace):
    namespace.make("jobs", job("lines", pod(shell("seq 5; printf end"))))
    assert ended(namespace, "lines")[0] == "Complete"
    name = namespace.pods("lines")[0]["metadata"]["name"]
    assert log_of(namespace, name) == "1\n2\n3\n4\n5\nend"
    assert log_of(namespace, name, tailLines=2) == "5\nend"
    assert log_of(namespace, name, limitBytes=3) == "1\n2"
    assert log_of(namespace, name, sinceSeconds=600, tailLines=1) == "end"
    assert log_of(namespace, name, sinceTime="2100-01-01T00:00:00Z") == ""
    time, _, text = log_of(namespace, name, timestamps="true", limitBytes=200).partition("\n")[0].partition(" ")
    assert (time[4], time[-1], text) == ("-", "Z", "1")


def test_a_log_is_followed_to_the_end_of_the_pod(namespace: Namespace):
    namespace.make(
        "jobs", job("follow", pod(shell("trap 'echo got it; exit 0' TERM; echo ready; while :; do sleep 0.1; done")))
    )
    name = namespace.until_pods("follow", running)[0]["metadata"]["name"]
    lines = namespace.api.lines(f"{namespace.path('pods', name)}/log", follow="true")
    assert next(lines) == b"ready\n"
    namespace.send_signal(signal.SIGTERM, job="follow", index=0)
    assert list(lines) == [b"got it\n"]


def test_a_container_that_waits_has_no_log(namespace: Namespace):
    namespace.fault("slow-start", seconds=600)
    namespace.make("jobs", job("slow", pod(shell("true"))))
    created = namespace.until_pods("slow", waiting_for("ContainerCreating"))
    with pytest.raises(ApiError, match="waiting to start") as caught:
        log_of(namespace, created[0]["metadata"]["name"])
    assert caught.value.status == 400


def test_a_restart_keeps_the_previous_log_and_state(namespace: Namespace):
    script = shell(
        "if [ -e /scratch/again ]; then echo second; else touch /scratch/again; echo first; exit 4; fi",
        volumeMounts=[{"name": "scratch", "mountPath": "/scratch"}],
    )
    spec = {**pod(script, volumes=[{"name": "scratch", "emptyDir": {}}]), "restartPolicy": "OnFailure"}
    namespace.make("jobs", job("again", spec, backoffLimitPerIndex=None, backoffLimit=5))
    assert ended(namespace, "again")[0] == "Complete"
    one = namespace.pods("again")[0]
    status = one["status"]["containerStatuses"][0]
    assert (status["restartCount"], status["lastState"]["terminated"]["exitCode"]) == (1, 4)
    name = one["metadata"]["name"]
    assert (log_of(namespace, name), log_of(namespace, name, previous="true")) == ("second\n", "first\n")


def test_a_foreground_delete_waits_for_the_grace_period_of_the_pods(namespace: Namespace):
    script = "trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.1; done"
    namespace.make("jobs", job("doomed", pod(shell(script), terminationGracePeriodSeconds=60)))
    name = namespace.until_pods("doomed", running)[0]["metadata"]["name"]
    lines = namespace.api.lines(f"{namespace.path('pods', name)}/log", follow="true")
    assert next(lines) == b"ready\n"
    deleted = namespace.api.delete(namespace.path("jobs", "doomed"), {"propagationPolicy": "Foreground"})
    assert "foregroundDeletion" in deleted["metadata"]["finalizers"]
    assert list(lines) == [b"bye\n"]
    assert namespace.until("jobs", "doomed", lambda found: found is None) is None
    assert namespace.pods("doomed") == []


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_period(namespace: Namespace):
    namespace.fault("ignore-sigterm")
    namespace.make("jobs", job("deaf", pod(shell("sleep 1000"), terminationGracePeriodSeconds=1)))
    name = namespace.until_pods("deaf", running)[0]["metadata"]["name"]
    namespace.api.delete(namespace.path("pods", name))
    failed = namespace.until("pods", name, lambda found: found is None or "terminated" in state(found))
    assert failed is not None
    assert state(failed)["terminated"]["exitCode"] == 137


def test_an_image_that_cannot_be_pulled(namespace: Namespace):
    namespace.make("jobs", job("typo", pod(shell("true", image="buzybox"))))
    namespace.until_pods("typo", waiting_for("ErrImagePull"))
    assert namespace.until_pods("typo", waiting_for("ImagePullBackOff"))[0]["status"]["phase"] == "Pending"
    number = namespace.fault("image", image="busybox")
    namespace.make("jobs", job("outage", pod(shell("true"))))
    namespace.until_pods("outage", waiting_for("ImagePullBackOff"))
    namespace.cluster.kubelet("remove_fault", number=number)
    assert ended(namespace, "outage")[0] == "Complete"


def test_a_missing_secret_holds_the_container_back_until_it_exists(namespace: Namespace):
    token = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "key", "key": "token"}}}
    namespace.make("jobs", job("secretive", pod(shell("echo $TOKEN", env=[token]))))
    held = namespace.until_pods("secretive", waiting_for("CreateContainerConfigError"))
    assert "key" in state(held[0])["waiting"]["message"]
    namespace.make("secrets", {"metadata": {"name": "key"}, "stringData": {"token": "s3cret"}})
    assert ended(namespace, "secretive")[0] == "Complete"
    assert log_of(namespace, held[0]["metadata"]["name"]) == "s3cret\n"


def test_a_command_that_does_not_exist(namespace: Namespace):
    namespace.make("jobs", job("wrong", pod({"name": "main", "image": "busybox", "command": ["no-such-program"]})))
    assert ended(namespace, "wrong")[0] == "Failed"
    end = state(namespace.pods("wrong")[0])["terminated"]
    assert (end["exitCode"], end["reason"], end["startedAt"]) == (128, "StartError", "1970-01-01T00:00:00Z")


def test_what_no_node_has_is_unschedulable(namespace: Namespace):
    wanted = {"limits": {"nvidia.com/gpu": "1000"}}
    namespace.make("jobs", job("huge", pod(shell("true", resources=wanted))))

    def is_refused(pods: list[Object]) -> bool:
        every = [one for pod in pods for one in pod["status"].get("conditions", [])]
        return any(one["type"] == "PodScheduled" and one.get("reason") == "Unschedulable" for one in every)

    assert namespace.until_pods("huge", is_refused)[0]["status"]["phase"] == "Pending"


def test_ranks_on_one_node_have_different_gpus(namespace: Namespace):
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    script = shell("echo $CUDA_VISIBLE_DEVICES; sleep 1000", resources={"limits": {"nvidia.com/gpu": "2"}})
    namespace.make("jobs", job("gpus", pod(script, tolerations=tolerations), 2))
    names = [one["metadata"]["name"] for one in namespace.until_pods("gpus", lambda p: len(p) == 2 and running(p))]
    first = [next(namespace.api.lines(f"{namespace.path('pods', name)}/log", follow="true")) for name in names]
    devices = [set(line.decode().strip().split(",")) for line in first]
    assert [len(found) for found in devices] == [2, 2]
    assert not devices[0] & devices[1]


def test_out_of_memory_and_other_signals(namespace: Namespace):
    namespace.make("jobs", job("killed", pod(shell("sleep 1000")), 2))
    namespace.until_pods("killed", lambda pods: len(pods) == 2 and running(pods))
    assert namespace.send_signal(signal.SIGKILL, job="killed", index=0, out_of_memory=True) == 1
    assert namespace.send_signal(signal.SIGSEGV, job="killed", index=1) == 1
    assert ended(namespace, "killed")[0] == "Failed"
    ends = [state(one)["terminated"] for one in namespace.pods("killed")]
    assert [(end["exitCode"], end["reason"]) for end in ends] == [(137, "OOMKilled"), (139, "Error")]


def test_the_deadline_of_a_pod(namespace: Namespace):
    spec = pod(shell("sleep 1000"), activeDeadlineSeconds=1, terminationGracePeriodSeconds=1)
    namespace.make("jobs", job("late", spec))
    assert ended(namespace, "late")[0] == "Failed"
    status = namespace.pods("late")[0]["status"]
    assert (status["phase"], status["reason"]) == ("Failed", "DeadlineExceeded")


def test_everything_a_container_can_be_given(namespace: Namespace):
    namespace.make("secrets", {"metadata": {"name": "secret"}, "stringData": {"a": "of a secret"}})
    binary = base64.b64encode(b"raw").decode()
    namespace.make("configmaps", {"metadata": {"name": "map"}, "data": {"B": "of a map"}, "binaryData": {"c": binary}})
    spec = pod(
        shell(
            "cat /volumes/secret/a /volumes/map/renamed /etc/named/uid; echo; echo $P_B $CPU $BOTH; cat /first",
            env=[
                {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}},
                {"name": "BOTH", "value": "$(CPU)-$$(CPU)-$(NONE)"},
            ],
            envFrom=[{"configMapRef": {"name": "map"}, "prefix": "P_"}],
            resources={"limits": {"cpu": "1500m"}},
            volumeMounts=[
                {"name": "secret", "mountPath": "/volumes/secret", "readOnly": True},
                {"name": "map", "mountPath": "/volumes/map"},
                {"name": "named", "mountPath": "/etc/named"},
                {"name": "shared", "mountPath": "/first", "subPath": "sub/file"},
            ],
        ),
        initContainers=[
            {**shell("mkdir /s/sub; echo -n one > /s/sub/file", volumeMounts=[{"name": "shared", "mountPath": "/s"}]),
             "name": "init-1"},
            {**shell("echo two >> /s/sub/file", volumeMounts=[{"name": "shared", "mountPath": "/s"}]),
             "name": "init-2"},
        ],
        volumes=[
            {"name": "secret", "secret": {"secretName": "secret"}},
            {"name": "map", "configMap": {"name": "map", "items": [{"key": "c", "path": "renamed"}]}},
            {"name": "named", "downwardAPI": {"items": [{"path": "uid", "fieldRef": {"fieldPath": "metadata.uid"}}]}},
            {"name": "shared", "emptyDir": {}},
        ],
    )  # fmt: skip
    namespace.make("jobs", job("rich", spec))
    assert ended(namespace, "rich")[0] == "Complete"
    one = namespace.pods("rich")[0]
    first = f"of a secretraw{one['metadata']['uid']}"
    assert log_of(namespace, one["metadata"]["name"]) == f"{first}\nof a map 1500 1500-$(CPU)-$(NONE)\nonetwo\n"


def test_a_pod_reaches_the_api_server_with_its_own_token(namespace: Namespace):
    script = """
import json, ssl, urllib.request, os, pathlib
place = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
context = ssl.create_default_context(cafile=place / "ca.crt")
url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
body = json.dumps({"spec": {}}).encode()
headers = {"Authorization": "Bearer " + (place / "token").read_text(), "Content-Type": "application/json"}
request = urllib.request.Request(url + "/apis/authentication.k8s.io/v1/selfsubjectreviews", body, headers)
with urllib.request.urlopen(request, context=context) as answer:
    print(json.load(answer)["status"]["userInfo"]["username"], (place / "namespace").read_text())
"""
    spec = pod({"name": "main", "image": "atoll-test", "command": ["python", "-c", script]})
    namespace.make("jobs", job("inside", {**spec, "automountServiceAccountToken": True}))
    assert ended(namespace, "inside")[0] == "Complete"
    name = namespace.pods("inside")[0]["metadata"]["name"]
    assert log_of(namespace, name) == f"system:serviceaccount:{namespace.name}:default {namespace.name}\n"


def test_an_eviction_leaves_its_mark_on_the_pod(namespace: Namespace):
    namespace.make("jobs", job("evicted", pod(shell("sleep 1000"), terminationGracePeriodSeconds=1)))
    name = namespace.until_pods("evicted", running)[0]["metadata"]["name"]
    namespace.api.create(f"{namespace.path('pods', name)}/eviction", {"apiVersion": "policy/v1", "kind": "Eviction",
                         "metadata": {"name": name}})  # fmt: skip
    evicted = namespace.until("pods", name, lambda found: found is None or "terminated" in state(found))
    assert evicted is not None
    assert conditions(evicted)["DisruptionTarget"]["reason"] == "EvictionByEvictionAPI"
    assert evicted["status"]["phase"] == "Failed"


def test_a_lost_node_keeps_its_pod_until_it_comes_back(namespace: Namespace):
    cluster = namespace.cluster
    unreachable = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute",
                   "tolerationSeconds": 1}  # fmt: skip
    with cluster.node(NodeSpec(f"lost-{namespace.name[-8:]}")) as node:
        spec = pod(shell("sleep 1000"), tolerations=[unreachable], terminationGracePeriodSeconds=1)
        namespace.make("jobs", job("lost", on_node(spec, node.name)))
        name = namespace.until_pods("lost", running)[0]["metadata"]["name"]
        cluster.kubelet("go_offline", node=node.name)
        doomed = namespace.until("pods", name, lambda found: found is None or "deletionTimestamp" in found["metadata"])
        assert doomed is not None
        assert conditions(doomed)["DisruptionTarget"]["reason"] == "DeletionByTaintManager"
        assert doomed["status"]["phase"] == "Running"
        with pytest.raises(ApiError):
            log_of(namespace, name)
        cluster.kubelet("go_online", node=node.name)
        assert ended(namespace, "lost")[0] == "Failed"


def test_a_node_that_was_given_up_says_again_that_it_is_ready(namespace: Namespace):
    """The control plane gives up nodes also while its API server does not answer."""
    cluster = namespace.cluster
    with cluster.node(NodeSpec(f"slow-{namespace.name[-8:]}")) as node:
        path = f"/api/v1/nodes/{node.name}"
        lost = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": ""}
        cluster.api.patch(f"{path}/status", {"status": {"conditions": [lost]}}, kind=STRATEGIC_MERGE)
        assert "Ready" not in conditions(cluster.api.get(path))
        cluster.until(path, lambda found: "Ready" in conditions(found or {}))


def test_a_full_node_takes_no_pod(namespace: Namespace):
    cluster = namespace.cluster
    with cluster.node(NodeSpec(f"full-{namespace.name[-8:]}")) as node:
        cluster.kubelet("fill", node=node.name)
        namespace.make("jobs", job("crowd", on_node(pod(shell("true")), node.name)))
        refused = namespace.until_pods("crowd", lambda pods: bool(pods) and bool(pods[0]["status"].get("conditions")))
        assert refused[0]["status"]["conditions"][0]["reason"] == "Unschedulable"
        cluster.kubelet("fill", node=node.name, is_full=False)
        assert ended(namespace, "crowd")[0] == "Complete"


def test_a_finished_job_is_removed_with_its_pods_after_its_time_to_live(namespace: Namespace):
    namespace.make("jobs", job("brief", pod(shell("true")), ttlSecondsAfterFinished=1))
    assert ended(namespace, "brief")[0] == "Complete"
    assert namespace.until("jobs", "brief", lambda found: found is None) is None
    assert namespace.until_pods("brief", lambda pods: not pods) == []


def test_a_status_can_come_late(namespace: Namespace):
    namespace.fault("delay-status", seconds=0.5)
    namespace.make("jobs", job("late", pod(shell("true"))))
    assert ended(namespace, "late")[0] == "Complete"


def test_a_user_may_do_only_what_the_role_says(namespace: Namespace):
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    with contextlib.closing(api_of(namespace.user("reader", rules))) as api:
        assert api.items(namespace.path("pods")) == []
        with pytest.raises(ApiError) as caught:
            api.items(namespace.path("jobs"))
    assert (caught.value.status, caught.value.reason) == (403, "Forbidden")


PEER = """
import os, socket, sys
own, other = os.environ["HOSTNAME"], "one-%d.peers" % (1 - int(os.environ["JOB_COMPLETION_INDEX"]))
assert socket.gethostname() == own and socket.getfqdn(own).startswith(own + ".peers."), socket.getfqdn(own)
if own.endswith("-0"):
    with socket.create_server((socket.gethostbyname(own), 29765)) as server:
        connection, (address, _) = server.accept()
        print(connection.recv(100).decode(), address == socket.gethostbyname(other + ".%s.svc" % sys.argv[1]))
else:
    while True:
        try:
            connection = socket.create_connection((other, 29765), source_address=(socket.gethostbyname(own), 0))
            break
        except OSError:  # neither its name nor its port is there yet
            pass
    connection.sendall(own.encode())
    print("sent", True)
"""


def test_pods_behind_a_service_reach_each_other_by_name(namespace: Namespace):
    if not namespace.cluster.kubelet("state")["addresses_lead_here"]:
        pytest.skip("only root can route the addresses of pods")
    selector = {"batch.kubernetes.io/job-name": "one"}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    namespace.make("services", {"metadata": {"name": "peers"}, "spec": service})
    container = {"name": "main", "image": "python:3.11", "command": ["python3", "-c", PEER, namespace.name]}
    namespace.make("jobs", job("one", pod(container, subdomain="peers"), 2))
    assert ended(namespace, "one")[0] == "Complete"
    logs = [log_of(namespace, one["metadata"]["name"]) for one in namespace.pods("one")]
    assert logs == ["one-1 True\n", "sent True\n"]


def test_the_endpoint_slice_of_a_service_lists_the_pods_by_host_name(namespace: Namespace):
    selector = {"batch.kubernetes.io/job-name": "two"}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    namespace.make("services", {"metadata": {"name": "peers"}, "spec": service})
    script = shell("trap 'exit 0' TERM; while :; do sleep 0.05; done")
    namespace.make("jobs", job("two", pod(script, subdomain="peers"), 2))
    namespace.until_pods("two", lambda pods: len(pods) == 2 and running(pods))
    addresses = {one["spec"]["hostname"]: one["status"]["podIP"] for one in namespace.pods("two")}
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace.name}/endpointslices"
    name = namespace.api.items(path)[0]["metadata"]["name"]
    found = namespace.cluster.until(f"{path}/{name}", lambda each: len((each or {}).get("endpoints") or []) == 2)
    assert found is not None
    assert {each["hostname"]: each["addresses"][0] for each in found["endpoints"]} == addresses
