"""What `docs/adding-an-executor.md` says is true: its code runs, its hooks exist, and an entry point is enough."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from atoll.executors.base import Executor
from atoll.registry import Row
from atoll.spec import Placement
from atoll.testing.bench import Bench
from atoll.testing.executor_contract import ExecutorContract
from atoll.testing.scripted.bench import ScriptedBench
from repository import DOCS

pytestmark = pytest.mark.docs

PAGE = (DOCS / "adding-an-executor.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_the_adapter_of_the_page_has_the_shape_of_an_executor() -> None:
    names: dict[str, object] = {}
    exec(blocks("python")[0], names)
    adapter = names["SlurmExecutor"]
    assert isinstance(adapter, type)
    assert isinstance(adapter(partition="test"), Executor)


def test_the_registry_rows_of_the_page_are_rows() -> None:
    names: dict[str, object] = {"Row": Row}
    exec(blocks("python")[1], names)
    assert "slurm" in names["EXECUTORS"]  # type: ignore[operator]


def test_the_contract_class_of_the_page_can_be_built(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    exec(blocks("python")[2].replace("@pytest.fixture\n", "@staticmethod\n").replace("self.adapter", "'m:C'"), names)
    contract, bench = names["TestSlurm"], names["SlurmBench"]
    assert isinstance(contract, type)
    assert issubclass(contract, ExecutorContract)
    made = contract.bench  # type: ignore[attr-defined]
    assert isinstance(next(made(None, tmp_path)), bench)  # type: ignore[arg-type]


def test_every_hook_of_the_page_exists() -> None:
    table = PAGE[PAGE.index("| hook |") : PAGE.index("A skip says why")]
    rows = [row for row in table.splitlines() if row.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named <= {field.name for field in fields(Bench)} | set(vars(Bench)), named
    own = {name for name in vars(Bench) if not name.startswith("_")} | {field.name for field in fields(Bench)}
    plumbing = {"path", "store_uri", "settings", "environment", "placement", "patience_s", "store"}
    assert own - named == plumbing | {"executor", "elsewhere", "placed", "need_faults"}


def test_the_golden_case_of_the_page_is_one() -> None:
    case = json.loads(blocks("json")[0])
    assert set(case) == {"settings", "run_id", "store", "placement"}
    Placement(**case["placement"])


@pytest.mark.process
@pytest.mark.server
def test_an_entry_point_is_enough(tmp_path: Path) -> None:
    """A package of its own, installed as pip does it: found by name, and not loaded before it is used."""
    points = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]["atoll.executors"]
    assert points == {"slurm": "my_package.slurm:SlurmExecutor"}
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    source = (
        "from atoll.testing.scripted.executor import ScriptedExecutor\n"
        "class SlurmExecutor(ScriptedExecutor): name = 'slurm'\n"
    )
    (tmp_path / "my_package" / "slurm.py").write_text(source)
    info = tmp_path / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[atoll.executors]\nslurm = {points['slurm']}\n")
    with ScriptedBench.below(tmp_path) as bench:
        result = _launch_elsewhere(tmp_path, bench)
    assert result == {"loaded early": False, "executor": "slurm", "values": [0, 1]}


SCRIPT = """
import json, sys, atoll.registry, atoll.runs.prepare
early = "slurm" in atoll.registry.known("executor") and "my_package.slurm" in sys.modules
run = atoll.runs.prepare.launch("atoll.testing.contract_jobs:echo", on="slurm", replicas=2, store=sys.argv[1],
                       settings={"endpoint": sys.argv[2]})
run.wait(60)
values = [value["rank"] for value in run.result().raise_for_failures().values]
print(json.dumps({"loaded early": early, "executor": run.handle.executor, "values": values}))
"""


def _launch_elsewhere(folder: Path, bench: ScriptedBench) -> object:
    other = subprocess.run(
        [sys.executable, "-c", SCRIPT, bench.store_uri, bench.settings["endpoint"]],
        env={"PYTHONPATH": str(folder), "ATOLL_HOME": str(folder / "home"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if other.returncode != 0:
        pytest.fail(other.stderr)
    return json.loads(other.stdout)
