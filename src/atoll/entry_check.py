"""A look at the user's source, without running it, so that a wrong name or argument is found before anything starts."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from atoll.entry import Entry
from atoll.entry_names import kind_problem, may_be_given_unseen, meaning
from atoll.entry_nearby import module_meant, script_meant
from atoll.entry_script import idle_note, idle_problem, takes_context, takes_nothing_else
from atoll.entry_types import type_problem
from atoll.errors import InvalidSpec, did_you_mean
from atoll.spec import Task


def check(task: Task, root: str) -> list[str]:
    """Raise `InvalidSpec` if the entry point cannot be there, or its arguments cannot fit. Silent when unsure.

    Returns what a person should know before it starts.
    """
    entry = Entry.parse(task.entry)
    path = os.path.join(root, entry.script) if entry.script else _find_here(entry.module or "", root)
    if path is None:
        meant = module_meant(entry.module or "", root)
        raise InvalidSpec("task", [f"entry=`{task.entry}`: there is no module `{entry.module}` in `{root}`{meant}"])
    if not os.path.isfile(path):
        raise InvalidSpec("task", [f"entry=`{task.entry}`: there is no file `{path}`{script_meant(path)}"])
    if not path.endswith(".py"):
        return []
    try:
        return _read(task, entry, path)
    except RecursionError:  # such as hundreds of `elif`: it may be as good as any
        return []
    except SyntaxError as exc:
        raise InvalidSpec("task", [f"entry=`{task.entry}`: {path}:{exc.lineno}: {exc.msg}"]) from exc


def check_sent(task: Task, root: str) -> list[str]:
    """The same for code that is sent elsewhere: what is not in `root` may be there, with another Python than ours."""
    entry = Entry.parse(task.entry)
    path = os.path.join(root, entry.script) if entry.script else _find(entry.module or "", [root])
    if path is None or not path.endswith(".py") or not os.path.isfile(path):
        return []
    with suppress(SyntaxError, RecursionError):
        return _read(task, entry, path)
    return []


def _read(task: Task, entry: Entry, path: str) -> list[str]:
    """What is to be known of the source in this file; `InvalidSpec` with every problem."""
    tree = ast.parse(Path(path).read_bytes(), path)
    if problems := [f"entry=`{task.entry}`: {text}" for text in _problems(tree, entry, task)]:
        raise InvalidSpec("task", problems)
    note = idle_note(tree, task.entry) if entry.function is None else None
    return [note] if note else []


def extra_path(entry: Entry, root: str) -> str | None:
    """The folder on our own `sys.path` that replicas need to find the module, if neither `root` nor Python has it."""
    if entry.module is None:
        return None
    top = entry.module.partition(".")[0]
    if PathFinder.find_spec(top, [root]) is not None:
        return None
    place = next((p for p in sys.path if p and PathFinder.find_spec(top, [p]) is not None), None)
    own = [os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    if place is None or any(os.path.realpath(place).startswith(f"{prefix}{os.sep}lib") for prefix in own):
        return None
    return os.path.abspath(place)


def _find_here(module: str, root: str) -> str | None:
    """The file of a module in `root`, on our `sys.path`, or where a finder knows it: some `pip install -e` add one."""
    if found := _find(module, [root, *sys.path]):
        return found
    top, _, rest = module.partition(".")
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None and spec.has_location:
            return _find(rest, list(spec.submodule_search_locations or [])) if rest else spec.origin
    return None


def _find(module: str, places: list[str]) -> str | None:
    """The file of a module, found without importing anything."""
    origin = None
    for depth, _ in enumerate(parts := module.split(".")):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), places)
        if spec is None:
            return None
        origin, places = spec.origin, list(spec.submodule_search_locations or [])
    return origin


def _problems(tree: ast.Module, entry: Entry, task: Task) -> Iterator[str]:
    if (function := entry.function) is None:
        yield from filter(None, [idle_problem(tree, task.entry)])
        return
    node = meaning(tree, function)
    is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    if not is_definition and may_be_given_unseen(tree, function):
        return
    if problem := kind_problem(node, function):
        yield problem
    elif isinstance(node, ast.FunctionDef):
        yield from _argument_problems(node, task)
    elif node is None and not _may_define(tree, function):
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        yield f"no function `{function}` there{did_you_mean(function, [*defined, *_imported(tree)])}"


def _imported(tree: ast.Module) -> set[str]:
    """The names that other modules gave this one: a function may be among them."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _may_define(tree: ast.Module, name: str) -> bool:
    """Whether the module could have the name in a way we cannot see: assignment, import, class, star, condition."""
    unseen = (node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.Expr))
    if any(_names(inner, name) for node in unseen for inner in ast.walk(node)):
        return True
    return meaning(tree, "__getattr__") is not None


def _names(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name
    if isinstance(node, ast.alias):
        return name in (node.asname or node.name, node.name.partition(".")[0]) or node.name == "*"
    return getattr(node, "name", None) == name


def _argument_problems(function: ast.FunctionDef, task: Task) -> Iterator[str]:
    if function.decorator_list:
        return  # a decorator may change the signature
    spec = function.args
    named = [a.arg for a in spec.posonlyargs + spec.args]
    if named and named[0] in task.args and takes_nothing_else(spec):
        yield f"`{function.name}` gets `{named[0]}`, its context, from Atoll; no argument can take its place"
    context = named[:1] if named and named[0] not in task.args and takes_context(spec) else []
    accepted = set(named[len(context) :]) | {a.arg for a in spec.kwonlyargs}
    if spec.kwarg is None:
        for name in task.args:
            if name not in accepted:
                yield f"`{function.name}` takes no argument `{name}`{_meant(name, accepted)}"
    defaults = _defaults(spec)
    for name in sorted(accepted - set(defaults) - set(task.args)):
        yield f"`{function.name}` needs an argument `{name}`"
    for parameter in spec.posonlyargs + spec.args + spec.kwonlyargs:
        if parameter.arg in accepted and parameter.arg in task.args:
            problem = type_problem(parameter, defaults.get(parameter.arg), task.args[parameter.arg])
            if problem is not None:
                yield f"`{function.name}`: {problem}"


def _meant(name: str, accepted: set[str]) -> str:
    """The argument that was meant, or all there are."""
    listed = ", ".join(f"`{other}`" for other in sorted(accepted))
    return did_you_mean(name, sorted(accepted)) or (f"; it takes {listed}" if listed else "; it takes none")


def _defaults(spec: ast.arguments) -> dict[str, ast.expr]:
    """The parameters that have a default, and what it is."""
    positional = [a.arg for a in spec.posonlyargs + spec.args]
    found = dict(zip(positional[len(positional) - len(spec.defaults) :], spec.defaults, strict=True))
    keyword = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    return found | {a.arg: default for a, default in keyword if default is not None}
