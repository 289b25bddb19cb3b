"""Connections and chunks follow from how far the store is."""

from __future__ import annotations

import pytest

from atoll.rounds.tuning import AT_ONCE_S, CLOSE_S, NEAR_S, good_chunk, good_connections

HERE, NEAR, CLOSE, FAR = AT_ONCE_S / 2, (AT_ONCE_S + NEAR_S) / 2, (NEAR_S + CLOSE_S) / 2, 0.1


def chunks(trip_s: float, mib: int, replicas: int) -> int:
    size = mib << 18
    return -(-size // good_chunk(trip_s, size, replicas))


def test_a_store_that_is_farther_gets_more_connections():
    found = [good_connections(trip_s, replicas=2) for trip_s in (HERE, NEAR, CLOSE, FAR)]
    assert found == sorted(found)
    assert found[1:] == [4, 16, 48]


def test_what_our_own_processors_do_is_not_done_by_more_threads_than_processors(monkeypatch):
    monkeypatch.setattr("atoll.rounds.tuning._cores", lambda: 3)
    assert good_connections(HERE, replicas=64) == 3
    monkeypatch.setattr("atoll.rounds.tuning._cores", lambda: 1)
    assert good_connections(HERE, replicas=64) == 2


@pytest.mark.parametrize(("replicas", "wanted"), [(2, 16), (30, 30), (1000, 48)])
def test_everybodys_part_of_a_chunk_is_asked_for_at_once_up_to_a_limit(replicas, wanted):
    assert good_connections(CLOSE, replicas) == wanted


@pytest.mark.parametrize(("trip_s", "replicas", "wanted"), [(NEAR, 2, 4), (NEAR, 8, 8), (NEAR, 99, 16), (FAR, 2, 16)])
def test_a_near_store_gets_few_chunks_but_one_for_every_replica(trip_s, replicas, wanted):
    assert chunks(trip_s, 64, replicas) == wanted


@pytest.mark.parametrize("trip_s", [HERE, NEAR, CLOSE, FAR])
def test_many_chunks_of_a_large_update_are_in_memory_at_once(trip_s):
    assert 4 * good_chunk(trip_s, 512 << 18, 2) == 16 << 20
