"""A run that is over goes on from its last agreed state, here and on another backend, to the bits of a run without
an interruption.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll
from atoll.errors import Conflict
from atoll.executors.local.executor import LocalExecutor
from atoll.registry import open_store
from atoll.rounds.metrics import rounds_held
from atoll.rounds.verify import verify
from atoll.status import ReplicaState

pytestmark = [pytest.mark.process, pytest.mark.slow]

JOB = '''
import hashlib, os, time
import torch
import atoll
from diloco_jobs import network, problem, SMALL_PIECES
from torch import nn


def train(ctx, *, rounds, hold=None, gate=None):
    """Train; wait in round `hold` until the file `gate` is there."""
    torch.set_num_threads(1)
    torch.manual_seed(ctx.rank)
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with atoll.DiLoCo(
        model, inner, ctx, inner_steps=2, tuning=SMALL_PIECES, chunk=1024, checkpoint=5, snapshot=5
    ) as outer:
        for x, y in outer.steps(problem(ctx.rank), rounds=rounds):
            while hold is not None and outer.round >= hold and not os.path.exists(gate):
                time.sleep(0.01)
            nn.functional.mse_loss(model(x), y).backward()
            inner.step()
            inner.zero_grad()
    print(f"launch {ctx.launch} attempt {ctx.attempt} done", flush=True)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    moments = b"".join(s["exp_avg_sq"].numpy().tobytes() for s in inner.state.values())
    return {"weights": hashlib.sha256(weights).hexdigest(), "moments": hashlib.sha256(moments).hexdigest()}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    code = tmp_path / "code"
    code.mkdir()
    (code / "diloco_jobs.py").write_text(Path(__file__).with_name("diloco_jobs.py").read_text())
    (code / "job.py").write_text(JOB)
    monkeypatch.chdir(code)
    return tmp_path


def until_round(run: atoll.Run, rounds: int) -> None:
    """Wait until so many rounds are committed."""

    def look(status):
        if rounds_held(run.store, run.id, launch=run.rounds_of) >= rounds:
            raise StopIteration

    with pytest.raises(StopIteration):
        run.wait(120.0, on_change=look)


def finished(run: atoll.Run) -> list[dict]:
    run.wait(180.0)
    return list(run.result().raise_for_failures().values)


def test_cancelled_and_resumed_twice_once_on_another_backend_a_run_has_the_bits_of_one_without_an_end(folder):
    store, gate = str(folder / "store"), str(folder / "never")
    calm = atoll.launch("job:train", replicas=2, store=store, args={"rounds": 40}, run_id="calm")
    expected = finished(calm)

    args = {"rounds": 40, "hold": 23, "gate": gate}
    first = atoll.launch("job:train", replicas=2, store=store, args=args, run_id="torn")
    until_round(first, 23)
    with pytest.raises(Conflict) as caught:
        first.resume()
    assert caught.value.reason == "running"
    first.cancel()

    second = first.resume(args={"hold": 31})
    assert (second.launch, second.rounds_of, second.id) == (2, 1, "torn")
    until_round(second, 31)
    second.cancel()

    other = LocalExecutor(root=folder / "elsewhere")
    third = atoll.attach("torn", store=store).resume(on=other, args={"hold": None})
    assert third.launch == 3
    assert finished(third) == expected
    report = verify(open_store(store), "torn")
    assert report.is_right, report.difference
    assert rounds_held(third.store, "torn", launch=third.rounds_of) == 40
    for number, state in ((1, ReplicaState.CANCELLED), (2, ReplicaState.CANCELLED), (3, ReplicaState.SUCCEEDED)):
        found = atoll.attach("torn", store=store, launch=number)
        assert found.status().state == state or number == 3
    assert [line for line in third.logs(0) if "launch" in line] == ["launch 3 attempt 0 done"]
