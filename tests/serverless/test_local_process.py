"""The five-method protocol on this machine."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys

import pytest

from atoll.errors import ConfigError, Unsupported
from atoll.serverless import LocalProcessExecutor, ReplicaHandle, ServerlessExecutor

pytestmark = pytest.mark.process

LIMIT_S = 60.0


def add(a, b):
    return a + b + int(os.environ["REPLICA_RANK"])


def own_rank(name):
    return {name: os.environ[name], "count": os.environ["WORLD_SIZE"]}


@pytest.fixture
def executor(store):
    return LocalProcessExecutor(store=store)


def test_it_is_the_protocol_to_the_letter(executor):
    assert isinstance(executor, ServerlessExecutor)
    assert [f.name for f in dataclasses.fields(ReplicaHandle)] == ["rank", "backend_name", "metadata"]
    launch = inspect.signature(LocalProcessExecutor.launch_replicas).parameters
    assert list(launch) == ["self", "n_replicas", "entrypoint", "entrypoint_args", "gpu", "timeout"]
    assert (launch["gpu"].default, launch["timeout"].default) == (None, 3600)
    assert inspect.signature(executor.stream_logs).parameters["n_lines"].default == 200
    assert inspect.signature(executor.collect).parameters["timeout"].default is None
    assert executor.backend_name == "local_process"
    assert executor.supports_inter_replica_network is True


def test_a_callable_runs_and_its_results_are_in_rank_order(executor):
    handles = executor.launch_replicas(3, add, {"a": 10, "b": 100})
    assert [handle.rank for handle in handles] == [0, 1, 2]
    rows = executor.collect(handles, timeout=LIMIT_S)
    assert [(row["rank"], row["status"], row["exit_code"], row["error"], row["result"]) for row in rows] == [
        (rank, "succeeded", 0, None, 110 + rank) for rank in range(3)
    ]


def test_the_store_may_be_a_path_object(jobs, tmp_path):
    (handle,) = (executor := LocalProcessExecutor(store=tmp_path / "runs")).launch_replicas(1, "jobs:echo")
    assert executor.collect([handle], timeout=LIMIT_S)[0]["status"] == "succeeded"
    assert handle.metadata["store"] == (tmp_path / "runs").as_uri()


@pytest.mark.parametrize("path", ["jobs:echo", "jobs.echo"])
def test_an_import_path_runs(executor, jobs, path):
    rows = executor.collect(executor.launch_replicas(1, path, {"x": [1, {"y": "é"}]}), timeout=LIMIT_S)
    assert rows[0]["result"]["args"] == {"x": [1, {"y": "é"}]}


def test_the_rank_variable_can_be_named(executor):
    handles = executor.launch_replicas(2, own_rank, {"name": "MY_RANK", "rank_env": "MY_RANK"})
    assert [row["result"] for row in executor.collect(handles, timeout=LIMIT_S)] == [
        {"MY_RANK": "0", "count": "2"},
        {"MY_RANK": "1", "count": "2"},
    ]


def test_large_results_do_not_deadlock_and_two_launches_are_not_confused(executor, jobs):
    big = executor.launch_replicas(2, "jobs:large", {"size": 3_000_000})
    small = executor.launch_replicas(2, "jobs:large", {"size": 3})
    rows = executor.collect([small[1], big[0], big[1], small[0]], timeout=LIMIT_S)
    assert [len(row["result"]) for row in rows] == [3, 3_000_000, 3_000_000, 3]


def test_handles_survive_json_and_another_process(executor, jobs):
    handles = executor.launch_replicas(2, "jobs:hang", {})
    text = json.dumps([dataclasses.asdict(handle) for handle in handles])
    code = (
        "import json, sys\nfrom atoll.serverless import *\n"
        "handles = [ReplicaHandle(**h) for h in json.loads(sys.argv[1])]\n"
        "there = LocalProcessExecutor()\n"
        "there.cancel(handles[0]); there.cancel(handles[1])\n"
        "print([there.poll(h) for h in handles])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, check=True)
    assert done.stdout == "['cancelled', 'cancelled']\n"
    assert [row["status"] for row in executor.collect(handles, timeout=LIMIT_S)] == ["cancelled", "cancelled"]


def test_failures_carry_exit_code_and_traceback(executor, jobs):
    (raised,) = executor.collect(executor.launch_replicas(1, "jobs:fail", {}), timeout=LIMIT_S)
    assert (raised["status"], raised["exit_code"]) == ("failed", 1)
    assert "ValueError: boom" in raised["error"]
    (left,) = executor.collect(executor.launch_replicas(1, "jobs:exit_with", {"code": 3}), timeout=LIMIT_S)
    assert (left["status"], left["exit_code"]) == ("failed", 3)


def test_the_timeout_is_enforced(executor, jobs):
    (row,) = executor.collect(executor.launch_replicas(1, "jobs:hang", {}, timeout=0.3), timeout=LIMIT_S)
    assert (row["status"], row["reason"]) == ("failed", "timeout")


def test_collect_past_its_deadline_says_what_is_still_running(executor, jobs):
    handles = executor.launch_replicas(1, "jobs:hang", {})
    (row,) = executor.collect(handles, timeout=0.2)
    assert row["status"] in ("pending", "running")
    assert row["error"]
    executor.cancel(handles[0])


def test_a_gpu_is_pinned_or_refused_and_never_ignored(executor, jobs, tmp_path, monkeypatch):
    with pytest.raises(Unsupported) as caught:
        executor.launch_replicas(1, "jobs:echo", {}, gpu="H100")
    assert caught.value.fields == ("gpu",)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU-7, NVIDIA H100 80GB HBM3'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.warns(UserWarning, match="CUDA_VISIBLE_DEVICES"):
        handles = executor.launch_replicas(1, "jobs:environment", {"names": ["CUDA_VISIBLE_DEVICES"]}, gpu="H100")
    assert executor.collect(handles, timeout=LIMIT_S)[0]["result"] == {"CUDA_VISIBLE_DEVICES": "GPU-7"}


def test_logs_are_the_last_lines_and_only_lines(executor, jobs):
    handles = executor.launch_replicas(2, "jobs:echo", {})
    executor.collect(handles, timeout=LIMIT_S)
    assert executor.stream_logs(handles[1]) == "rank 1 of 2\n"
    assert executor.stream_logs(handles[1], n_lines=0) == ""


def test_a_handle_of_an_earlier_version_still_works(executor):
    (handle,) = executor.launch_replicas(1, "jobs:echo", {"x": 1}, timeout=60)
    earlier = ReplicaHandle(handle.rank, "local", handle.metadata)
    assert [row["status"] for row in executor.collect([earlier])] == ["succeeded"]


def test_a_foreign_or_broken_handle_is_refused(executor):
    with pytest.raises(ConfigError, match="`modal`"):
        executor.poll(ReplicaHandle(0, "modal", {}))
    with pytest.raises(ConfigError, match="run_id, run, store"):
        executor.poll(ReplicaHandle(0, "local_process", {}))


def test_arguments_that_do_not_fit_are_refused_before_anything_starts(executor):
    with pytest.raises(ConfigError, match="`c`"):
        executor.launch_replicas(1, add, {"a": 1, "b": 2, "c": 3})
    with pytest.raises(ConfigError, match="lambda"):
        executor.launch_replicas(1, lambda: 1, {})
    with pytest.raises(ConfigError, match="gpu=`7`"):
        executor.launch_replicas(1, add, {"a": 1, "b": 2}, gpu=7)
    with pytest.raises(ConfigError) as caught:
        executor.launch_replicas(1, add, [1])
    assert caught.value.reason == "entrypoint_args"
