"""DiLoCo on machines that join: one leaves in the middle, another takes its place, and the weights are the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import atoll
from atoll._time import Deadline, backoff
from atoll.runs.run import Run
from atoll.status import ReplicaState

pytestmark = [pytest.mark.process, pytest.mark.training]

TRAINER = """
import os, time
import torch
from torch import nn
import atoll

def train(ctx, *, gate):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(100 + ctx.rank)
    batches = [torch.randn(4, 8, generator=data) for _ in range(12)]
    with atoll.DiLoCo(model, inner, ctx, inner_steps=2) as outer:
        for x in outer.steps(batches, rounds=6):
            while ctx.rank == 0 and outer.round >= 3 and not os.path.exists(gate):
                time.sleep(0.02)
            nn.functional.mse_loss(model(x), torch.sin(x[:, :3])).backward()
            inner.step()
            inner.zero_grad()
    return b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()).hex()
"""


def joined(run: Run) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "atoll", "join", run.id, "--store", run.store.uri]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/")


def until(what: str, condition) -> None:
    deadline, pauses = Deadline(120.0), backoff(0.02, cap_s=0.2)
    while not condition():
        assert not deadline.is_past, f"not in time: {what}"
        deadline.sleep(next(pauses))


def has_rounds(run: Run, count: int) -> bool:
    replicas = run.status().replicas
    assert not any(replica.state.is_terminal for replica in replicas), [replica.message for replica in replicas]
    return all((replica.progress.round_no or 0) >= count for replica in replicas)


def test_a_machine_that_joins_in_the_place_of_another_continues_its_rounds(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    code, gate = tmp_path / "code", tmp_path / "gate"
    code.mkdir()
    (code / "trainer.py").write_text(TRAINER)
    shared = {"replicas": 2, "store": str(tmp_path / "store"), "workspace": str(code), "args": {"gate": str(gate)}}
    run = atoll.launch("trainer:train", on="join", **shared)
    machines = [joined(run), joined(run)]
    try:
        until("three rounds are done", lambda: has_rounds(run, 3))
        pid = (run.status().replicas[1].native_id or "").rpartition(":")[2]
        leaving = next(machine for machine in machines if machine.pid == int(pid))
        leaving.terminate()
        leaving.wait()
        assert run.status().replicas[1].state is ReplicaState.PENDING
        machines.append(joined(run))
        until("the rank runs again", lambda: run.status().replicas[1].attempt == 1)
        gate.touch()
        run.wait(120)
    finally:
        for machine in machines:
            machine.terminate()
            machine.wait()
    result = run.result().raise_for_failures()
    assert [outcome.attempt for outcome in result.outcomes] == [0, 1]
    undisturbed = atoll.launch("trainer:train", on="local", **shared)
    undisturbed.wait(120)
    assert result.values == undisturbed.result().raise_for_failures().values
