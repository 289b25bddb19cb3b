"""`benchmarks/quality.py` runs, and counts what it says it counts. How well it does is not for a test to say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.stores.file.store import FileStore
from atoll.stores.memory import MemoryStore
from atoll.testing.store_contract import NewStore, StoreContract
from repository import BENCHMARKS


@pytest.mark.slow
@pytest.mark.process
def test_a_tiny_setting_gives_every_number_of_the_report(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(Path(json.__file__).read_bytes())
    words = f"--text {text} --replicas 2 --seeds 1 --steps 8 --inner-steps 4 --batch-size 2 --step-s 0.01"
    words += " --arms fp32 int8 int4 streaming"
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARKS / "quality.py"), *words.split(), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(report.read_text())
    rows = found["rows"]
    assert list(rows) == ["fp32", "int8", "int4", "streaming"]
    assert found["data_parallel"][0] > 0
    assert found["link"]["bytes_s"] > 0
    for name, row in rows.items():
        assert row["loss_ratio"] == pytest.approx(row["losses"][0] / found["data_parallel"][0])
        assert row["times_fewer_all"] < row["times_fewer"]
        assert f"{name:14}" in done.stdout
    # Four steps of float32 gradients against one update of as many values, or a fourth or nearly an eighth of that.
    assert 3.9 < rows["fp32"]["times_fewer"] < 4.0
    assert 15.0 < rows["int8"]["times_fewer"] < 16.0
    assert 28.0 < rows["int4"]["times_fewer"] < 32.0


def test_musts_that_are_missed_are_said_to_be():
    from quality import verdicts

    good = {"loss_ratio": 1.02, "times_fewer": 80.0, "hidden_share": 0.9}
    assert [is_met for _, is_met in verdicts({"int8": good, "streaming": good})] == [True] * 4
    assert [is_met for _, is_met in verdicts({"int4": good})] == [True, False]
    bad = {"loss_ratio": 1.04, "times_fewer": 70.0, "hidden_share": 0.7}
    assert [is_met for _, is_met in verdicts({"int8": bad, "int4": bad, "streaming": bad})] == [False] * 6


def test_a_report_is_taken_up_again_only_for_the_same_settings(tmp_path):
    from quality import Report
    from quality_runs import Setting

    path, setting = tmp_path / "report.json", Setting("stdlib", 2, 8, 4, 2, 1e-3, 0)
    Report(path, [setting]).add("alone", [1.5])
    assert Report(path, [setting]).found["alone"] == [1.5]
    assert Report(path, [replace(setting, steps=16)]).found["rows"] == {}
    assert "alone" not in Report(path, [replace(setting, steps=16)]).found


def test_bytes_are_counted_by_what_they_are_for():
    from quality_store import LinkedStore

    store = LinkedStore(MemoryStore())
    store.create("runs/a/sync/rounds/0000000000/offer/00000.000", [b"12", b"345"])
    store.put("runs/a/sync/blobs/0000000000-abcdabcd/000000", b"1234567")
    store.put("runs/a/sync/metrics/00000.00000.000000.jsonl", b"1")
    store.get("runs/a/sync/rounds/0000000000/offer/00000.000", start=1)
    assert store.bytes_up == {"rounds": 5, "state": 7, "metrics": 1}
    assert store.bytes_down["rounds"] == 4
    assert store.requests == {"create": 1, "put": 2, "get": 1}


class TestLinkedStore(StoreContract):
    """Behind a link it is the same store."""

    why_no_faults = "a link adds none; see the stores themselves"

    @pytest.fixture
    def new_store(self, tmp_path: Path) -> NewStore:
        from quality_store import LinkedStore

        return lambda name: LinkedStore(FileStore(tmp_path / name), bytes_s=1e9)
