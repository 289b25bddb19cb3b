"""What only `EKSExecutor` does, on the real control plane; `test_protocol.py` has what all facades share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from atoll.serverless import EKSExecutor, ReplicaHandle
from services.kubernetes.facade_bench import see_folders

pytestmark = [pytest.mark.process, pytest.mark.server]

JOBS = "atoll.testing.protocol_jobs"
LIMIT_S = 60.0


@pytest.fixture
def make(namespace, store, monkeypatch):
    see_folders(monkeypatch)
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))

    def make(**settings: object) -> EKSExecutor:
        return EKSExecutor("atoll-test", **{"namespace": namespace.name, "store": store, "run_id": "exp", **settings})

    return make


def running(namespace, handles):
    job = handles[0].metadata["job_name"]
    namespace.until_pods(job, lambda pods: [pod["status"].get("phase") for pod in pods] == ["Running"] * len(handles))


def test_one_failure_ends_the_others_and_is_named(make):
    executor = make()
    handles = executor.launch_replicas(3, f"{JOBS}:act", {"parts": ["hold", "raise", "hold"], "key": "never"})
    rows = executor.collect(handles, timeout=LIMIT_S)
    assert [row["status"] for row in rows] == ["cancelled", "failed", "cancelled"]
    assert rows[1]["exit_code"] == 1
    assert "ValueError: rank 1 raises" in rows[1]["error"]
    assert all("rank 1 failed" in row["error"] for row in (rows[0], rows[2]))


def test_cancel_of_a_replica_that_has_ended_stops_the_others(make, namespace):
    executor = make()
    handles = executor.launch_replicas(2, f"{JOBS}:act", {"parts": ["return", "hold"], "key": "never"})
    assert executor.collect(handles[:1], timeout=LIMIT_S)[0]["result"] == "return"
    assert executor.poll(handles[1]) in ("pending", "running")
    executor.cancel(handles[0])
    assert namespace.pods(handles[0].metadata["job_name"]) == []
    assert [executor.poll(handle) for handle in handles] == ["succeeded", "cancelled"]


def test_rows_of_two_runs_are_not_mixed_up(make):
    executor = make()
    one, two = (executor.launch_replicas(2, f"{JOBS}:echo", {"x": x}) for x in (1, 2))
    mixed = [two[1], one[0], two[0], one[1]]
    rows = executor.collect(mixed, timeout=LIMIT_S)
    assert [(row["rank"], row["result"]["arguments"]["x"]) for row in rows] == [(1, 2), (0, 1), (0, 2), (1, 1)]
    names = [row["job_name"] for row in rows]
    assert names == [handle.metadata["job_name"] for handle in mixed]
    assert len(set(names)) == 2


def test_a_run_that_was_removed_by_its_ttl_is_answered_from_the_store(make, namespace, store):
    executor = make(ttl_seconds_after_finished=0)
    with pytest.warns(UserWarning, match="ttl_seconds_after_finished=0"):
        handles = executor.launch_replicas(1, f"{JOBS}:act", {"parts": ["return"]})
    namespace.until("jobs", handles[0].metadata["job_name"], lambda job: job is None)
    assert executor.poll(handles[0]) == "succeeded"
    (row,) = executor.collect(handles, timeout=LIMIT_S)
    assert [row[name] for name in ("status", "result", "rendezvous_uri", "namespace")] == [
        "succeeded",
        "return",
        store,
        namespace.name,
    ]
    assert executor.stream_logs(handles[0]) == "first line of 0\nlast line of 0\n"


def test_a_saved_handle_finds_its_cluster_when_the_current_context_is_another(make, namespace, tmp_path):
    executor = make()
    handles = executor.launch_replicas(2, f"{JOBS}:hold", {"key": "attached"})
    running(namespace, handles)
    found = namespace.get("jobs", handles[0].metadata["job_name"])
    wanted = {"namespace": namespace.name, "context": "atoll-test", "uid": found["metadata"]["uid"], "rank": 1}
    assert {name: handles[1].metadata[name] for name in wanted} == wanted
    content = json.loads(namespace.kubeconfig.read_text())
    elsewhere = {"name": "other", "cluster": {"server": "https://127.0.0.1:9"}}
    content["clusters"].append(elsewhere)
    content["contexts"].append({"name": "other", "context": {"cluster": "other", "user": "user"}})
    config = tmp_path / "config"
    config.write_text(json.dumps({**content, "current-context": "other"}))
    code = (
        "import json, sys\n"
        "from atoll.serverless import EKSExecutor, ReplicaHandle\n"
        "handles = [ReplicaHandle(**each) for each in json.load(sys.stdin)]\n"
        "executor = EKSExecutor('unused')\n"
        "states = [executor.poll(handle) for handle in handles]\n"
        "executor.cancel(handles[1])\n"
        "print(json.dumps([states, [row['status'] for row in executor.collect(handles, timeout=30)]]))\n"
    )
    saved = json.dumps([asdict(handle) for handle in handles])
    environment = {**os.environ, "KUBECONFIG": str(config)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=saved, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["running", "running"], ["cancelled", "cancelled"]]
    assert namespace.pods(handles[0].metadata["job_name"]) == []


def test_requests_go_through_the_clients_of_the_caller(make, namespace, monkeypatch):
    from kubernetes import client, config

    def loaded() -> client.ApiClient:
        private = client.Configuration()
        config.load_kube_config(str(namespace.kubeconfig), client_configuration=private)
        return client.ApiClient(private)

    batch, core = client.BatchV1Api(loaded()), client.CoreV1Api(loaded())
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    executor = make(batch_api=batch, core_api=core)
    sent = []
    pool = batch.api_client.rest_client.pool_manager
    request = pool.request
    monkeypatch.setattr(
        pool, "request", lambda method, url, **more: (sent.append(method), request(method, url, **more))[1]
    )
    handles = executor.launch_replicas(1, f"{JOBS}:act", {"parts": ["return"]})
    assert handles[0].metadata["context"] is None
    assert executor.collect(handles, timeout=LIMIT_S)[0]["result"] == "return"
    assert executor.stream_logs(handles[0]) == "first line of 0\nlast line of 0\n"
    assert {"GET", "POST"} == set(sent)
    core_only = make(batch_api=None, core_api=core)
    assert core_only.poll(handles[0]) == "succeeded"
    core_only.cancel(handles[0])
    for each in (batch, core):
        each.api_client.rest_client.pool_manager.clear()


def test_backoff_limit_restarts_a_rank_without_ending_the_others(make, store):
    executor = make(backoff_limit=1)
    handles = executor.launch_replicas(2, "atoll.testing.contract_jobs:fail_once", {})
    rows = executor.collect(handles, timeout=2 * LIMIT_S)
    assert [(row["status"], row["attempt"], row["result"]) for row in rows] == [("succeeded", 1, "second try")] * 2


def test_a_gpu_selects_its_machine_and_the_placeholder_says_why_there_is_none(make, namespace):
    executor = make()
    with pytest.warns(UserWarning, match="8 GPUs"):
        handles = executor.launch_replicas(1, f"{JOBS}:variables", {"names": ["CUDA_VISIBLE_DEVICES"]}, gpu="A100")
    (row,) = executor.collect(handles, timeout=LIMIT_S)
    assert row["result"]["CUDA_VISIBLE_DEVICES"]
    with pytest.warns(UserWarning, match="lowered"):
        (handle,) = executor.launch_replicas(1, f"{JOBS}:echo", {}, gpu="T4")
    namespace.until_pods(handle.metadata["job_name"], lambda pods: any(p["status"].get("conditions") for p in pods))
    assert executor.poll(handle) == "pending"
    assert "nodes are available" in executor.stream_logs(handle)
    (row,) = executor.collect([handle], timeout=0)
    assert (row["status"], row["reason"]) == ("pending", "unschedulable")
    assert "nodes are available" in row["error"]
    executor.cancel(handle)


def test_queue_timeout_ends_a_run_that_waits_for_nodes(make):
    executor = make(queue_timeout=2, node_selector={"pool": "none"})
    handles = executor.launch_replicas(2, f"{JOBS}:echo", {}, timeout=600)
    rows = executor.collect(handles, timeout=LIMIT_S)
    assert [row["status"] for row in rows] == ["cancelled", "cancelled"]
    assert all("waited for longer" in row["error"] and "nodes are available" in row["error"] for row in rows)


def test_a_saved_handle_without_links_or_uid_still_works(make):
    executor = make()
    handles = executor.launch_replicas(1, f"{JOBS}:echo", {})
    metadata = {name: value for name, value in handles[0].metadata.items() if name not in ("links", "uid", "context")}
    (row,) = executor.collect([ReplicaHandle(0, "eks", metadata)], timeout=LIMIT_S)
    assert (row["status"], row["job_name"]) == ("succeeded", metadata["job_name"])
