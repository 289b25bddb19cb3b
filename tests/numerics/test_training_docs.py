"""The page about training: its snippets run, and its trainer is as short as it says."""

from __future__ import annotations

import re
import sys
import uuid
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import atoll
from atoll.rounds.codecs.base import codec, codec_names
from repository import DOCS, EXAMPLES

pytestmark = [pytest.mark.docs, pytest.mark.training]

PAGE = (DOCS / "training.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


class Toy(nn.Module):
    """Answers with an object that has a loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.line(batch).square().mean())


def surroundings() -> dict:
    torch.manual_seed(0)
    model = Toy()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return {
        "atoll": atoll,
        "ctx": atoll.ReplicaContext("page", 0, 1, f"memory://{uuid.uuid4().hex}"),
        "model": model,
        "inner": inner,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(inner),
        "batches": [torch.randn(3, 4) for _ in range(5000)],
        "tokens": torch.arange(1 << 15),
    }


def test_the_snippet_that_begins_it_all_trains():
    names = surroundings()
    code = SNIPPETS[0].replace("model, inner, batches = ...", "model, inner, batches = made")
    names["made"] = (names["model"], names["inner"], names["batches"])
    exec(code, names)
    assert names["train"](names["ctx"])["rounds"] == 100
    assert names["model"](torch.cat(names["batches"])).loss < 0.1


@pytest.mark.parametrize("number", range(1, len(SNIPPETS)))
def test_the_other_snippets_run(number):
    names = surroundings()
    exec(SNIPPETS[number], names)
    if "outer" in names:
        assert names["outer"].round == 100


def test_there_are_snippets():
    assert len(SNIPPETS) == 4


def test_every_setting_on_the_page_exists_with_its_default():
    from inspect import signature

    parameters = signature(atoll.DiLoCo).parameters
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", PAGE, re.M)
    codecs = {name: cell for name, cell in rows if name in codec_names()}
    rows = [row for row in rows if row[0] not in codecs]
    assert {name for name, _ in rows} <= set(parameters)
    assert set(parameters) - {name for name, _ in rows} <= {"model", "inner_optimizer", "ctx", "tuning", "chunk"}
    for name, default in rows:
        if default.strip().isdecimal():
            assert parameters[name].default == int(default)


def test_every_codec_is_on_the_page_with_the_bytes_it_takes():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", PAGE, re.M))
    for name in codec_names():
        assert float(rows[name]) == pytest.approx(codec(name).encoded_bytes(1 << 20) / (1 << 20), abs=5e-4)


def test_the_example_trainer_is_under_150_lines_and_learns(monkeypatch):
    path = EXAMPLES / "train_gpt.py"
    assert path.read_text().count("\n") < 150
    monkeypatch.syspath_prepend(str(path.parent))
    import train_gpt

    monkeypatch.setattr(train_gpt.os, "cpu_count", lambda: 1)
    ctx = atoll.ReplicaContext("gpt", 0, 1, f"memory://{uuid.uuid4().hex}")
    found = train_gpt.train(ctx, rounds=4, inner_steps=5, batch_size=4)
    assert found["validation_loss"] < 4.2 < found["history"]["train"][0]
    assert [step for step, _ in found["history"]["validation"]] == [0, 10]
    del sys.modules["train_gpt"]
