"""What a name at the top of a module stands for, read from its source. Pure, and silent when unsure."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from atoll.entry import unfit

_LITERALS = {
    ast.List: "list", ast.ListComp: "list", ast.Dict: "dict", ast.DictComp: "dict", ast.Set: "set",
    ast.SetComp: "set", ast.Tuple: "tuple", ast.JoinedStr: "str", ast.GeneratorExp: "generator",
}  # fmt: skip


def meaning(tree: ast.Module, name: str) -> ast.stmt | None:
    """The last statement that gives the name: what it stands for when the module is loaded, if nothing else does."""
    return next((node for node in reversed(tree.body) if gives(node, name)), None)


def kind_problem(node: ast.stmt | None, name: str) -> str | None:
    """Why what the statement gives cannot be an entry point; None if it can, or could."""
    match node:
        case ast.ClassDef() if all(_is_dataclass(decorator) for decorator in node.decorator_list):
            return unfit(name, "class")
        case ast.AsyncFunctionDef(decorator_list=[]):
            return unfit(name, "async")
        case ast.FunctionDef(decorator_list=[]) if _yields(node):
            return unfit(name, "generator function")
        case ast.Import():
            return unfit(name, "module", next(alias.name for alias in node.names if gives(alias, name)))
        case (
            ast.Assign(targets=[ast.Name(id=given)], value=value)
            | ast.AnnAssign(target=ast.Name(id=given), value=value)
        ) if given == name:
            return unfit(name, kind) if (kind := _kind(value)) else None
        case _:
            return None


def gives(node: ast.AST, name: str) -> bool:
    """Whether the name may mean something else after this, such as a wrapped function. Methods are not meant."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name == name
        case ast.Name():
            return node.id == name and isinstance(node.ctx, ast.Store)
        case ast.alias():
            return (node.asname or node.name.partition(".")[0]) in (name, "*")
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():  # all but `:=` is its own
            return any(isinstance(inner, ast.NamedExpr) and inner.target.id == name for inner in ast.walk(node))
        case ast.Lambda():
            return False
        case _:
            return any(gives(inner, name) for inner in ast.iter_child_nodes(node))


def may_be_given_unseen(tree: ast.Module, name: str) -> bool:
    """Whether the module has code that could set the name from inside a function, or by a name that it computes."""
    return any(_reaches_globals(node, name) for node in ast.walk(tree))


def _reaches_globals(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Global(names=names):
            return name in names
        case ast.Name(id="globals" | "exec") | ast.Attribute(value=ast.Name(id="sys"), attr="modules"):
            return True
        case _:
            return False


def _kind(value: ast.expr | None) -> str | None:
    """The type of what is written down; None for what has to be computed."""
    match value:
        case ast.Constant(value=constant):
            return type(constant).__name__
        case ast.UnaryOp(operand=ast.Constant(value=int() | float() as number)):
            return type(number).__name__
        case _:
            return _LITERALS.get(type(value))


def _is_dataclass(decorator: ast.expr) -> bool:
    """The one decorator that is common, and leaves a class what it is."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("dataclass", "dataclasses.dataclass")


def _yields(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for line in function.body for node in _own(line))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all inside it, but for the functions and classes that are defined there."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        for inner in ast.iter_child_nodes(node):
            yield from _own(inner)
