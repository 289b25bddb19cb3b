"""What only the local facade does; `test_protocol.py` has what all facades share."""

from __future__ import annotations

import os

import pytest

from atoll.errors import ConfigError, Unsupported
from atoll.serverless import LocalProcessExecutor

pytestmark = pytest.mark.process

LIMIT_S = 60.0


def add(a, b):
    return a + b + int(os.environ["REPLICA_RANK"])


@pytest.fixture
def executor(store):
    return LocalProcessExecutor(store=store)


def test_a_function_of_the_callers_own_script_runs(executor):
    rows = executor.collect(executor.launch_replicas(2, add, {"a": 10, "b": 100}), timeout=LIMIT_S)
    assert [row["result"] for row in rows] == [110, 111]


def test_the_store_may_be_a_path_object(jobs, tmp_path):
    (handle,) = (executor := LocalProcessExecutor(store=tmp_path / "runs")).launch_replicas(1, "jobs:echo")
    assert executor.collect([handle], timeout=LIMIT_S)[0]["status"] == "succeeded"
    assert handle.metadata["store"] == (tmp_path / "runs").as_uri()
    assert executor.stream_logs(handle) == "rank 0 of 1\n"
    assert executor.stream_logs(handle, n_lines=0) == ""


def test_large_results_do_not_deadlock(executor, jobs):
    rows = executor.collect(executor.launch_replicas(2, "jobs:large", {"size": 3_000_000}), timeout=LIMIT_S)
    assert [len(row["result"]) for row in rows] == [3_000_000, 3_000_000]


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


def test_arguments_that_do_not_fit_the_function_are_refused_before_anything_starts(executor):
    with pytest.raises(ConfigError, match="`c`"):
        executor.launch_replicas(1, add, {"a": 1, "b": 2, "c": 3})
    with pytest.raises(ConfigError, match="lambda"):
        executor.launch_replicas(1, lambda: 1, {})
