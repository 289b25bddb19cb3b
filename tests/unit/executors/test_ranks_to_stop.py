"""Which ranks a cancel stops, decided before any call to a backend."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cli.commands.backends import _abilities
from atoll.errors import ConfigError, InvalidSpec
from atoll.executors.base import ranks_to_stop
from atoll.executors.local.executor import LocalExecutor
from atoll.handle import RunHandle
from atoll.testing.scripted.executor import ScriptedGroupExecutor

HANDLE = RunHandle("local", "here", "run", 4)
GROUP = ScriptedGroupExecutor(endpoint="127.0.0.1:1")


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [(None, [0, 1, 2, 3]), ([2], [2]), ((3, 1, 3), [1, 3]), ({2, 0}, [0, 2]), (range(4), [0, 1, 2, 3])],
)
def test_the_ranks_are_in_order_and_each_is_there_once(ranks: Any, chosen: list[int]) -> None:
    assert ranks_to_stop(LocalExecutor(), HANDLE, ranks) == chosen


@pytest.mark.parametrize("ranks", [[], (), [4], [-1], [0, 4], [None], ["0"], [0.0], [False], "0", b"0", 0, {"0": 1}])
def test_anything_else_is_refused(ranks: Any) -> None:
    for executor in (LocalExecutor(), GROUP):
        with pytest.raises(InvalidSpec) as caught:
            ranks_to_stop(executor, HANDLE, ranks)
        assert caught.value.fields == ("ranks",)


def test_a_backend_that_stops_all_together_takes_all_ranks_or_none() -> None:
    assert ranks_to_stop(GROUP, HANDLE, None) == ranks_to_stop(GROUP, HANDLE, [3, 2, 1, 0]) == [0, 1, 2, 3]
    with pytest.raises(ConfigError) as caught:
        ranks_to_stop(GROUP, HANDLE, [0, 1, 2])
    assert caught.value.reason == "cancels_together"
    assert "--rank" in str(caught.value.hint)


def test_the_list_of_backends_says_which_stop_all_together() -> None:
    said = "all replicas of a run stop together"
    assert said in list(_abilities(GROUP.capabilities))
    assert said not in list(_abilities(LocalExecutor.capabilities))
