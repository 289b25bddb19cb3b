"""`atoll verify` as a process of its own, over a run of real processes: honest, and with one byte changed."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from fnmatch import fnmatchcase

import pytest
from offspring import Nursery, Place

COUNT, ROUNDS = 3, 4
PATTERNS = (
    "*/rounds/0000000001/update/*",
    "*/rounds/0000000002/mean/*",
    "*/rounds/0000000003/offer/*",
    "*/commits/0000000002.json",
    "*/blobs/0000000003-*",
    "*/claims/00001.00000.json",
    "*/sync/agreement.json",
)


@pytest.fixture
def trained(place: Place, nursery: Nursery, run_id: str) -> str:
    common = {"uri": place.uri, "run_id": run_id, "world_size": COUNT, "rounds": ROUNDS, "snapshot_every": 3}
    for child in [nursery.start("real_replica:train", **common, rank=rank) for rank in range(COUNT)]:
        assert child.wait().value
    return run_id


def atoll_verify(place: Place, run_id: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atoll.cli.main", "verify", run_id, "--store", place.uri, "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def test_verify_says_what_it_checked_and_finds_every_byte_that_was_changed(place: Place, trained: str) -> None:
    done = atoll_verify(place, trained)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["data"]
    counted = ("run_id", "first_round", "rounds", "updates", "means", "trusted", "states", "records", "difference")
    assert tuple(found[name] for name in counted) == (trained, 0, 4, 12, 3, 9, 5, 6, None)
    for pattern in PATTERNS:
        key = next(key for key in place.store.list() if fnmatchcase(key, pattern))
        before = bytes(place.store.get(key))
        place.store.put(key, flipped(before))
        done = atoll_verify(place, trained)
        place.store.put(key, before)
        assert done.returncode == 5, (pattern, done.stdout, done.stderr)
        error = json.loads(done.stdout)["error"]
        assert f"`{trained}`" in error["message"]
        assert f"`{key}`" in error["message"]
    assert atoll_verify(place, trained).returncode == 0


def test_verify_of_a_run_that_is_not_there_says_so(place: Place) -> None:
    done = atoll_verify(place, f"none-{uuid.uuid4().hex}")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "RunNotFound"
