"""The exact request each executor would send. A case is a file `tests/golden/EXECUTOR/CASE.json`:

    {"settings": {...}, "run_id": "...", "store": "...", "placement": {...}, "request": {...}}

`pytest tests/golden --update-golden` fills in the request.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll import registry
from atoll.context import RunContext
from atoll.spec import Placement

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("*/*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_request_is_the_golden_one(path: Path, pytestconfig: pytest.Config) -> None:
    case = json.loads(path.read_text())
    request = planned(path.parent.name, case)
    if pytestconfig.getoption("--update-golden", default=False):
        path.write_text(json.dumps({**case, "request": request}, indent=2, ensure_ascii=False) + "\n")
        return
    assert request == case.get("request"), f"{path} has another request; see the head of this file"


def test_every_folder_is_an_executor() -> None:
    assert {path.parent.name for path in CASES} <= set(registry.EXECUTORS)


def planned(executor: str, case: dict[str, Any]) -> Any:
    plan = registry.executor(executor, **case["settings"]).plan(
        RunContext(case["run_id"], case["store"]), Placement(**case["placement"])
    )
    return anywhere(json.loads(json.dumps(plan.request)))


def anywhere(value: Any) -> Any:
    """The value as any machine would have it: this one's name and interpreter are only named."""
    if isinstance(value, dict):
        return {name: anywhere(item) for name, item in value.items()}
    if isinstance(value, list):
        return [anywhere(item) for item in value]
    return {sys.executable: "{python}", os.uname().nodename: "{host}"}.get(value, value)
