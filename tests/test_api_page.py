"""`docs/api.md` has every public name, and its signatures are those of the code.

A block whose first line names a module is read as a stub of that module. What it says of a function, a class, its
fields, methods and defaults is compared with the real thing, both ways. The other blocks are run by `test_docs.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, ForwardRef

import pytest

import atoll
from atoll import errors, serverless
from atoll.executors import base as executors
from atoll.rounds import metrics
from atoll.stores import base as stores
from atoll.stores import fast
from repository import DOCS

pytestmark = pytest.mark.docs

PAGE = (DOCS / "api.md").read_text()
Definition = ast.FunctionDef | ast.ClassDef


def stubs(page: str = PAGE) -> Iterator[tuple[str, Definition]]:
    """Module and definition of everything whose signature is on the page."""
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        if named := re.match(r"# (atoll[\w.]*)\n", block):
            for node in ast.parse(block).body:
                assert isinstance(node, Definition), f"{named[1]}: {ast.unparse(node)} is no signature"
                yield named[1], node


STUBS = list(stubs())


def defined_in(module: ModuleType) -> set[str]:
    """Public functions and classes that are written in a module."""
    found = {name: value for name, value in vars(module).items() if inspect.isclass(value) or inspect.isfunction(value)}
    return {name for name, value in found.items() if name[0] != "_" and value.__module__ == module.__name__}


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("atoll", set(atoll.__all__) - {"__version__", "AtollError"}),
        ("atoll.serverless", set(serverless.__all__) - set(serverless._ALIASES)),
        ("atoll.stores.base", defined_in(stores)),
        ("atoll.stores.fast", defined_in(fast)),
        ("atoll.executors.base", defined_in(executors)),
        ("atoll.rounds.metrics", defined_in(metrics)),
        ("atoll.errors", {"translating"}),
    ],
)
def test_every_public_name_has_its_signature_on_the_page(where: str, names: set[str]) -> None:
    missing = names - {node.name for module, node in STUBS if module == where}
    assert not missing, f"docs/api.md says nothing of {where}: {', '.join(sorted(missing))}"


@pytest.mark.parametrize(("where", "node"), STUBS, ids=[f"{where}.{node.name}" for where, node in STUBS])
def test_a_signature_of_the_page_is_that_of_the_code(where: str, node: Definition) -> None:
    assert_same(where, node)


def test_every_error_is_in_the_table_with_what_it_is_and_has() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+` ?)+)\| ((?:`\w+` ?)*)\|", PAGE, re.M)
    table = {name: (re.findall(r"\w+", parents), set(re.findall(r"\w+", more))) for name, parents, more in rows}
    found = {name: getattr(errors, name) for name in defined_in(errors)}
    for name, error in found.items():
        if not (inspect.isclass(error) and issubclass(error, errors.AtollError)):
            continue
        assert table.pop(name) == ([base.__name__ for base in error.__bases__], own_attributes(error)), name
    assert not table, "there are no such errors"


def test_what_the_page_says_to_import_is_there() -> None:
    for module, name in re.findall(r"`(atoll(?:\.\w+)+)\.([A-Z]\w+)`", PAGE):
        assert hasattr(import_module(module), name), f"{module}.{name}"


@pytest.mark.parametrize(
    ("true", "false", "said"),
    [
        ("replicas: int = 1,\n    on", "replicas: int = 2,\n    on", "replicas"),
        ("*,\n    replicas: int = 1,", "replicas: int = 1,", "replicas"),
        (
            "def cost(self, status: RunStatus | None = None) -> Cost | None: ...\n    def resume",
            "def resume",
            "cost",
        ),
        ("grace_s: float = 10.0", "grace_s: int = 10.0", "grace_s"),
        ('LOST = "lost"\n    @', 'LOST = "gone"\n    @', "LOST"),
        ("    outlook: Outlook | None = None\n", "", "outlook"),
        ("def is_strict(self) -> bool", "def is_strict(self) -> str", "is_strict"),
        ("class LocalSGD(DiLoCo)", "class LocalSGD(Run)", "LocalSGD"),
    ],
)
def test_a_signature_that_is_wrong_is_found_out(true: str, false: str, said: str) -> None:
    assert true in PAGE
    wrong = list(stubs(PAGE.replace(true, false, 1)))
    with pytest.raises(AssertionError, match=said):
        assert_all_same(wrong)


def assert_all_same(signatures: list[tuple[str, Definition]]) -> None:
    for where, node in signatures:
        assert_same(where, node)


def assert_same(where: str, node: Definition) -> None:
    module = import_module(where)
    found = getattr(module, node.name)
    home = vars(import_module(found.__module__))
    if isinstance(node, ast.FunctionDef):
        assert_same_call(node, inspect.unwrap(found), home)
    else:
        assert_same_class(node, found, home)


def assert_same_class(node: ast.ClassDef, found: type, home: dict[str, Any]) -> None:
    for base in map(ast.unparse, node.bases):
        assert is_one(found, base), f"{node.name} is no {base}"
    said = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    parts = members(found, {ast.unparse(base) for base in node.bases})
    assert {name for name in said if not name.startswith("_")} == set(parts), node.name
    for name, one in said.items():
        assert_same_call(one, parts.get(name) or inspect.unwrap(vars(found)[name]), home)
    if issubclass(found, Enum):
        named = {ast.unparse(a.targets[0]): ast.literal_eval(a.value) for a in node.body if isinstance(a, ast.Assign)}
        assert named == {member.name: member.value for member in found}, node.name
    assert_same_fields(node, found, home)


def assert_same_fields(node: ast.ClassDef, found: type, home: dict[str, Any]) -> None:
    """Fields with types and defaults; of a class that has no declared ones, attributes that it sets."""
    said = {ast.unparse(one.target): one for one in node.body if isinstance(one, ast.AnnAssign)}
    declared = dict(fields_of(found))
    if not declared:
        assert set(said) <= own_attributes(found), f"{node.name} does not set all of {', '.join(said)}"
        return
    inherited = {name for base in node.bases for name, _ in fields_of(named_base(found, ast.unparse(base)))}
    assert list(said) == [name for name in declared if name not in inherited or name in said], node.name
    for name, one in said.items():
        kind, default = declared[name]
        assert ast.unparse(one.annotation) == plain(kind), f"{node.name}.{name}"
        given = inspect.Parameter.empty if one.value is None else value_of(one.value, home)
        assert given == default, f"{node.name}.{name}"


def assert_same_call(node: ast.FunctionDef, found: Callable[..., Any], home: dict[str, Any]) -> None:
    signature = inspect.signature(found)
    real = [(p.name, p.kind, plain(p.annotation), p.default) for p in signature.parameters.values()]
    assert list(parameters_of(node.args, home)) == real, node.name
    returns = plain(signature.return_annotation)
    assert (ast.unparse(node.returns) if node.returns else "") == returns, node.name


def parameters_of(args: ast.arguments, home: dict[str, Any]) -> Iterator[tuple[str, Any, str, Any]]:
    def one(arg: ast.arg, kind: Any, default: ast.expr | None) -> tuple[str, Any, str, Any]:
        value = inspect.Parameter.empty if default is None else value_of(default, home)
        return arg.arg, kind, ast.unparse(arg.annotation) if arg.annotation else "", value

    plain_ones = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain_ones) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip(plain_ones, defaults, strict=True):
        yield one(arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default)
    if args.vararg:
        yield one(args.vararg, inspect.Parameter.VAR_POSITIONAL, None)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield one(arg, inspect.Parameter.KEYWORD_ONLY, default)
    if args.kwarg:
        yield one(args.kwarg, inspect.Parameter.VAR_KEYWORD, None)


def members(found: type, bases: set[str]) -> dict[str, Callable[..., Any]]:
    """Public methods and properties, as functions, without those of the bases that the page names."""
    named = [base for name in bases if (base := named_base(found, name)) is not None]
    ours = [c for c in found.__mro__ if c.__module__.startswith("atoll") and not any(issubclass(b, c) for b in named)]
    parts = {name: as_function(value) for one in reversed(ours) for name, value in vars(one).items()}
    taken = {name for base in named for name in dir(base)}
    return {n: part for n, part in parts.items() if part is not None and n[0] != "_" and n not in taken}


def as_function(value: object) -> Callable[..., Any] | None:
    if isinstance(value, property):
        return value.fget
    if isinstance(value, cached_property):
        return value.func
    if isinstance(value, classmethod | staticmethod):
        return value.__func__
    return inspect.unwrap(value) if inspect.isfunction(value) else None


def fields_of(found: type | None) -> list[tuple[str, tuple[Any, Any]]]:
    """Name, type and default of each field that may be given."""
    nothing = inspect.Parameter.empty
    if found is None or issubclass(found, Enum):
        return []
    if dataclasses.is_dataclass(found):
        return [(f.name, (f.type, default_of(f))) for f in dataclasses.fields(found) if f.init]
    if hasattr(found, "_field_defaults"):
        return [(n, (t, found._field_defaults.get(n, nothing))) for n, t in found.__annotations__.items()]
    if getattr(found, "_is_protocol", False) or inspect.isabstract(found):
        return [(name, (kind, nothing)) for name, kind in vars(found).get("__annotations__", {}).items()]
    return []


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return inspect.Parameter.empty if field.default_factory is dataclasses.MISSING else field.default_factory()


def own_attributes(found: type) -> set[str]:
    """What the class sets on itself when it is made."""
    if "__init__" not in vars(found) or dataclasses.is_dataclass(found):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(found.__init__)))
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in stored if ast.unparse(node.value) == "self" and not node.attr.startswith("_")}


def named_base(found: type, name: str) -> type | None:
    """The class called `name` that this one is derived from, or whose methods it has."""
    known = (getattr(import_module(where), node.name) for where, node in STUBS if node.name == name)
    return next((base for base in known if is_one(found, base.__name__)), None)


def is_one(found: type, name: str) -> bool:
    protocol = serverless.ServerlessExecutor
    if name == protocol.__name__:
        return all(hasattr(found, part) for part in (*vars(protocol)["__annotations__"], *members(protocol, set())))
    return any(base.__name__ == name for base in found.__mro__)


def value_of(node: ast.expr, home: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "docs/api.md", "eval"), home)


def plain(annotation: Any) -> str:
    """A type as the page writes it; all annotations are text, for every module says so."""
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
    return ast.unparse(ast.parse(text, mode="eval"))
