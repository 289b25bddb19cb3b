"""What a launch records for machines that join, and what it refuses."""

from __future__ import annotations

import pytest

from atoll.context import RunContext
from atoll.errors import ConfigError, Unsupported
from atoll.executors.join.executor import JoinExecutor
from atoll.executors.join.request import context_of
from atoll.handle import RunHandle
from atoll.spec import Placement

S3 = "s3://bucket/exp"


def test_what_belongs_to_the_machines_is_refused_in_one_error():
    placement = Placement(gpu="H100", image="x", cpus=2, memory_gib=4)  # type: ignore[arg-type]
    with pytest.raises(Unsupported) as caught:
        JoinExecutor().plan(RunContext("exp", "memory://x"), placement)
    assert sorted(caught.value.fields) == ["cpus", "gpu", "image", "memory_gib", "store"]
    assert any(problem.startswith("gpu=`H100:1`: ") for problem in caught.value.problems)


def test_the_plan_has_the_line_to_paste():
    plan = JoinExecutor().plan(RunContext("a run", S3), Placement(replicas=3))
    assert f"`atoll join 'a run' --store {S3}`" in plan.notes[0]


@pytest.mark.parametrize(("launch", "first"), [(1, 0), (2, 3)])
def test_a_handle_names_store_launch_run_and_first_rank(launch, first):
    context = RunContext("exp", S3, launch, first, 5)
    executor = JoinExecutor()
    handle = RunHandle.parse(str(executor.handle(executor.plan(context, Placement(replicas=2)))))
    assert (handle.replicas, handle.first_rank) == (2, first)
    found = context_of(handle)
    assert (found.run_id, found.store_uri, found.launch, found.first_rank) == ("exp", S3, launch, first)


def test_another_handle_is_refused():
    with pytest.raises(ConfigError):
        JoinExecutor().status(RunHandle("join", "machines", "exp", 1))
