"""The example that uses plain `ObjectStoreAllReduce`: real processes, and the weights that one process would get."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from repository import EXAMPLES

pytestmark = [pytest.mark.process, pytest.mark.training]

EXAMPLE = EXAMPLES / "allreduce_sgd.py"
REPLICAS, STEPS = 2, 5


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("allreduce_sgd", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_one_process() -> str:
    """The same training with one model and the mean of both replicas' gradients."""
    example = loaded()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = example.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        gradients = []
        for rank in range(REPLICAS):
            points, spiral = example.examples(rank, step)
            loss = functional.cross_entropy(model(points), spiral)
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (each[0] + each[1]) / REPLICAS
        optimizer.step()
    state = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(state).hexdigest()[:12]


@pytest.mark.slow
def test_replicas_end_with_the_weights_of_one_process_that_has_all_the_data(tmp_path):
    options = ["--replicas", str(REPLICAS), "--steps", str(STEPS), "--store", str(tmp_path / "store")]
    done = subprocess.run([sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"weights (\w+)", done.stdout) == [in_one_process()] * REPLICAS
    left = [path for path in (tmp_path / "store" / "allreduce").rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["000001.floor"], "replicas have tidied up"


def test_it_is_short_enough_to_read():
    assert len(EXAMPLE.read_text().splitlines()) < 150
