"""Waiting for a run and following its logs on the real control plane, through a proxy that breaks answers."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from atoll._threads import answer_within
from atoll.context import RunContext
from atoll.errors import AuthError, BackendError
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.handle import RunHandle
from atoll.kube.names import CONTAINER, job_annotations, job_labels
from atoll.runs.wait import wait, watching
from atoll.status import ReplicaState, RunStatus
from services.kubernetes.fault_proxy import GONE, Fault, FaultProxy
from services.kubernetes.namespace import Namespace

pytestmark = [pytest.mark.process, pytest.mark.server]
LIMIT_S = 90.0
WATCH = "watch=true"
HOLD = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.fixture
def proxy(namespace: Namespace) -> Iterator[FaultProxy]:
    with FaultProxy(namespace.cluster.plane) as proxy:
        yield proxy


@pytest.fixture
def executor(proxy: FaultProxy, namespace: Namespace, tmp_path: Any) -> KubernetesExecutor:
    return KubernetesExecutor(kubeconfig=str(proxy.kubeconfig(tmp_path)), namespace=namespace.name)


def started(namespace: Namespace, script: str, replicas: int = 2, **spec: Any) -> RunHandle:
    """A Job of shell commands, and its handle."""
    container = {"name": CONTAINER, "image": "busybox", "command": ["sh", "-c", script]}
    pod = {"restartPolicy": "Never", "containers": [container], "automountServiceAccountToken": False}
    counts = {"completionMode": "Indexed", "completions": replicas, "parallelism": replicas, "backoffLimitPerIndex": 0}
    context = RunContext("run", "memory://")
    metadata = {"name": "run", "labels": job_labels(context), "annotations": job_annotations(context)}
    namespace.make("jobs", {"metadata": metadata, "spec": {**counts, "template": {"spec": pod}, **spec}})
    return RunHandle("kubernetes", namespace.name, "run", replicas)


def all_run(namespace: Namespace, replicas: int) -> None:
    namespace.until_pods("run", lambda pods: [p["status"].get("phase") for p in pods] == ["Running"] * replicas)


def end_all(namespace: Namespace, replicas: int) -> None:
    for index in range(replicas):
        namespace.send_signal(signal.SIGTERM, job="run", index=index)


def ended(executor: KubernetesExecutor, handle: RunHandle) -> RunStatus:
    with watching(executor, handle) as watch:
        return wait(watch.status, timeout_s=LIMIT_S, pause=watch.wait)


def test_while_nothing_changes_a_status_is_one_request(executor, proxy, namespace):
    handle = started(namespace, HOLD, 3)
    all_run(namespace, 3)
    with executor.watch(handle) as watch:
        for _ in range(200):  # until the watch is open and the Job has counted its pods
            before = len(proxy.calls)
            watch.status()
            calls = [call for call in proxy.calls[before:] if not call.is_watch]
            assert len(calls) <= 2
            if len(calls) == 1:
                break
            watch.wait(0.1)
        assert [call.path for call in calls] == [namespace.path("jobs", "run")]
        end_all(namespace, 3)
        answer_within(LIMIT_S, lambda: watch.wait(3600.0))
        before = len(proxy.calls)
        watch.status()
        assert namespace.path("pods") in [call.path for call in proxy.calls[before:]]


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("GET", query=WATCH, is_dropped=True, times=float("inf"))],
        [Fault("GET", query=WATCH, hang_s=3600.0, times=float("inf"))],
        [Fault("GET", query=WATCH, status=410), Fault("GET", query=WATCH, event=GONE)],
        [
            Fault("GET", query=WATCH, status=429, headers={"Retry-After": "1"}),
            Fault("GET", query=WATCH, status=500),
            Fault("GET", query=WATCH, cut_after=0),
            Fault("GET", query=WATCH, cut_after=0, is_half_line=True),
        ],
    ],
    ids=["no watch", "dead watch", "expired", "cuts"],
)
def test_the_end_is_noticed_whatever_happens_to_the_watch(executor, proxy, namespace, faults):
    handle = started(namespace, HOLD)
    proxy.faults += [Fault(**vars(fault)) for fault in faults]
    all_run(namespace, 2)
    with executor.watch(handle) as watch:
        watch.status()
        end_all(namespace, 2)
        status = wait(watch.status, timeout_s=LIMIT_S, pause=watch.wait)
    assert [replica.state for replica in status.replicas] == [ReplicaState.SUCCEEDED] * 2
    assert any(call.is_watch for call in proxy.calls)


def test_a_role_without_watch_is_enough_to_wait(proxy, namespace):
    rules = [
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    executor = KubernetesExecutor(kubeconfig=str(namespace.user("reader", rules)))
    handle = started(namespace, "true")
    assert ended(executor, handle).state is ReplicaState.SUCCEEDED
    with pytest.raises(AuthError) as caught:
        list(executor.logs(handle, 0))
    assert caught.value.reason == "forbidden"


def test_a_log_is_followed_over_a_restart_and_cuts_and_each_attempt_is_kept(executor, proxy, namespace):
    script = 'for i in 1 2 3 4; do echo "$HOSTNAME $i"; done; [ -e mark ] || { touch mark; exit 1; }'
    folder = namespace.folder / "shared"
    folder.mkdir()
    handle = started(namespace, f"cd {folder} && {script}", 1, backoffLimitPerIndex=1)
    log = r".*/log"
    proxy.faults += [
        Fault("GET", log, cut_after=2),
        Fault("GET", log, cut_after=1, is_half_line=True),
        Fault("GET", log, status=500),
    ]
    expected = [f"run-0 {number}" for number in (1, 2, 3, 4)]
    found = answer_within(LIMIT_S, lambda: list(executor.logs(handle, 0, follow=True)))
    assert found == expected * 2
    assert list(executor.attempt_logs(handle, 0, 0)) == expected
    assert list(executor.attempt_logs(handle, 0, 1, tail=1)) == expected[-1:]
    with pytest.raises(BackendError):
        executor.attempt_logs(handle, 0, 2)


def test_a_cluster_with_another_certificate_is_refused_at_once(executor, namespace, tmp_path):
    content = json.loads(namespace.kubeconfig.read_text())
    cluster = content["clusters"][0]["cluster"]
    for name in [name for name in cluster if name.startswith("certificate-authority")]:
        del cluster[name]
    path = tmp_path / "other"
    path.write_text(json.dumps(content))
    other = KubernetesExecutor(kubeconfig=str(path), namespace=namespace.name)
    with pytest.raises(BackendError) as caught:
        other.status(RunHandle("kubernetes", namespace.name, "run", 1))
    assert (caught.value.reason, caught.value.retryable) == ("tls", False)
