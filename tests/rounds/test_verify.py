from __future__ import annotations

import re

import numpy as np
import pytest
from rounds_training import LAYOUT, train

from atoll.errors import RoundError, RunNotFound
from atoll.rounds.chunks import MeanName
from atoll.rounds.contributions import Participants
from atoll.rounds.keys import RoundKeys, RunKeys
from atoll.rounds.records import Commit
from atoll.rounds.tuning import Grid
from atoll.rounds.verify import verify
from atoll.stores.memory import MemoryStore

KEYS = RoundKeys("run")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_honest_run_verifies_from_its_first_round(count: int) -> None:
    store = MemoryStore()
    train(store, count, 4)
    report = verify(store, "run")
    assert report.difference is None
    assert report.is_right
    assert (report.first_round, report.rounds, report.updates) == (0, 4, 4 * count)
    assert report.states == 4
    assert report.means + report.trusted == (4 * 8 if count > 2 else 0)
    assert report.means >= (8 if count > 2 else 0), "in the first round nobody knows whom to expect"
    assert not report.notes


def test_a_run_whose_first_rounds_are_gone_verifies_from_its_snapshot() -> None:
    store = MemoryStore()
    train(store, 2, 9, snapshot_every=2)
    report = verify(store, "run")
    assert report.difference is None
    assert report.first_round >= 4
    assert report.rounds == 9 - report.first_round
    assert report.states >= report.rounds


@pytest.mark.parametrize(("round_no", "found"), [(0, "round 0, .*2"), (1, "round 2")])
def test_a_mean_that_is_not_the_mean_is_found(round_no: int, found: str) -> None:
    """In round 0 every part of it is in the store; in round 1 its owner kept one, and the states give it away."""
    store = MemoryStore()
    train(store, 3, 3)
    grid, party = Grid(LAYOUT.size, 4096), Participants.of_commit(Commit.open(store.get(KEYS.commit(round_no)))).id
    name = MeanName("run", round_no, 0, party, LAYOUT.hash, "bf16", grid, 2)
    parts = name.open(store.get(KEYS.mean(round_no, party, 2))).parts
    forged = np.zeros(grid.count(2), np.uint16)
    store.put(KEYS.mean(round_no, party, 2), name.seal(parts, [forged.data.cast("B")]))
    report = verify(store, "run")
    assert report.difference is not None
    assert re.search(found, report.difference)


def test_an_update_that_was_changed_is_found() -> None:
    store = MemoryStore()
    train(store, 2, 3)
    key = KEYS.update(2, 1, 0, 3)
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))
    report = verify(store, "run")
    assert report.difference is not None
    assert report.rounds == 2


def test_a_history_with_a_hole_or_a_swapped_commit_is_found() -> None:
    store = MemoryStore()
    train(store, 1, 4)
    saved = bytes(store.get(KEYS.commit(2)))
    store.delete(KEYS.commit(2))
    assert "round 2" in (verify(store, "run").difference or "")
    commit = Commit.open(saved)
    forged = Commit(
        "run", 2, 0, "0" * 32, commit.base, commit.mode, commit.contributions, members=commit.members, by=commit.by
    )  # fmt: skip
    store.put(KEYS.commit(2), forged.seal())
    report = verify(store, "run")
    assert report.difference
    assert report.rounds == 2, "the rounds before the swapped commit were compared"


def test_a_snapshot_that_is_not_the_state_is_found() -> None:
    store = MemoryStore()
    train(store, 1, 3, snapshot_every=2)
    from atoll.rounds.blobs import describe
    from atoll.rounds.records import Snapshot

    record = Snapshot.open(store.get(KEYS.snapshot(2)))
    wrong = [b"\0" * size for _, size in record.sections]
    blob = describe(2, wrong)
    store.put(KEYS.blob(2, blob.digest, 0), b"".join(wrong))
    forged = Snapshot(record.run_id, 2, record.previous, record.sections, blob, record.meta)
    store.put(KEYS.snapshot(2), forged.seal())
    assert re.search(r"`values`.*round 2", verify(store, "run").difference or "")


def test_a_run_nobody_joined_is_said_to_be_that() -> None:
    store = MemoryStore()
    with pytest.raises(RunNotFound, match="`nobody`"):
        verify(store, "nobody")
    store.put("runs/nobody/run.json", b"{}")
    with pytest.raises(RoundError) as caught:
        verify(store, "nobody")
    assert caught.value.reason == "not_joined_yet"
    store.put(RunKeys("nobody").outcome(0, 0), b"{}")
    with pytest.raises(RoundError) as caught:
        verify(store, "nobody")
    assert caught.value.reason == "never_joined"
