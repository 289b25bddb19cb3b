"""The environment, written and read."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from atoll.context import ReplicaContext, RunContext, rank_environment
from atoll.errors import ConfigError, InvalidSpec


def test_what_the_launcher_writes_the_replica_reads():
    environ = RunContext("r", "s3://b/p").environment(4) | rank_environment(2, "MY_RANK")
    context = ReplicaContext.from_environment(environ, {"lr": 1})
    assert (context.run_id, context.rank, context.world_size, context.store_uri) == ("r", 2, 4, "s3://b/p")
    assert context.args == {"lr": 1}
    assert environ["MY_RANK"] == "2"


def test_everything_that_is_missing_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        ReplicaContext.from_environment({"REPLICA_RANK": "x"})
    for name in ("REPLICA_RANK", "WORLD_SIZE", "ATOLL_RUN_ID", "ATOLL_STORE"):
        assert name in str(caught.value)
    assert "`atoll run" in (caught.value.hint or "")


def test_a_rank_beyond_the_world_is_refused():
    environ = {"REPLICA_RANK": "4", "WORLD_SIZE": "4", "ATOLL_RUN_ID": "r", "RENDEZVOUS_URI": "file:///x"}
    with pytest.raises(ConfigError, match=r"REPLICA_RANK=4.*WORLD_SIZE=4"):
        ReplicaContext.from_environment(environ)


def test_a_path_object_is_an_address(tmp_path):
    context = ReplicaContext("r", 0, 1, tmp_path)  # type: ignore[arg-type]
    assert context.store_uri == context.store.uri == tmp_path.as_uri()


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"loss": "x"}, "loss='x'"),
        ({"loss": None}, "loss=None"),
        ({"loss": [1.0, 2.0]}, "loss=[1.0, 2.0]"),
        ({"loss": np.ones(2)}, "loss=ndarray(…)"),
        ({"loss": torch.ones(2)}, "loss=Tensor(…)"),
        ({"loss": torch.ones(1, device="meta")}, "loss=Tensor(…)"),
        ({"loss": 10**400}, "loss=1000"),
        ({"round_no": "x"}, "round_no='x'"),
        ({"round_no": -1}, "round_no=-1"),
    ],
)
@pytest.mark.parametrize("is_run", [True, False])
def test_a_metric_that_is_no_number_is_named(tmp_path, metrics, words, is_run):
    context = ReplicaContext("r", 0, 1, "memory://x", spool=str(tmp_path) if is_run else None)
    with pytest.raises(InvalidSpec) as caught:
        context.log(**metrics)
    assert caught.value.problems[0].startswith(words)
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_and_torch_are_logged_as_numbers(tmp_path):
    context = ReplicaContext("r", 0, 1, "memory://x", spool=str(tmp_path))
    context.log(round_no=np.int64(3), loss=torch.tensor(0.5), norm=np.float32(2.0), share=torch.ones(1))  # type: ignore[arg-type]
    told = json.loads((tmp_path / "progress.json").read_text())
    assert told == {"round_no": 3, "metrics": {"loss": 0.5, "norm": 2.0, "share": 1.0}}


def test_a_loss_with_a_gradient_is_logged_without_a_warning(tmp_path):
    context = ReplicaContext("r", 0, 1, "memory://x", spool=str(tmp_path))
    context.log(loss=torch.tensor(0.5, requires_grad=True))  # type: ignore[arg-type]
    assert json.loads((tmp_path / "progress.json").read_text())["metrics"] == {"loss": 0.5}


def test_log_outside_a_run_is_quiet():
    context = ReplicaContext("r", 0, 1, "memory://log-outside")
    context.log(loss=1.0)
    assert list(context.store.list()) == []
