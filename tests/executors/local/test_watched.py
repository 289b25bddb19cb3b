"""What `Run.status` shows while replicas load, train and find a disk full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import atoll
from atoll.keys import RunKeys
from atoll.replica.spool import Spool
from atoll.runs.stored import Beat, StoredRun
from atoll.status import CALLED, LOADING, Progress, ReplicaState

pytestmark = pytest.mark.process

LIMIT_S = 60.0
WATCHED = """
import os, time

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)

wait_for("load")

def train(ctx):
    ctx.log(round_no=2, rounds_total=8, loss=1.5)
    print("\\x1b[32m 10%\\x1b[0m\\r\\x1b[32m 20%\\x1b[0m", flush=True)
    wait_for("go")
    return "done"

def fill(ctx, folder):
    with open(os.path.join(folder, "filler"), "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 9):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    print("filled", flush=True)
    while not os.path.exists("go"):
        ctx.log(round_no=1, rounds_total=2)
        print("line", flush=True)
        time.sleep(0.05)
    print("the last line", flush=True)
    return "done"


def flood(ctx):
    for _ in range(600):
        print("x" * 9_999, flush=True)
    return "done"
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "watched.py").write_text(WATCHED)
    (folder / "script.py").write_text(f"{WATCHED}\nwait_for('go')\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    room = tmp_path / "small"
    room.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(room)], check=False).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    yield room
    subprocess.run(["umount", "-l", str(room)], check=True)


def until(claim: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.01)


def test_a_replica_is_loading_until_its_entry_point_is_called(code, store):
    run = atoll.launch("watched:train", replicas=2, store=store)
    phases = lambda: {r.progress.phase for r in run.status().replicas}  # noqa: E731
    until(lambda: run.status().counts() == {ReplicaState.RUNNING: 2}, "both processes run")
    until(lambda: StoredRun(run.store, run.id).beats(2).keys() == {0, 1}, "both ranks send heartbeats")
    assert phases() == {LOADING}
    assert run.status().state is ReplicaState.RUNNING
    (code / "load").touch()
    until(lambda: phases() == {CALLED}, "both entry points are called")
    until(lambda: run.status().replicas[1].progress.rounds_total == 8, "the rounds are in a heartbeat")
    assert run.status().replicas[1].progress.round_no == 2
    (code / "go").touch()
    run.wait(LIMIT_S)
    assert phases() == {None}
    assert run.result().values == ["done", "done"]
    assert run.status().replicas[0].progress.last_line == "20%"


def test_a_script_is_called_when_it_begins(code, store):
    run = atoll.launch("script.py", store=store)
    until(lambda: run.status().replicas[0].progress.phase == CALLED, "the script has begun")
    (code / "load").touch()
    (code / "go").touch()
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED


def test_a_container_says_in_its_heartbeat_that_it_loads(code, store):
    command = [sys.executable, "-m", "atoll.replica", "--rendezvous", store, "--world-size", "1", "--run-id", "img"]
    command += ["--trainer-module", "watched", "--trainer-fn", "train"]
    opened = atoll.open_store(store)
    beat = lambda: StoredRun(opened, "img").beats(1).get(0, Beat(0, Progress())).progress  # noqa: E731
    container = subprocess.Popen(command, env={**os.environ, "REPLICA_RANK": "0"}, stdout=subprocess.DEVNULL)
    until(lambda: beat().phase == LOADING, "it loads")
    (code / "load").touch()
    until(lambda: beat().phase == CALLED, "it trains")
    (code / "go").touch()
    assert container.wait(LIMIT_S) == 0
    assert (beat().round_no, beat().rounds_total) == (2, 8)


@pytest.mark.parametrize("which", ["spool", "store"])
def test_a_full_disk_is_named_while_it_lasts(code, store, small, which):
    (code / "load").touch()
    if which == "spool":
        run = atoll.launch("watched:fill", store=store, args={"folder": str(small)}, settings={"root": str(small)})
        folder = f"/{run.handle.native_id}"
    else:
        run = atoll.launch("watched:fill", store=f"{small}/st", args={"folder": str(small)})
        folder = f"{small}/st"
    problem = f"disk full: {folder}"
    status = Spool(f"/{run.handle.native_id}").status

    def recorded() -> set[str]:
        return {row["progress"]["problem"] for row in json.loads(status.read_text())}

    until(lambda: recorded() == {problem}, "the supervisor's table names the full disk")
    assert run.status().problems() == {problem: [0]}
    assert run.status().state is ReplicaState.RUNNING
    (small / "filler").unlink()
    until(lambda: recorded() == {""}, "the supervisor has seen that there is room again")
    until(lambda: run.status().problems() == {}, "no disk is full")
    (code / "go").touch()
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    assert run.result().values == ["done"]
    assert list(run.logs(0))[-1] == "the last line"
    assert StoredRun(run.store, run.id).beats(1)[0].progress.last_line == "the last line"


def test_output_that_is_lost_on_a_full_disk_is_a_warning(code, store, small):
    """Also when the run is over and the disk has room again."""
    (code / "load").touch()
    run = atoll.launch("watched:flood", store=store, settings={"root": str(small)})
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    (warning,) = run.result().warnings
    assert warning.startswith("rank 0: ")
    assert warning.endswith(" bytes of output are not in the log, because the disk was full")
    lost = int(warning.split()[2].replace(",", ""))
    log = Spool(f"/{run.handle.native_id}").attempt(0, 0).log
    assert log.stat().st_size + lost == 6_000_000


def test_a_container_says_in_its_heartbeat_that_its_own_disk_is_full(code, store, small, monkeypatch):
    (code / "load").touch()
    monkeypatch.setenv("TMPDIR", str(small))
    command = [sys.executable, "-m", "atoll.replica", "--rendezvous", store, "--world-size", "1", "--run-id", "img"]
    command += ["--trainer-module", "watched", "--trainer-fn", "fill"]
    command += ["--trainer-kwargs-json", json.dumps({"folder": str(small)})]
    opened = atoll.open_store(store)
    beat = lambda: StoredRun(opened, "img").beats(1).get(0, Beat(0, Progress())).progress  # noqa: E731
    container = subprocess.Popen(command, env={**os.environ, "REPLICA_RANK": "0"}, stdout=subprocess.DEVNULL)
    until(lambda: beat().problem.startswith(f"disk full: {small}/"), "the full disk is in the heartbeat")
    (small / "filler").unlink()
    until(lambda: not beat().problem, "there is room again")
    (code / "go").touch()
    assert container.wait(LIMIT_S) == 0
    assert RunKeys("img").outcome(0, 0) in set(opened.list("runs/img/"))
