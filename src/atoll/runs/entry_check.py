"""Checks an entry point in the user's source before anything starts, without running that source.

The checks find the mistakes that users make: a misspelt file, module, function or keyword argument, and a class,
coroutine or generator in place of a function. What the source alone does not decide (decorators, names bound twice or
at run time) is accepted here, and the replica finds out.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from threading import Lock

from atoll.entry import Entry, unfit
from atoll.errors import EntryMissing, InvalidSpec, did_you_mean
from atoll.spec import Task

_BIND_AT_RUN_TIME = {"globals", "exec", "setattr", "__getattr__"}
_PARSING = Lock()


def syntax_tree(source: bytes, path: str = "<unknown>") -> ast.Module:
    """The tree of a source file, one thread at a time.

    CPython 3.11 counts the depth of a tree once for all threads: two threads that parse at the same time can get
    `SystemError: AST constructor recursion depth mismatch`.
    """
    with _PARSING:
        return ast.parse(source, path)


def decided(entry: Entry, root: str) -> Entry:
    """The function that a dotted name names. Raises `InvalidSpec` if it names none in `root` or on `sys.path`.

    Other entries are returned as they are.
    """
    if entry.dotted is None:
        return entry
    if (found := _decided(entry.dotted, lambda module: _find_here(module, root))) is not None:
        return found
    module, _, function = entry.dotted.rpartition(".")
    what = f"no module `{entry.dotted}`" + (f" and no module `{module}` with a function `{function}`" if module else "")
    meant = _similar_module(entry.dotted, root)
    raise InvalidSpec("task", [f"entry=`{entry}`: there is {what} in `{root}`{meant}"])


def is_module_here(module: str) -> bool:
    """Whether this machine has the module, in the working folder or on `sys.path`. Imports nothing."""
    return _find_here(module, os.getcwd()) is not None


def decided_sent(entry: Entry, root: str) -> Entry:
    """The same for code that runs on other machines: if `root` has neither module, the replica decides."""
    return entry if entry.dotted is None else _decided(entry.dotted, lambda name: find_module(name, [root])) or entry


def _decided(dotted: str, find: Callable[[str], str | None]) -> Entry | None:
    """The function of the first module that `find` finds; None if it finds neither."""
    module, _, function = dotted.rpartition(".")
    if find(dotted) is not None:
        return Entry(module=dotted, function="main")
    return Entry(module=module, function=function) if module and find(module) is not None else None


def check(task: Task, root: str) -> None:
    """Raise `InvalidSpec` if the entry point is not in `root` or on `sys.path`, or its arguments do not fit."""
    entry = decided(Entry.of_record(task.entry), root)
    path = os.path.join(root, entry.script) if entry.script else _find_here(entry.place, root)
    if path is None:
        meant = _similar_module(entry.place, root)
        raise InvalidSpec("task", [f"entry=`{task.entry}`: there is no module `{entry.module}` in `{root}`{meant}"])
    if not os.path.isfile(path):
        raise InvalidSpec("task", [f"entry=`{task.entry}`: there is no file `{path}`{_similar_script(path)}"])
    try:
        _check_source(task, entry, path)
    except SyntaxError as exc:
        raise InvalidSpec("task", [f"entry=`{task.entry}`: {path}:{exc.lineno}: {exc.msg}"]) from exc


def check_sent(task: Task, root: str) -> None:
    """The same for code that runs on other machines: they may have files and a version of Python that are not here."""
    entry = decided_sent(Entry.of_record(task.entry), root)
    path = os.path.join(root, entry.script) if entry.script else find_module(entry.place, [root])
    if entry.script and path is not None and not os.path.isabs(entry.script) and not os.path.isfile(path):
        rule = "a script is named by its path in the folder that is sent"
        raise InvalidSpec("task", [f"entry=`{task.entry}`: there is no file `{path}`; {rule}{_similar_script(path)}"])
    if path is not None and os.path.isfile(path):
        with suppress(SyntaxError):
            _check_source(task, entry, path)


def extra_path(entry: Entry, root: str) -> str | None:
    """The folder on our own `sys.path` that replicas need to find the module, if neither `root` nor Python has it."""
    if entry.script is not None:
        return None
    top = entry.place.partition(".")[0]
    if PathFinder.find_spec(top, [root]) is not None:
        return None
    place = next((p for p in sys.path if p and PathFinder.find_spec(top, [p]) is not None), None)
    own = [os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    if place is None or any(os.path.realpath(place).startswith(f"{prefix}{os.sep}lib") for prefix in own):
        return None
    return os.path.abspath(place)


# ---- files and modules


def _find_here(module: str, root: str) -> str | None:
    """The file of a module in `root`, on `sys.path`, or known to a finder that `pip install -e` has added."""
    if found := find_module(module, [root, *sys.path]):
        return found
    top, _, rest = module.partition(".")
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None and spec.has_location:
            return find_module(rest, list(spec.submodule_search_locations or [])) if rest else spec.origin
    return None


def find_module(module: str, places: list[str]) -> str | None:
    """The file of a module, found without importing anything."""
    origin = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, places)  # by the full name, a folder without code needs its imported parent
        if spec is None:
            return None
        origin, places = spec.origin, list(spec.submodule_search_locations or [])
    return origin


def _similar_module(module: str, root: str) -> str:
    """`, did you mean `package.train`?` for the first part of the name that does not exist; or nothing."""
    folder, found = root, ""
    for part in module.split("."):
        there = _modules_in(folder)
        if part not in there:
            return did_you_mean(found + part, [found + name for name in there])
        folder, found = os.path.join(folder, part), f"{found}{part}."
    return ""


def _modules_in(folder: str) -> list[str]:
    """The names of modules and folders in a folder."""
    files = _names(folder)
    there = [name.removesuffix(".py") for name in files if name.endswith(".py")]
    there += [name for name in files if os.path.isdir(os.path.join(folder, name))]
    return [name for name in there if name.isidentifier()]


def _similar_script(path: str) -> str:
    folder, name = os.path.split(path)
    return did_you_mean(name, [other for other in _names(folder) if other.endswith(".py")])


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# ---- functions and arguments


def _check_source(task: Task, entry: Entry, path: str) -> None:
    if not path.endswith(".py"):
        return
    try:
        tree = syntax_tree(Path(path).read_bytes(), path)
        _check_defined(tree, entry, task, path)
        problems = list(
            _script_problems(tree, task) if entry.function is None else _problems(tree, entry.function, task)
        )
    except RecursionError:  # deeply nested source, such as hundreds of `elif`, may still be valid
        return
    if problems:
        raise InvalidSpec("task", [f"entry=`{task.entry}`: {problem}" for problem in problems])


def _script_problems(tree: ast.Module, task: Task) -> Iterator[str]:
    """A script that runs as a program has to do something besides defining a function for a replica to call."""
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _takes_context(node.args)]
    if functions and all(map(_only_defines, tree.body)):
        yield f"the script only defines functions, so it would do nothing; name one: `{task.entry}:{functions[0]}`"


def _only_defines(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return not node.decorator_list
        case ast.Assign() | ast.AnnAssign():
            return not any(isinstance(inner, ast.Call) for inner in ast.walk(node))
        case _:
            return False


def _check_defined(tree: ast.Module, entry: Entry, task: Task, path: str) -> None:
    """Raise `EntryMissing` if nothing in the source can give the function its name."""
    name = entry.function
    if name is None or any(_bindings(tree.body, name)) or _may_bind_at_run_time(tree, name):
        return
    known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    known += [
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    is_dotted = ":" not in task.entry
    if is_dotted and os.path.basename(path) == "__init__.py":
        known += _modules_in(os.path.dirname(path))  # the last part may be a misspelt module
    where = f"in `{entry.place}`" if is_dotted else "there"
    raise EntryMissing("task", [f"entry=`{task.entry}`: no function `{name}` {where}{did_you_mean(name, known)}"])


def _problems(tree: ast.Module, name: str, task: Task) -> Iterator[str]:
    bindings = list(_bindings(tree.body, name))
    if len(bindings) == 1 and bindings[0] in tree.body:
        match bindings[0]:
            case ast.ClassDef(decorator_list=[]):
                yield unfit(name, "class")
            case ast.AsyncFunctionDef(decorator_list=[]):
                yield unfit(name, "async")
            case ast.FunctionDef(decorator_list=[]) as function:
                if _has_yield(function.body):
                    yield unfit(name, "generator function")
                yield from _argument_problems(function, task)


def _has_yield(nodes: Iterable[ast.AST]) -> bool:
    """Whether these statements of a function make it a generator; functions and classes inside it do not count."""
    for node in nodes:
        match node:
            case ast.Yield() | ast.YieldFrom():
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                continue
        if _has_yield(ast.iter_child_nodes(node)):
            return True
    return False


def _bindings(nodes: Iterable[ast.AST], name: str) -> Iterator[ast.AST]:
    """What gives the name a value when the module is loaded; bodies of functions and classes do not count."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                is_binding = node.name == name
            case ast.alias():
                is_binding = (node.asname or node.name.partition(".")[0]) in (name, "*")
            case ast.Name():
                is_binding = node.id == name and isinstance(node.ctx, ast.Store)
            case _:
                yield from _bindings(ast.iter_child_nodes(node), name)
                continue
        if is_binding:
            yield node


def _may_bind_at_run_time(tree: ast.Module, name: str) -> bool:
    """Whether the module may get the name from code that computes names, or from inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) and name in node.names:
            return True
        if getattr(node, "id", getattr(node, "name", None)) in _BIND_AT_RUN_TIME:
            return True
    return False


def _argument_problems(function: ast.FunctionDef, task: Task) -> Iterator[str]:
    spec = function.args
    positional = [a.arg for a in spec.posonlyargs + spec.args]
    if positional and positional[0] in task.args and _is_surely_context(spec):
        yield f"`{function.name}` gets `{positional[0]}`, its context, from Atoll; no argument can take its place"
    has_context = _takes_context(spec) and positional[0] not in task.args
    accepted = sorted({*positional[has_context:], *(a.arg for a in spec.kwonlyargs)})
    if spec.kwarg is None:
        listed = f"; it takes {', '.join(f'`{name}`' for name in accepted) or 'none'}"
        for name in task.args:
            if name not in accepted and name not in task.optional_args:
                yield f"`{function.name}` takes no argument `{name}`{did_you_mean(name, accepted) or listed}"
    optional = {a.arg for a, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is not None}
    optional |= set(positional[len(positional) - len(spec.defaults) :])
    for name in accepted:
        if name not in optional and name not in task.args:
            yield f"`{function.name}` needs an argument `{name}`"


def _takes_context(spec: ast.arguments) -> bool:
    """Whether the first argument is the replica's context, by its name or its annotation."""
    first = next(iter(spec.posonlyargs + spec.args), None)
    return first is not None and (first.arg in ("ctx", "context") or _is_annotated_context(first))


def _is_surely_context(spec: ast.arguments) -> bool:
    """Whether the first argument cannot be anything but the context: `context` may be a number of tokens."""
    first = (spec.posonlyargs + spec.args)[0]
    return _is_annotated_context(first) or (first.arg == "ctx" and first.annotation is None)


def _is_annotated_context(parameter: ast.arg) -> bool:
    annotation = ast.unparse(parameter.annotation) if parameter.annotation else ""
    return annotation.strip("'\"").endswith("ReplicaContext")
