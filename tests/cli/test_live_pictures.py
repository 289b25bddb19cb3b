"""What the live table and `top` draw, without a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli.live import Trend, _live_picture, _Observation, _top_picture
from atoll.executors.local.executor import LocalExecutor
from atoll.registry import open_store
from atoll.runs.run import Run
from atoll.spec import Code, RunSpec
from atoll.status import Progress, ReplicaState, ReplicaStatus, RunStatus

TRAINING = ReplicaStatus(
    0, ReplicaState.RUNNING, progress=Progress(6, {"loss": 2.5}, "step", 1.0, 40, 700.0, "running")
)
LOADING = ReplicaStatus(1, ReplicaState.RUNNING, progress=Progress(beat_at=1.0, phase="loading"))
FULL = ReplicaStatus(
    1, ReplicaState.RUNNING, progress=Progress(beat_at=1.0, phase="loading", problem="disk full: /scratch")
)


def drawn(tmp_path: Path, view: str, *replicas: ReplicaStatus) -> list[str]:
    spec = RunSpec.build("jobs:echo", run_id="r", code=Code.in_place(str(tmp_path)), replicas=len(replicas))
    run = Run(spec, LocalExecutor(root=tmp_path), open_store(tmp_path.as_uri()), None)
    console, status = Console(width=100, height=30, no_color=True), RunStatus(replicas)
    if view == "live":
        picture = _live_picture(run, status, None, "", console)
    else:
        picture = _top_picture(run, _Observation(status), Trend(), "", console)
    with console.capture() as captured:
        console.print(picture)
    return captured.get().splitlines()


@pytest.mark.parametrize("view", ["live", "top"])
def test_rounds_time_left_and_loading_replicas_are_drawn(tmp_path, view):
    lines = drawn(tmp_path, view, TRAINING, LOADING)
    assert "  round 6 of 40, about 12 min left" in "\n".join(lines)
    rows = [line.split() for line in lines if line.strip()[:2] in ("0 ", "1 ")]
    assert [row[1] for row in rows] == ["running", "loading"]
    assert "6 of 40" in " ".join(rows[0])


@pytest.mark.parametrize("view", ["live", "top"])
def test_a_full_disk_is_one_line_while_it_lasts(tmp_path, view):
    full, fine = drawn(tmp_path, view, TRAINING, FULL), drawn(tmp_path, view, TRAINING, LOADING)
    assert [line.strip() for line in full if "disk full" in line] == ["disk full: /scratch (rank 1)"]
    assert len(full) == len(fine) + 1
