"""Whether a script that is to run as it stands would do anything, read from its source. Pure; silent when unsure."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence

_MOST_NAMES = 3


def idle_problem(tree: ast.Module, script: str) -> str | None:
    """Why the script cannot be what is meant: it only defines functions, and calls none."""
    functions = _functions(tree)
    if not functions or not all(_only_defines(node) for node in tree.body) or _imports_for_the_effect(tree):
        return None
    return f"the script only defines functions, so it would do nothing; name one: {_ways(script, functions)}"


def idle_note(tree: ast.Module, script: str) -> str | None:
    """What may have been forgotten: a function that only a replica could call, and that the script never mentions."""
    functions = [function for function in _functions(tree) if takes_context(function.args)]
    used = {inner.id for node in tree.body for inner in _at_top(node) if isinstance(inner, ast.Name)}
    if not functions or used & {function.name for function in functions} or any(map(_is_main, tree.body)):
        return None
    return f"the script never calls `{functions[0].name}`; if that is what should run: {_ways(script, functions)}"


def takes_context(spec: ast.arguments) -> bool:
    """Whether the first argument is the replica's context, by its name or its annotation."""
    positional = spec.posonlyargs + spec.args
    if not positional:
        return False
    return positional[0].arg in ("ctx", "context") or _is_context(positional[0])


def _is_context(parameter: ast.arg) -> bool:
    annotation = ast.unparse(parameter.annotation) if parameter.annotation else ""
    return annotation.strip("'\"").endswith("ReplicaContext")


def takes_nothing_else(spec: ast.arguments) -> bool:
    """Whether the first argument cannot be meant as anything but the context: `context` may be a number of tokens."""
    if not takes_context(spec):
        return False
    first = (spec.posonlyargs + spec.args)[0]
    return _is_context(first) or (first.annotation is None and first.arg == "ctx")


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _only_defines(node: ast.stmt) -> bool:
    """Whether the statement does no more than give names to things. Imports are looked at by themselves."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return not node.decorator_list
        case ast.Assign() | ast.AnnAssign() | ast.Expr(value=ast.Constant()):
            return not _calls(node)
        case ast.If(test=test) if _calls(test):
            return False
        case ast.If() | ast.Try():
            blocks = (node.body, node.orelse, *_further_blocks(node))
            return all(_only_defines(inner) for block in blocks for inner in block)
        case _:
            return False


def _calls(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call | ast.Await) for inner in ast.walk(node))


def _imports_for_the_effect(tree: ast.Module) -> bool:
    """Whether something is imported that the script never mentions: the import itself may be the work."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return any(name not in used for node in tree.body for inner in _at_top(node) for name in _imported(inner))


def _imported(node: ast.AST) -> Iterator[str]:
    """The names that an import gives, unless it is from the standard library."""
    if isinstance(node, ast.Import):
        modules = [(alias, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [(alias, "" if node.level else node.module or "") for alias in node.names]
    else:
        return
    for alias, module in modules:
        if module.partition(".")[0] not in sys.stdlib_module_names and alias.name != "*":
            yield alias.asname or alias.name.partition(".")[0]


def _is_main(node: ast.stmt) -> bool:
    """Whether this is `if __name__ == "__main__":`, or much like it."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _further_blocks(node: ast.If | ast.Try) -> list[list[ast.stmt]]:
    return [] if isinstance(node, ast.If) else [node.finalbody, *(handler.body for handler in node.handlers)]


def _at_top(node: ast.AST) -> Iterator[ast.AST]:
    """All that is evaluated when the module is loaded: not the bodies of functions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for decorator in node.decorator_list:
            yield from ast.walk(decorator)
        return
    yield node
    for inner in ast.iter_child_nodes(node):
        yield from _at_top(inner)


def _ways(script: str, functions: Sequence[ast.FunctionDef]) -> str:
    """How to name those that are likeliest: who takes a context wants to be an entry point."""
    meant = [function for function in functions if takes_context(function.args)] or functions
    return " or ".join(f"`{script}:{function.name}`" for function in meant[:_MOST_NAMES])
