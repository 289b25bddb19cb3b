"""Nobody opts out: every row of the registry has a contract class, golden requests, and an extra that exists.

Test files are read and not imported, so one whose service is missing here, and that skips itself, still counts.
"""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

from atoll.registry import EXECUTORS, STORES, Row
from repository import ROOT, TESTS

HERE = Path(__file__).parent
GOLDEN = TESTS / "golden"
CONTRACTS = {"executor": "ExecutorContract", "store": "StoreContract"}
ROWS = [*(("executor", *item) for item in EXECUTORS.items()), *(("store", *item) for item in STORES.items())]


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Every class at the top of a file of this folder, by name."""
    trees = [ast.parse(path.read_text()) for path in sorted(HERE.glob("test_*.py"))]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def family(name: str) -> list[str]:
    """The class and all it is derived from, as far as it is written in this folder; then the names of the rest."""
    found = [name]
    for base in classes()[name].bases if name in classes() else ():
        found += family(ast.unparse(base))
    return found


def words(name: str) -> set[str]:
    """Names and strings in the body of a class and of those it is derived from."""
    nodes = [node for one in family(name) if one in classes() for node in ast.walk(classes()[one])]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def keepers(kind: str, path: str) -> list[str]:
    """Test classes that hold this adapter to the contract of its kind."""
    own = [name for name in classes() if name.startswith("Test") and CONTRACTS[kind] in family(name)]
    return [name for name in own if {path, path.partition(":")[2]} & words(name)]


@pytest.mark.parametrize(("kind", "name", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_adapter_of_the_registry_has_a_contract_class(kind: str, name: str, row: Row) -> None:
    found = keepers(kind, row.path)
    assert found, (
        f"{kind} `{name}` ({row.path}): no class in tests/contract derives from {CONTRACTS[kind]} and names it"
    )


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_executor_has_golden_requests(name: str) -> None:
    assert list((GOLDEN / name).glob("*.json")), f"tests/golden/{name}/ has no golden request"


@pytest.mark.parametrize(("kind", "name", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_extra_of_the_registry_exists(kind: str, name: str, row: Row) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert row.extra is None or row.extra in extras, f"{kind} `{name}` needs extra `{row.extra}`; there is none"


def test_an_adapter_without_a_contract_class_is_found_out() -> None:
    assert keepers("executor", "atoll.executors.nobody:NobodyExecutor") == []
    assert keepers("store", "atoll.executors.local.executor:LocalExecutor") == [], "the wrong kind of contract"
    assert keepers("executor", "atoll.testing.scripted.executor:ScriptedExecutor") == ["TestScripted"]


def test_the_extra_serverless_has_the_sdk_of_every_executor() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {f"atoll[{row.extra}]" for row in EXECUTORS.values() if row.extra}
    assert set(extras["serverless"]) == needed
