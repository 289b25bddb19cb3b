"""Requests to stop in the store: what the uploader finds for its supervisor, and reports once."""

from __future__ import annotations

import pytest

from atoll import journal
from atoll.keys import RunKeys
from atoll.replica.rank_process import StopReason
from atoll.replica.stops import StopLooks
from atoll.stores.memory import MemoryStore


@pytest.mark.parametrize("ranks", [[3], [2, 3, 4]])
@pytest.mark.parametrize("launch", [1, 2])
def test_a_request_to_stop_is_found_once(ranks, launch):
    store = MemoryStore()
    looks = StopLooks({"run_id": "r", "store": "memory://", "ranks": ranks, "launch": launch})
    looks.note(3, 0)
    journal.record_stop(store, "r", 3, launch=3 - launch)
    assert looks.look(store) == {}, "that is another launch"
    assert not looks.are_due
    journal.record_stop(store, "r", 3, launch=launch)
    journal.record_stop(store, "r", 3, launch=launch)
    assert journal.read_stops(store, "r", launch=launch) == {3}
    assert looks.look(store) == {3: StopReason.CANCEL}
    assert looks.look(store) == {}


@pytest.mark.parametrize("is_claimed", [True, False])
def test_a_later_attempt_replaces_this_one_where_ranks_are_claimed(is_claimed):
    store, keys = MemoryStore(), RunKeys("r")
    looks = StopLooks({"run_id": "r", "store": "memory://", "ranks": [1], "is_claimed": is_claimed})
    store.create(keys.start(1, 1), b"{}")
    assert looks.look(store) == {}, "no attempt of this supervisor has started"
    looks.note(1, 1)
    assert looks.look(store) == {}, "that is its own attempt"
    store.create(keys.start(1, 2), b"{}")
    assert looks.look(store) == ({1: StopReason.REPLACED} if is_claimed else {})


def test_a_cancel_counts_more_than_a_replacement():
    store, keys = MemoryStore(), RunKeys("r")
    looks = StopLooks({"run_id": "r", "store": "memory://", "ranks": [0], "is_claimed": True})
    looks.note(0, 0)
    store.create(keys.start(0, 1), b"{}")
    journal.record_stop(store, "r", 0)
    assert looks.look(store) == {0: StopReason.CANCEL}
