"""The environment, written and read."""

from __future__ import annotations

import pytest

from atoll.context import ReplicaContext, RunContext, rank_environment
from atoll.errors import ConfigError


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
    assert "atoll run" in (caught.value.hint or "")


def test_a_rank_beyond_the_world_is_refused():
    environ = {"REPLICA_RANK": "4", "WORLD_SIZE": "4", "ATOLL_RUN_ID": "r", "RENDEZVOUS_URI": "file:///x"}
    with pytest.raises(ConfigError, match="not below"):
        ReplicaContext.from_environment(environ)


def test_log_outside_a_run_is_quiet():
    ReplicaContext("r", 0, 1, "memory://x").log(loss=1.0)
