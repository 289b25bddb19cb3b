"""Real processes, real SIGKILL: a run with deaths in it ends with the bits of one without.

Most replicas are forked from a process that has torch loaded: loading it takes longer than all they do here. One test
launches its replicas, and their supervisors start the killed ones again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from offspring import Nursery, nursery_in, run_with_restarts

import atoll
from atoll.registry import open_store
from atoll.rounds.verify import verify

pytestmark = [pytest.mark.process, pytest.mark.slow]

REPLICAS, ROUNDS = 3, 10
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


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with nursery_in(tmp_path_factory.mktemp("nursery"), "diloco_jobs", "torch._dynamo") as made:
            yield made


def forked(nursery: Nursery, entry: str, store: str, replicas: int, run_id: str, **arguments) -> list[dict]:
    common = {"job": entry, "store": store, "run_id": run_id, "world_size": replicas, "arguments": arguments}
    ranks = [{**common, "rank": rank} for rank in range(replicas)]
    try:
        return [child.value for child in run_with_restarts(nursery, "diloco_jobs:forked", ranks)]
    finally:
        nursery.end_children()


STREAMS = {
    "blocking-bf16": {"codec": "bf16"},
    "fragments-int4": {"codec": "int4", "inner_steps": 6, "fragments": 2, "delay": 2},
    "eager-int8": {"codec": "int8", "inner_steps": 3, "eager": True},
}


@pytest.mark.parametrize("stream", STREAMS)
def test_killed_at_every_step_of_the_protocol_a_replica_comes_back_with_the_same_bits(store, stream, forking):
    args = {"rounds": ROUNDS, "stream": STREAMS[stream]}
    expected = forked(forking, "train", store, REPLICAS, "calm", **args)
    found = forked(forking, "train", store, REPLICAS, "stormy", **args, points=POINTS)
    assert_same_outcome(store, expected, found, attempts=[3, 3, 2])


@pytest.mark.usefixtures("diloco_jobs")
def test_replicas_that_their_supervisors_start_again_have_the_same_bits_too(store, forking):
    args = {"rounds": 5, "stream": STREAMS["blocking-bf16"]}
    expected = forked(forking, "train", store, REPLICAS, "calm", **args)
    args["points"] = {rank: points[:1] for rank, points in POINTS.items()}
    found = launched("train", store, REPLICAS, args=args, run_id="stormy", max_restarts=1)
    assert_same_outcome(store, expected, found, attempts=[1, 1, 1])


def assert_same_outcome(store: str, expected: list[dict], found: list[dict], *, attempts: list[int]) -> None:
    assert [one.pop("attempt") for one in expected] == [0, 0, 0]
    assert [one.pop("attempt") for one in found] == attempts
    assert found == expected
    assert len({one["weights"] for one in found}) == 1
    assert len({one["moments"] for one in found}) == 3
    report = verify(open_store(store), "stormy")
    assert report.is_right, report.difference


def test_forked_data_workers_do_not_disturb_the_rounds(store, forking):
    found = forked(forking, "train_with_workers", store, 2, "run", rounds=14, stream={})
    assert_trained(found)


@pytest.mark.usefixtures("diloco_jobs")
def test_forked_data_workers_do_not_disturb_rounds_in_the_background(store):
    found = launched("train_with_workers", store, 2, args={"rounds": 14, "stream": {"delay": 5}})
    assert_trained(found)


def assert_trained(found: list[dict]) -> None:
    assert found[0]["digest"] == found[1]["digest"]
    assert all(one["steps"] == 140 and one["last"] < one["first"] for one in found)
