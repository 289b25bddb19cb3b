"""`atoll trace`: from the store to a file that Perfetto opens."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import numpy as np
import pytest
from rounds_of_a_run import SIZE, hold_rounds, joined, store_at

from trace_format import check_trace


@pytest.fixture
def place(tmp_path):
    store = store_at(tmp_path / "store")
    hold_rounds(store, "r1", ranks=3, rounds=4)
    return store


def test_a_run_that_is_over_becomes_a_trace(inside, place):
    done = inside("trace", "r1", "--store", place.uri)
    assert done.code == 0, done.stderr
    assert done.stdout == "r1.trace.json\n"
    assert "ui.perfetto.dev" in done.stderr
    drawn = check_trace(json.loads(Path("r1.trace.json").read_text()))
    rounds = {(e["pid"], e["name"]) for e in drawn if e.get("cat") == "round"}
    assert rounds == {(rank, f"round {no}") for rank in range(3) for no in range(4)}
    phases = {e["name"] for e in drawn if e["ph"] == "X"}
    assert phases >= {"compute", "encode", "put", "get"}
    commits = [e["name"] for e in drawn if e["ph"] == "i" and e["s"] == "g"]
    assert sorted(commits) == [f"round_committed {no}" for no in range(4)]


def test_the_rounds_a_person_asks_for_and_where_they_go(inside, place):
    done = inside("trace", "r1", "--store", place.uri, "--out", "t.json.gz", "--last", 1, "--json")
    assert done.data["file"] == "t.json.gz"
    assert (done.data["ranks"], done.data["last_round"]) == ([0, 1, 2], 3)
    assert done.data["first_round"] == 3
    drawn = check_trace(json.loads(gzip.decompress(Path("t.json.gz").read_bytes())))
    rounds = {(e["pid"], e["name"]) for e in drawn if e.get("cat") == "round"}
    assert rounds == {(rank, "round 3") for rank in range(3)}
    assert [e["name"] for e in drawn if e["ph"] == "i" and e["s"] == "g"] == ["round_committed 3"]
    left = [e["args"] for e in drawn if e["name"] == "left"]
    assert sorted(args["by"] for args in left) == [0, 1, 2]
    assert all("round" not in args for args in left), "it belongs to none"
    shown = inside("trace", "r1", "--store", place.uri, "-o", "-")
    check_trace(json.loads(shown.stdout))


def test_there_is_a_trace_while_the_run_goes_on(inside, tmp_path):
    store, update = store_at(tmp_path / "store"), np.ones(SIZE, np.float32)
    with joined(store, "r2", 0, 1) as client:
        client.exchange(0, update, weight=1.0)
        client.mark("apply", time.monotonic())
        client.exchange(1, update, weight=1.0)
        data = inside("trace", "r2", "--store", store.uri, "--json").data
    assert (data["ranks"], data["first_round"], data["last_round"]) == ([0], 0, 0)


def test_nothing_to_show_is_said_clearly(inside, tmp_path):
    store = store_at(tmp_path / "store")
    missing = inside("trace", "nope", "--store", store.uri)
    assert missing.code == 3
    assert "`nope`" in missing.stderr
    with joined(store, "early", 0, 1):
        early = inside("trace", "early", "--store", store.uri)
    assert early.code == 5
    assert "`early`" in early.stderr
    assert "hint: " in early.stderr


def test_a_run_that_has_ended_without_rounds_is_not_to_be_tried_again(finished, inside):
    done = inside.at(finished.cli)("trace", finished.ok, "--json")
    assert done.code == 5
    assert done.error["code"] == "RoundError"
    assert "`DiLoCo`" in done.error["hint"]
    assert "later" not in done.error["hint"]


def test_a_place_that_cannot_be_written_is_a_mistake_of_ours_to_name(inside, place):
    done = inside("trace", "r1", "--store", place.uri, "--out", "no/such/folder/t.json")
    assert done.code == 2
    assert "--out" in done.stderr
    assert inside("trace", "r1", "--store", place.uri, "--out", "-", "--json").code == 2


def test_a_spoilt_segment_does_not_spoil_the_rest(inside, place):
    for key in list(place.list("runs/r1/sync/metrics/00001")):
        place.put(key, b"{\n[1]\n" + json.dumps({"round": 1}).encode() + b"\n")
    done = inside("trace", "r1", "--store", place.uri, "--json")
    assert done.code == 0
    assert done.data["ranks"] == [0, 2]
