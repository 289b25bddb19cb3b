"""Real processes, real SIGKILL: a run with deaths in it ends with the bits of one without."""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll
from atoll.registry import open_store
from atoll.rounds.verify import verify

pytestmark = pytest.mark.process

ROUNDS = 10
POINTS = {
    "0": [
        ["put", "*/rounds/0000000001/update/*", 1],  # before publishing, and before the first checkpoint
        ["get", "*/commits/0000000004.json", 2],  # published, waiting for the commit
        ["delete", "*/sync/rounds/*", 2],  # in the middle of tidying up
    ],
    "1": [
        ["put", "*/rounds/0000000002/update/*", 2],  # in the middle of publishing
        ["get", "*/rounds/0000000005/mean/*", 1],  # committed, own chunks of the mean are done
        ["put", "*/checkpoints/00001/0000000008", 1],  # applied, not saved
    ],
    "2": [
        ["create", "*/rounds/0000000003/offer/*", 1],  # all chunks are there, nobody knows
        ["put", "*/acks/00002.json", 1],  # saved, not said
    ],
}
"""For each rank, what its first attempts die of."""


@pytest.fixture
def diloco_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "diloco_jobs.py").write_text(Path(__file__).with_name("diloco_jobs.py").read_text())
    monkeypatch.chdir(folder)


def launched(entry: str, store: str, replicas: int, **options) -> list[dict]:
    run = atoll.launch(f"diloco_jobs:{entry}", replicas=replicas, store=store, **options)
    try:
        run.wait(300.0)
    finally:
        run.cancel()
    return list(run.result().raise_for_failures().values)


STREAMS = {
    "blocking-bf16": {"codec": "bf16"},
    "fragments-int4": {"codec": "int4", "inner_steps": 6, "fragments": 2, "delay": 2},
    "eager-int8": {"codec": "int8", "inner_steps": 3, "eager": True},
}


@pytest.mark.slow
@pytest.mark.usefixtures("diloco_jobs")
@pytest.mark.parametrize("stream", STREAMS)
def test_killed_at_every_step_of_the_protocol_a_replica_comes_back_with_the_same_bits(store, stream):
    args = {"rounds": ROUNDS, "stream": STREAMS[stream]}
    expected = launched("train", store, 3, args=args, run_id="calm")
    found = launched("train", store, 3, args={**args, "points": POINTS}, run_id="stormy", max_restarts=3)
    assert [one.pop("attempt") for one in expected] == [0, 0, 0]
    assert [one.pop("attempt") for one in found] == [3, 3, 2]
    assert found == expected
    assert len({one["weights"] for one in found}) == 1
    assert len({one["moments"] for one in found}) == 3
    report = verify(open_store(store), "stormy")
    assert report.is_right, report.difference


@pytest.mark.slow
@pytest.mark.usefixtures("diloco_jobs")
@pytest.mark.parametrize("stream", [{}, {"delay": 5}])
def test_forked_data_workers_do_not_disturb_the_rounds(store, stream):
    found = launched("train_with_workers", store, 2, args={"rounds": 14, "stream": stream})
    assert found[0]["digest"] == found[1]["digest"]
    assert all(one["steps"] == 140 and one["last"] < one["first"] for one in found)
