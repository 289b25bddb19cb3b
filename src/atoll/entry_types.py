"""Whether an argument is of the plain type that its parameter is annotated with. Pure, and silent when unsure."""

from __future__ import annotations

import ast
from typing import Any

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "None": "null"}
_TRUTHS = {"1": "true", "true": "true", "yes": "true", "0": "false", "false": "false", "no": "false"}


def type_problem(parameter: ast.arg, default: ast.expr | None, value: Any) -> str | None:
    """What the parameter wants and does not get; None if it fits, or could.

    Only annotations made of `int`, `float`, `bool` and `None` are read: a text is one that nobody turned into a number.
    """
    kinds = _kinds(parameter.annotation)
    if kinds is None or kinds == {"None"}:
        return None
    if isinstance(default, ast.Constant) and type(default.value) is type(value):
        return None  # whatever is annotated
    if isinstance(default, ast.Constant) and default.value is None:
        kinds = kinds | {"None"}
    given = _misfit(kinds, value)
    if given is None:
        return None
    annotated = ast.unparse(parameter.annotation) if parameter.annotation else ""
    wanted = " or ".join(words for name, words in _WORDS.items() if name in kinds)
    return f"`{parameter.arg}: {annotated}` wants {wanted}, not {given}"


def _misfit(kinds: frozenset[str], value: Any) -> str | None:
    """What the value is, if it is none of these kinds, and what to write where that is plain."""
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "…"
    if isinstance(value, str):
        return f"the text {shown}" + _instead(kinds, value.lower())
    if isinstance(value, list | dict):
        return f"the {'list' if isinstance(value, list) else 'object'} {shown}"
    if value is None:
        return None if "None" in kinds else "null"
    if isinstance(value, bool):
        return None if "bool" in kinds else f"{str(value).lower()}; for a number write `{int(value)}`"
    if isinstance(value, float) and "float" not in kinds:
        return f"the float {shown}"
    if isinstance(value, int) and not kinds & {"int", "float"}:
        return f"the number {shown}" + _instead(kinds, shown)
    return None


def _instead(kinds: frozenset[str], text: str) -> str:
    """How a truth value is written by who wrote this."""
    word = _TRUTHS.get(text) if "bool" in kinds else None
    return f"; write `{word}`" if word else ""


def _kinds(annotation: ast.expr | None) -> frozenset[str] | None:
    """The plain types an annotation is made of, or None if there is any other in it."""
    match annotation:
        case ast.Name(id="int" | "float" | "bool" as name):
            return frozenset({name})
        case ast.Constant(value=None):
            return frozenset({"None"})
        case ast.Constant(value=str(text)):
            return _kinds(_parsed(text))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _together(left, right)
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            return _of_typing(name, inner)
        case _:
            return None


def _of_typing(name: str, inner: ast.expr) -> frozenset[str] | None:
    if name == "Optional":
        return _together(inner, ast.Constant(None))
    if name == "Union":
        return _together(*(inner.elts if isinstance(inner, ast.Tuple) else [inner]))
    return None


def _together(*parts: ast.expr) -> frozenset[str] | None:
    found = [_kinds(part) for part in parts]
    known = [kinds for kinds in found if kinds is not None]
    return frozenset().union(*known) if len(known) == len(found) else None


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
