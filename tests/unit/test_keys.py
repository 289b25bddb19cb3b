from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import BadKey, InternalError
from atoll.keys import LogChunk, RankAttempt, RunKeys, bundle, index_key, index_prefix
from atoll.names import run_id_problem
from atoll.rounds.keys import RoundKeys
from atoll.stores.base import check_key

KEYS = RunKeys("exp-1")
whole = st.integers(min_value=0, max_value=10**12)

PARTY = "ab" * 8


def test_names_are_the_documented_ones() -> None:
    assert KEYS.run() == "runs/exp-1/run.json"
    assert KEYS.intent() == "runs/exp-1/launch/intent.json"
    assert KEYS.handle() == "runs/exp-1/launch/handle.json"
    assert KEYS.cancelled_rank(3) == "runs/exp-1/launch/cancelled/00003.json"
    assert RunKeys("exp-1", 2).cancelled_rank(3) == "runs/exp-1/launch/2/cancelled/00003.json"
    assert KEYS.outcome(3, 1) == "runs/exp-1/outcome/00003.001.json"
    assert KEYS.result(3, 1) == "runs/exp-1/result/00003.001.json"
    assert KEYS.beat(3) == "runs/exp-1/beat/00003.json"
    assert KEYS.log_chunk(3, 0, 4096, 17, 18) == "runs/exp-1/logs/00003/000/000000000004096-17-18"
    assert index_key("exp-1") == "index/exp-1"
    assert bundle("ab" * 32) == f"bundles/{'ab' * 32}.tar.gz"


@given(whole, whole, whole, whole, whole)
def test_log_chunks_parse_back(rank: int, attempt: int, offset: int, first: int, last: int) -> None:
    key = KEYS.log_chunk(rank, attempt, offset, first, last)
    assert KEYS.parse_log_chunk(key) == LogChunk(rank, attempt, offset, first, last)
    assert key.startswith(KEYS.log_prefix(rank, attempt))
    assert key.startswith(KEYS.log_prefix(rank))


@given(whole, whole)
def test_outcomes_parse_back(rank: int, attempt: int) -> None:
    key = KEYS.outcome(rank, attempt)
    assert KEYS.parse_outcome(key) == RankAttempt(rank, attempt)
    assert key.startswith(KEYS.outcomes_prefix())


@given(whole, st.integers(min_value=1, max_value=20))
def test_cancelled_ranks_parse_back(rank: int, launch: int) -> None:
    keys = RunKeys("exp-1", launch)
    key = keys.cancelled_rank(rank)
    assert keys.parse_cancelled_rank(key) == rank
    assert key.startswith(keys.cancelled_ranks_prefix())


def test_log_chunks_sort_by_offset() -> None:
    offsets = [0, 9, 10, 999, 10**9]
    assert sorted(KEYS.log_chunk(0, 0, o, 5, 6) for o in offsets) == [KEYS.log_chunk(0, 0, o, 5, 6) for o in offsets]


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_no_run_lies_inside_another(a: str, b: str) -> None:
    if run_id_problem(a) or run_id_problem(b) or a == b:
        return
    assert not RunKeys(a).run().startswith(RunKeys(b).prefix)
    assert index_key(a) != index_key(b)
    assert index_key(a).startswith(index_prefix())
    check_key(RunKeys(a).run())


def test_a_key_of_another_run_does_not_parse() -> None:
    with pytest.raises(BadKey, match="exp-2"):
        RunKeys("exp-2").parse_outcome(KEYS.outcome(0, 0))
    with pytest.raises(BadKey):
        KEYS.parse_log_chunk(KEYS.outcome(0, 0))


@pytest.mark.parametrize("bad", [-1, 1.0, True, "1"])
def test_only_whole_numbers_make_names(bad: object) -> None:
    with pytest.raises(InternalError):
        KEYS.beat(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["", "..", "a/b", "x" * 129])
def test_a_run_id_that_is_not_valid_makes_no_name(bad: str) -> None:
    with pytest.raises(BadKey):
        RunKeys(bad).run()


@pytest.mark.parametrize("bad", ["", "../x", "ABCDEF01", "zz" * 8])
def test_only_hex_digests_make_names(bad: str) -> None:
    with pytest.raises(InternalError):
        bundle(bad)


ROUNDS = RoundKeys("exp-1")


@given(whole, whole, whole)
def test_round_names_parse_back(round_no: int, rank: int, other: int) -> None:
    assert ROUNDS.parse_commit(ROUNDS.commit(round_no)) == round_no
    assert ROUNDS.parse_snapshot(ROUNDS.snapshot(round_no)) == round_no
    assert ROUNDS.parse_offer(ROUNDS.offer(round_no, rank, other)) == (round_no, rank, other)
    assert ROUNDS.parse_claim(ROUNDS.claim(rank, other)) == (rank, other, False)
    assert ROUNDS.parse_claim(ROUNDS.departure(rank, other)) == (rank, other, True)
    assert ROUNDS.parse_blob(ROUNDS.blob(round_no, "ab" * 16, other)) == (round_no, "ab" * 16)
    assert ROUNDS.parse_metrics(ROUNDS.metrics(rank, other, round_no)) == (rank, other, round_no)
    assert KEYS.parse_checkpoint(KEYS.checkpoint(rank, round_no)) == (rank, round_no)


def test_every_round_name_is_a_valid_key_of_its_run_and_none_equals_another() -> None:
    names = [
        ROUNDS.agreement(), ROUNDS.claim(1, 2), ROUNDS.departure(1, 2), ROUNDS.offer(1, 2, 3), ROUNDS.commit(1),
        ROUNDS.update(1, 2, 3, 4), ROUNDS.mean(1, PARTY, 2), ROUNDS.snapshot(1), ROUNDS.blob(1, PARTY, 2),
        ROUNDS.ack(1), ROUNDS.events(1, 2, 3), ROUNDS.metrics(1, 2, 3),
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    for name in names:
        assert check_key(name).startswith(ROUNDS.prefix)


def test_what_belongs_to_a_round_lies_under_it_and_records_do_not() -> None:
    under = ROUNDS.round_prefix(7)
    assert ROUNDS.offer(7, 0, 0).startswith(ROUNDS.offers_prefix(7))
    assert all(
        key.startswith(under) for key in (ROUNDS.offer(7, 0, 0), ROUNDS.update(7, 0, 0, 0), ROUNDS.mean(7, PARTY, 0))
    )
    assert not ROUNDS.commit(7).startswith(ROUNDS.rounds_prefix())


@pytest.mark.parametrize("stray", ["commits/x.json", "commits/1.txt", "other/1.json", "commits/\u0661.json"])
def test_a_stray_object_is_not_taken_for_a_commit(stray: str) -> None:
    with pytest.raises(BadKey):
        ROUNDS.parse_commit(ROUNDS.prefix + stray)
