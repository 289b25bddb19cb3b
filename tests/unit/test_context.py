"""The environment, written and read."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from atoll.context import ReplicaContext, RunContext, global_rank, index_environment, rank_environment
from atoll.errors import ConfigError, InvalidSpec
from atoll.handle import RunHandle


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
        ({"rounds_total": 0}, "rounds_total=0"),
        ({"rounds_total": 2.5}, "rounds_total=2.5"),
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


def test_the_pace_is_the_median_of_the_last_rounds(tmp_path, monkeypatch):
    """One slow round and a jump after a restart change it little."""
    context, now = ReplicaContext("r", 0, 1, "memory://x", spool=str(tmp_path)), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: 1000.0 + now[0])
    reported = []
    for at, round_no in ((0.0, 5), (10.0, 6), (15.0, 6), (100.0, 7), (110.0, 8), (130.0, 10)):
        now[0] = at
        context.log(round_no=round_no, rounds_total=40)
        told = json.loads((tmp_path / "progress.json").read_text())
        assert (told["round_no"], told["rounds_total"]) == (round_no, 40)
        reported.append((told.get("round_s"), told.get("round_at")))
    assert reported[0] == (None, None)
    assert reported[1] == reported[2] == (10.0, 1010.0)
    assert reported[-1] == (10.0, 1130.0)


def test_a_round_without_a_total_has_no_pace(tmp_path):
    context = ReplicaContext("r", 0, 1, "memory://x", spool=str(tmp_path))
    context.log(round_no=1)
    context.log(round_no=2)
    assert json.loads((tmp_path / "progress.json").read_text()) == {"round_no": 2, "metrics": {}}


@pytest.mark.parametrize(("number", "is_raised"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, True)])
def test_a_report_that_does_not_fit_on_the_disk_does_not_end_training(tmp_path, monkeypatch, number, is_raised):
    context = ReplicaContext("r", 0, 1, "memory://x", spool=str(tmp_path))

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("json.dump", fail)
    with pytest.raises(OSError, match=r"\[Errno") if is_raised else nullcontext():
        context.log(loss=1.0)
    assert is_raised or list(tmp_path.iterdir()) == []


def test_log_outside_a_run_is_quiet():
    context = ReplicaContext("r", 0, 1, "memory://log-outside")
    context.log(loss=1.0)
    assert list(context.store.list()) == []


def test_a_part_has_the_ranks_and_the_size_of_the_whole_run() -> None:
    part = RunContext("exp", "s3://bucket", first_rank=2, world_size=5)
    assert list(part.ranks(3)) == [2, 3, 4]
    variables = part.environment(3)
    assert (variables["WORLD_SIZE"], variables["ATOLL_PART"]) == ("5", "2:3")
    assert RunContext.from_variables(variables) == (part, 3)
    whole = RunContext("exp", "s3://bucket", launch=2)
    assert "ATOLL_PART" not in whole.environment(3)
    assert RunContext.from_variables(whole.environment(3)) == (whole, 3)
    assert RunContext.from_variables({}) is None


def test_the_native_names_of_parts_and_launches_are_distinct() -> None:
    contexts = [RunContext("a" * 128, "s3://b", launch, first) for launch in (1, 2) for first in (0, 3, 12)]
    names = {context.native_name(limit=40, reserve=5) for context in contexts}
    assert len(names) == 6
    assert max(map(len, names)) <= 35


def test_a_container_of_a_later_part_adds_its_first_rank_once() -> None:
    part = RunContext("exp", "s3://bucket", first_rank=2, world_size=5)
    environ = {"REPLICA_RANK": "1", "INDEX": "1", **index_environment(part, "INDEX")}
    global_rank(environ)
    assert environ == {"REPLICA_RANK": "3", "INDEX": "3"}
    global_rank(environ)
    assert environ == {"REPLICA_RANK": "3", "INDEX": "3"}
    assert index_environment(RunContext("exp", "s3://bucket"), "INDEX") == {}


def test_a_first_rank_without_a_rank_is_refused() -> None:
    with pytest.raises(ConfigError):
        global_rank({"ATOLL_FIRST_RANK": "2", "REPLICA_RANK": "x"})


def test_a_handle_of_a_later_part_says_its_first_rank() -> None:
    handle = RunHandle("modal", "main/atoll", "s3://bucket/1/exp", 2, first_rank=3)
    assert str(handle).endswith("?replicas=2&first=3")
    assert RunHandle.parse(str(handle)) == handle
    assert "first" not in str(RunHandle("local", "host", "tmp/exp", 2))
    with pytest.raises(ConfigError):
        RunHandle.parse("local://host/exp?replicas=2&first=-1")
