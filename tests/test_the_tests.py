"""Every test asserts something that a reader can see in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
_PYTEST = ("raises", "warns", "fail")
_HELPERS = ("assert_", "check_", "expect_")


def asserts(test: ast.AST) -> bool:
    """Whether it has an `assert`, a call such as `pytest.raises`, or a call of a helper that is named for asserting."""
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and _is_check(node)) for node in ast.walk(test)
    )


def _is_check(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        is_pytest = isinstance(call.func.value, ast.Name) and call.func.value.id == "pytest"
        return (is_pytest and call.func.attr in _PYTEST) or call.func.attr.startswith(_HELPERS)
    return isinstance(call.func, ast.Name) and call.func.id.startswith(_HELPERS)


def functions_in(source: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = ast.walk(ast.parse(source))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [function for function in functions if function.name.startswith("test_")]


def test_every_test_has_a_visible_assertion():
    without = [
        f"{path.relative_to(TESTS)}:{test.lineno} {test.name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for test in functions_in(path.read_text())
        if not asserts(test)
    ]
    assert without == []


@pytest.mark.parametrize(
    ("body", "is_one"),
    [
        ("assert f()", True),
        ("with pytest.raises(ValueError): f()", True),
        ("assert_same(f(), 1)", True),
        ("peer.expect_call(1)", True),
        ("f()", False),
        ("check(f())", False),
        ("file.fail(1)", False),
    ],
)
def test_what_counts_as_an_assertion(body, is_one):
    (test,) = functions_in(f"def test_it():\n    {body}\n")
    assert asserts(test) is is_one
