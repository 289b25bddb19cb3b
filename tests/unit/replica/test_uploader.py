"""The uploader in this process: heartbeats, and what it reports about full disks."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll import disk
from atoll.errors import StoreUnavailable
from atoll.keys import RunKeys
from atoll.replica.spool import Spool
from atoll.replica.uploader import Uploader, UploaderLink
from atoll.stores.memory import MemoryStore

PLAN = {"run_id": "r", "store": "file:///mnt/small%20disk?fsync=0", "label": "none"}


class FullStore(MemoryStore):
    """A store whose disk may be full, or without room for logs."""

    is_full = has_no_room_for_logs = False

    def create(self, key: str, data: Any) -> None:
        if self.has_no_room_for_logs and "/logs/" in key:
            error = StoreUnavailable(f"cannot create `{key}`", uri=self.uri, key=key)
            raise error from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().create(key, data)

    def put(self, key: str, data: Any) -> None:
        if self.is_full:
            error = StoreUnavailable(f"cannot write `{key}`", uri=self.uri, key=key)
            raise error from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().put(key, data)


class Bench:
    """An uploader of ranks 0 and 1 whose replies the link of a supervisor reads."""

    def __init__(self, root: Path) -> None:
        self.spool, self.store = Spool(root), FullStore()
        for rank in (0, 1):
            self.spool.attempt(rank, 0).root.mkdir(parents=True)
        assert self.spool.write_reserve() is None
        self.link = UploaderLink(self.spool, PLAN)
        replies, self._write_end = os.pipe()
        os.set_blocking(replies, False)
        self.link._from_uploader = replies
        self.uploader = Uploader(self.spool, PLAN, -1, self._write_end)
        self.uploader.__dict__["_store"] = self.store
        self.uploader._read_commands(b"started 0 0\nstarted 1 0\n")

    def problem(self) -> str:
        """One pass of the uploader, all heartbeats due; then what the supervisor knows."""
        self.uploader._look_at = 0.0
        for upload in self.uploader._uploads.values():
            upload._beat_at = -100.0
        self.uploader._upload_all()
        assert list(self.link.stored_ranks()) == []
        return self.link.problem

    def beat(self, rank: int = 0) -> dict[str, Any]:
        return json.loads(bytes(self.store.get(RunKeys("r").beat(rank))))  # type: ignore[no-any-return]

    def close(self) -> None:
        self.link.close()
        os.close(self._write_end)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "spool")
    yield made
    made.close()


def test_a_full_store_is_reported_until_a_heartbeat_fits(bench):
    assert bench.problem() == ""
    bench.store.is_full = True
    assert bench.problem() == "disk full: /mnt/small disk"
    assert bench.problem() == "disk full: /mnt/small disk"
    bench.store.is_full = False
    assert bench.problem() == ""


def test_a_full_spool_is_reported_and_is_in_the_heartbeat(bench, monkeypatch):
    text = f"disk full: {bench.spool.root}"
    monkeypatch.setattr(disk, "free_bytes", lambda _: 0)
    assert bench.problem() == text
    assert bench.beat()["problem"] == text
    monkeypatch.undo()
    assert bench.problem() == ""
    assert "problem" not in bench.beat()


def test_a_missing_reserve_means_that_the_disk_was_full_a_moment_ago(bench):
    bench.spool.reserve.unlink()
    assert bench.problem() == f"disk full: {bench.spool.root}"
    bench.spool.write_reserve()
    assert bench.problem() == ""


def test_the_outcome_is_stored_if_only_the_log_has_no_room(bench):
    """The replica has succeeded. A run without its outcome has failed."""
    bench.store.has_no_room_for_logs = True
    attempt = bench.spool.attempt(0, 0)
    attempt.log.write_text("a long log\n")
    attempt.outcome.write_text(json.dumps({"state": "succeeded"}))
    attempt.result.write_text("3")
    bench.link._waiting[0] = float("inf")
    bench.uploader._read_commands(b"ended 0 0\n")
    bench.uploader._upload_all()
    assert list(bench.link.stored_ranks()) == []  # the disk may have room soon
    bench.uploader._ended[0, 0] = 0.0
    bench.uploader._upload_all()
    ((rank, problem),) = bench.link.stored_ranks()
    assert rank == 0
    assert problem.startswith("the end of its log is not in the store: cannot create `runs/r/logs/")
    outcome = json.loads(bytes(bench.store.get(RunKeys("r").outcome(0, 0))))
    assert outcome["result"] == 3
    assert outcome["warnings"] == ["the end of the log is not in the store, whose disk was full"]


@pytest.mark.parametrize(
    ("log", "last_line", "is_open"),
    [
        (b"one\ntwo\n", "two", False),
        (b"one\n\x1b[32m 10%|#\r\x1b[32m 50%|##\x1b[0m", "50%|##", True),
        (b"one\n 50%|##\r", "50%|##", True),
        (b"one\r\n\r\n", "one", False),
        (b"one\ttwo\n\x1b[0m\n", "one two", False),
        (b"", "", False),
    ],
)
def test_the_last_line_is_what_a_terminal_shows(bench, log, last_line, is_open):
    bench.spool.attempt(0, 0).log.write_bytes(log)
    bench.problem()
    assert (bench.beat()["last_line"], bench.beat().get("is_line_open", False)) == (last_line, is_open)


def test_the_pace_and_the_phase_are_in_the_heartbeat(bench):
    bench.problem()
    assert bench.beat()["phase"] == "loading"
    attempt = bench.spool.attempt(0, 0)
    attempt.called.touch()
    attempt.progress.write_text('{"round_no": 6, "metrics": {}, "rounds_total": 40, "round_s": 2.5, "round_at": 9.0}')
    bench.problem()
    beat = bench.beat()
    assert (beat["phase"], beat["round_no"], beat["rounds_total"], beat["round_s"]) == ("running", 6, 40, 2.5)


def test_a_replaced_attempt_sends_no_more_heartbeats(bench):
    plan = {**PLAN, "ranks": [0], "store_stops": True, "is_claimed": True}
    uploader = Uploader(bench.spool, plan, -1, bench._write_end)
    uploader.__dict__["_store"] = bench.store
    uploader._read_commands(b"started 0 0\n")
    uploader._upload_all()
    assert bench.beat()["attempt"] == 0
    bench.store.create(RunKeys("r").start(0, 1), b"{}")
    bench.store.put(RunKeys("r").beat(0), b'{"attempt": 1}')
    assert uploader._stops is not None
    uploader._stops._look_at = 0.0
    uploader._uploads[0, 0]._beat_at = -100.0
    uploader._upload_all()
    assert bench.beat() == {"attempt": 1}
    assert list(bench.link.stored_ranks()) == []
    assert bench.link.stops == [("replaced", 0)]
