"""`make demo`, made short: everything it promises is there at the end."""

from __future__ import annotations

import json
import sys

import pytest

from repository import EXAMPLES

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_the_demo_ends_with_a_plot_and_a_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    monkeypatch.setattr(demo, "ROUNDS", 2)
    monkeypatch.setattr(demo, "STEPS", 2 * demo.INNER_STEPS)
    monkeypatch.setattr(demo.console, "file", sys.stdout)
    demo.main()
    printed = capsys.readouterr().out
    for promised in ("replica 3", "synchronous data parallel", "times fewer bytes", "bit for bit", "waiting"):
        assert promised in printed
    assert (tmp_path / "demo-output" / "demo.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "demo-output" / "demo.json").read_text())
    assert 25 < numbers["times_fewer_bytes"] < 80
    assert set(numbers["curves"]) == {demo.ALONE, demo.TOGETHER, demo.SYNCHRONOUS}
    del sys.modules["demo"], sys.modules["train_gpt"]
