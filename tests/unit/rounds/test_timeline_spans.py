"""Intervals: union, length, what is left uncovered, and fewer of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.rounds.timeline import Track, length, limited, uncovered, union

ticks = st.integers(0, 60)
spans = st.lists(st.tuples(ticks, ticks).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=12)


def covered(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit steps that lie inside."""
    return {tick for began, ended in intervals for tick in range(int(began), int(ended))}


@given(spans)
def test_a_union_covers_the_same_time_in_order_and_apart(some):
    joined = union(some)
    assert covered(joined) == covered(some)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(joined))
    assert length(some) == len(covered(some))


@given(spans, spans)
def test_what_is_uncovered_is_the_difference(some, cover):
    left = uncovered(some, cover)
    assert covered(left) == covered(some) - covered(cover)
    assert length(left) == sum(ended - began for began, ended in left)


@given(spans, st.integers(1, 5))
def test_fewer_intervals_cover_all_of_it_and_close_the_shortest_gaps(some, most):
    fewer, joined = limited(some, most), union(some)
    assert len(fewer) <= most
    assert covered(fewer) >= covered(some)
    gaps = sorted((b[0] - a[1] for a, b in itertools.pairwise(joined)), reverse=True)
    assert length(fewer) == pytest.approx(length(some) + sum(gaps[most - 1 :]))


def test_a_track_stays_small_and_counts_everything():
    track = Track()
    for number in range(10_000):
        track.add(float(number), number + 0.5)
    assert track.count == 10_000
    assert track.busy_s == pytest.approx(5_000)
    assert len(track.spans) < 2_048
    assert (track.spans[0][0], track.spans[-1][1]) == (0.0, 9_999.5)
