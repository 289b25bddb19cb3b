"""What a launch finds out before it records or creates anything, on the real control plane."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from atoll.context import RunContext
from atoll.errors import AuthError, InvalidSpec
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.kube.client import METADATA_ONLY
from atoll.kube.looks import Looks
from atoll.kube.references import Reference
from atoll.kube.role import role
from atoll.kube.settings import KubernetesSettings
from atoll.runs.prepare import prepare
from atoll.spec import Placement
from atoll.status import ReplicaState
from services.kubernetes.api import ApiError
from services.kubernetes.namespace import Namespace

pytestmark = [pytest.mark.process, pytest.mark.server]

ENFORCE, WARN = "pod-security.kubernetes.io/enforce", "pod-security.kubernetes.io/warn"
SETTINGS: dict[str, Any] = {"image": "atoll-test", "store_is_mounted": True}


def executor(namespace: Namespace, **settings: Any) -> KubernetesExecutor:
    return KubernetesExecutor(kubeconfig=str(namespace.kubeconfig), **SETTINGS, **settings)


def drafted(made: KubernetesExecutor, store: str, **placement: Any):
    return prepare("atoll.testing.contract_jobs:echo", on=made, store=store, **placement)


def refused(made: KubernetesExecutor, store: str, **placement: Any) -> set[str]:
    """The fields that the refusal names."""
    with pytest.raises(InvalidSpec) as caught:
        drafted(made, store, **placement).preflight()
    return set(caught.value.fields)


def label(namespace: Namespace, **labels: str) -> None:
    named = {ENFORCE if key == "enforce" else WARN: value for key, value in labels.items()}
    namespace.api.patch(f"/api/v1/namespaces/{namespace.name}", {"metadata": {"labels": named}})


def install(namespace: Namespace, group: str, version: str, kind: str, *, namespaced: bool = True) -> None:
    """Give the cluster a kind of objects, as the controller of a gang does. It stays there for other tests."""
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower()}
    spec = {
        "group": group,
        "names": names,
        "scope": "Namespaced" if namespaced else "Cluster",
        "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
    }
    path, name = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", f"{plural}.{group}"
    approved = {"api-approved.kubernetes.io": "https://github.com/kubernetes/enhancements/pull/1111"}
    metadata = {"name": name, "annotations": approved}
    with contextlib.suppress(ApiError):  # another test has made it
        namespace.api.create(path, {"metadata": metadata, "spec": spec})
    deadline = time.monotonic() + 30
    while plural not in _served(namespace, f"/apis/{group}/{version}"):
        assert time.monotonic() < deadline, f"the cluster does not serve {name}"
        time.sleep(0.05)


def _served(namespace: Namespace, path: str) -> set[str]:
    with contextlib.suppress(ApiError):
        return {each["name"] for each in namespace.api.get(path)["resources"]}
    return set()


def test_every_object_that_does_not_exist_is_named(namespace, store):
    made = executor(
        namespace,
        service_account="nobody",
        pull_secrets=["registry"],
        runtime_class="sandbox",
        priority_class="high",
        volumes=[{"pvc": "data", "mount": "/data"}, {"config_map": "conf", "mount": "/conf"}],
    )
    assert refused(made, store, secrets={"TOKEN": "kubernetes:hub/token"}) == {
        "service_account", "pull_secrets", "runtime_class", "priority_class", "volumes", "secrets.TOKEN",
    }  # fmt: skip
    namespace.make("secrets", {"metadata": {"name": "hub"}, "stringData": {"token": "x"}})
    drafted(executor(namespace), store, secrets={"TOKEN": "kubernetes:hub/token"}).preflight()


def test_a_user_who_may_not_look_can_launch(namespace, store):
    made = KubernetesSettings(**SETTINGS)
    config = namespace.user("launcher", role(namespace.name, made)["rules"])
    limited = KubernetesExecutor(kubeconfig=str(config), **SETTINGS, service_account="nobody", pull_secrets=["x"])
    assert drafted(limited, store, secrets={"TOKEN": "kubernetes:hub/token"}).preflight() is None


def test_the_problems_of_the_server_and_ours_come_together(namespace, store):
    overlay = {"spec": {"template": {"spec": {"dnsPolicy": "Nonsense"}}}}
    found = refused(executor(namespace, service_account="nobody", gang="volcano:q", overlay=overlay), store)
    assert found == {"service_account", "gang", "spec.template.spec.dnsPolicy"}


def test_a_namespace_that_does_not_exist_is_named(namespace, store):
    assert refused(executor(namespace).with_settings(namespace="nowhere"), store) == {"namespace"}


def test_pod_security_is_refused_where_it_is_enforced_and_not_where_it_only_warns(namespace, store):
    label(namespace, enforce="baseline", warn="restricted")
    assert drafted(executor(namespace), store).preflight() is None
    for warn in ("restricted", "baseline", "privileged"):  # the API server is silent about the enforced level
        label(namespace, enforce="restricted", warn=warn)
        assert refused(executor(namespace), store) == {"namespace"}
        fine = executor(namespace, pod_security="restricted", run_as_user=1000)
        assert drafted(fine, store).preflight() is None
    label(namespace, enforce="baseline", warn="privileged")
    assert drafted(executor(namespace), store).preflight() is None
    mounted = executor(namespace, volumes=[{"host_path": "/data", "mount": "/data"}])
    assert refused(mounted, store) == {"namespace"}


def test_an_object_of_the_run_that_we_may_not_create_is_refused_before_the_job(namespace, store):
    config = namespace.user("launcher", role(namespace.name, KubernetesSettings(**SETTINGS))["rules"])
    limited = KubernetesExecutor(kubeconfig=str(config), **SETTINGS, bootstrap="pip")
    with pytest.raises(AuthError) as caught:
        drafted(limited, store).submit()
    assert caught.value.reason == "forbidden"
    assert namespace.api.items(namespace.path("jobs")) == []


@pytest.mark.parametrize("gang", ["volcano:default", "native"])
def test_a_gang_that_the_cluster_does_not_have_is_refused(namespace, store, gang):
    assert refused(executor(namespace, gang=gang), store, replicas=2) == {"gang"}


def test_a_queue_of_kueue_must_exist_and_be_active(namespace, store):
    install(namespace, "kueue.x-k8s.io", "v1beta2", "LocalQueue")
    made = executor(namespace, gang="kueue:team")
    assert refused(made, store, replicas=2, cpus=0.1) == {"gang"}
    path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace.name}/localqueues"
    stopped = [{"type": "Active", "status": "False", "message": "ClusterQueue is stopped"}]
    body = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "team"}}
    namespace.api.create(path, {**body, "status": {"conditions": stopped}})
    assert refused(made, store, replicas=2, cpus=0.1) == {"gang"}
    namespace.api.delete(f"{path}/team")
    namespace.api.create(path, body)
    assert drafted(made, store, replicas=2, cpus=0.1).preflight() is None


def test_the_group_of_coscheduling_is_owned_by_the_job(namespace, store):
    install(namespace, "scheduling.x-k8s.io", "v1alpha1", "PodGroup")
    run = drafted(executor(namespace, gang="coscheduling:gang-scheduler"), store, replicas=2).submit()
    (group,) = namespace.api.items(f"/apis/scheduling.x-k8s.io/v1alpha1/namespaces/{namespace.name}/podgroups")
    assert [(owner["kind"], owner["name"]) for owner in group["metadata"]["ownerReferences"]] == [
        ("Job", run.handle.native_id)
    ]
    run.cancel()


def test_a_run_that_waits_for_too_long_is_ended_by_the_process_that_waits_for_it(namespace, store):
    made = executor(namespace, queue_timeout_s=0.5, node_selector={"there-is": "none"})
    run = drafted(made, store).submit()
    namespace.until_pods(run.handle.native_id, lambda pods: len(pods) == 1)
    made.status(run.handle)
    assert len(namespace.pods(run.handle.native_id)) == 1  # a reading ends nothing
    (replica,) = run.wait(60).replicas
    assert replica.state is ReplicaState.CANCELLED
    assert "waited" in replica.message
    assert namespace.pods(run.handle.native_id) == []


def test_no_value_of_a_secret_is_read(namespace, store):
    namespace.make("secrets", {"metadata": {"name": "hub"}, "stringData": {"token": "x"}})
    looks = Looks(executor(namespace)._jobs(None), namespace.name)
    path = namespace.path("secrets", "hub")
    found = looks._read(path, "Secret `hub`", METADATA_ONLY)
    assert (found["kind"], found["metadata"]["name"], "data" in found) == ("PartialObjectMetadata", "hub", False)
    assert looks.exists(Reference("Secret", "hub", "secrets", "secrets")) is True


def test_the_objects_of_a_launch_that_ended_early_are_made_by_the_next_one(namespace, store):
    made = executor(namespace, command=["true"], command_args={"a": 1})
    plan = made.plan(RunContext("own", store), Placement())
    job, is_new = made._jobs(None).create(plan.request["job"], namespace.name, "own")
    assert is_new
    made.start(plan)
    name = plan.request["extras"][0]["metadata"]["name"]
    (owner,) = namespace.get("configmaps", name)["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Job", job["metadata"]["uid"])
