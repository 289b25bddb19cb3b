"""Checks of the values that users pass to the library: each problem names the argument, the value and the rule.

The rule of an argument is a `Kind`: from a table (`check_arguments`, `check_fields`), or from its annotation
(`check_settings`, for the settings of executors). Rules between several arguments are checked by the class or function
that owns them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from types import MethodType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, Union, get_args, get_origin, get_type_hints

from atoll.errors import InvalidSpec, did_you_mean

P = ParamSpec("P")

_LONGEST = 60


class Kind(NamedTuple):
    """A rule for one argument: a description and a test."""

    words: str
    fits: Callable[[Any], bool]
    may_be_none: bool = False
    known: Callable[[], Iterable[str]] | None = None
    """The valid names, of which a problem suggests a similar one."""

    def problem(self, name: str, value: Any) -> str | None:
        """Name, value and description, if the value breaks the rule."""
        if (value is None and self.may_be_none) or self.fits(value):
            return None
        meant = did_you_mean(value, self.known()) if self.known and isinstance(value, str) else ""
        return f"{name}={shown(value)}: {self.words}{meant}"


def check_arguments(
    called: str, given: Mapping[str, Any], kinds: Mapping[str, Kind], hint: str | None = None
) -> dict[str, Any]:
    """Return the arguments in `kinds`, with numbers of numpy and torch as Python numbers.

    Raises one `InvalidSpec` with every argument that breaks its rule; `hint` is the next step.
    """
    values = {name: plain(given[name]) for name in kinds if name in given}
    problems = [problem for name, value in values.items() if (problem := kinds[name].problem(name, value))]
    if problems:
        raise InvalidSpec(called, problems, hint=hint)
    return values


def check_fields(instance: object, kinds: Mapping[str, Kind]) -> None:
    """`check_arguments` for the fields of a dataclass, which may be frozen: call it first in `__post_init__`."""
    for name, value in check_arguments(type(instance).__name__, vars(instance), kinds).items():
        object.__setattr__(instance, name, value)


def plain(value: Any) -> Any:
    """A number of numpy or torch as a Python number; any other value unchanged."""
    # Look at the class: an instance may have a `__getattr__` that accepts any name or raises anything.
    is_array = hasattr(type(value), "ndim") and hasattr(type(value), "item")
    return value.item() if is_array and value.ndim == 0 else value


def a(kind: type) -> Callable[[Any], bool]:
    """A test for instances of a class."""
    return lambda value: isinstance(value, kind)


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return is_whole(value) and value >= 1


def is_number(value: Any) -> bool:
    """Whether the value is a number that fits into a float: finite, and not too large."""
    return (is_whole(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max


def one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in words


def is_text(value: Any) -> bool:
    """Whether the value is one line of text that is not empty."""
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def is_path(value: Any) -> bool:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return isinstance(path, str) and bool(path.strip()) and "\0" not in path


def between(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and least <= value <= most


def a_list_of(item: Kind) -> Kind:
    """A list or a tuple; a text is not a list of its characters."""
    words = f"a list, each item {item.words}"
    return Kind(words, lambda value: isinstance(value, list | tuple) and all(map(item.fits, value)))


def a_table_of(value: Kind, key: Kind | None = None) -> Kind:
    """A mapping; its keys are texts, or `key` describes them."""
    name = key or Kind("a text", is_text)
    words = f"a table, each name {name.words}, each value {value.words}"

    def fits(table: Any) -> bool:
        return isinstance(table, Mapping) and all(name.fits(k) and value.fits(v) for k, v in table.items())

    return Kind(words, fits)


COUNT = Kind("a whole number from 1", is_count)
INDEX = Kind("a whole number from 0", lambda value: is_whole(value) and value >= 0)
SWITCH = Kind("true or false", a(bool))
SECONDS = Kind("seconds, 0 or more", lambda value: is_number(value) and value >= 0)
SECONDS_ABOVE_0 = Kind("seconds above 0", lambda value: is_number(value) and value > 0)
TEXT = Kind("a text that is not empty", is_text)
PATH = Kind("a path", is_path)
OBJECT = Kind(
    "an object, which only Python code can give",
    lambda value: value is not None and not isinstance(value, str | bytes | int | float | list | tuple | Mapping),
)
FUNCTION = Kind("a function, which only Python code can give", callable)
CLOCK = Kind(
    "a clock, which only Python code can give",
    lambda value: all(callable(getattr(value, name, None)) for name in ("time", "monotonic", "sleep")),
)
_PLAIN: dict[Any, Kind] = {
    str: Kind("a text", a(str)),
    bool: SWITCH,
    int: Kind("a whole number", is_whole),
    float: Kind("a number", is_number),
}


def shown(value: object) -> str:
    """A value for a message: a short `repr` of plain values, the class name of others."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is not None and not isinstance(value, bool | int | float | str | list | tuple | dict | set):
        return f"{type(value).__name__}(…)"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def checks_settings(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate the constructor of an executor: `check_settings` runs before it, also when no registry is involved."""

    @wraps(init)
    def checked(*args: P.args, **settings: P.kwargs) -> None:
        made: Any = args[0]
        values = check_settings(made.name, settings, MethodType(init, made), getattr(made, "settings_class", None))
        init(*args, **values)

    return checked


def check_settings(
    executor: str, given: Mapping[str, Any], constructor: Callable[..., Any], settings_class: Any = None
) -> dict[str, Any]:
    """Return the settings, with numbers of numpy as Python numbers. Raises one `InvalidSpec` with all problems.

    The names and rules are those of the constructor's annotations and, for an executor that takes them as `**settings`,
    of its `settings_class`. The optional `value_problems` of that class gets the values that fit their rules.
    """
    owners = [constructor] if settings_class is None else [constructor, settings_class]
    values = {name: plain(value) for name, value in given.items()}
    problems = _name_problems(owners, values)
    kinds = {name: kind for owner in owners for name, kind in annotated_kinds(owner).items()}
    wrong = {n: text for n, v in values.items() if n in kinds and (text := kinds[n].problem(n, v))}
    problems += wrong.values()
    if (more := getattr(owners[-1], "value_problems", None)) is not None:
        problems += more({name: value for name, value in values.items() if name not in wrong})
    if problems:
        raise InvalidSpec(f"the configuration of executor `{executor}`", problems, hint=settings_hint(executor))
    return values


def setting_names(adapter: Any) -> set[str]:
    """The names of the settings of an executor's class."""
    own = getattr(adapter, "settings_class", None)
    owners = [adapter] if own is None else [adapter, own]
    found = (p for owner in owners for p in signature(owner).parameters.values())
    return {p.name for p in found if p.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)}


def settings_hint(executor: str) -> str:
    """Where a user sets what an executor needs."""
    return (
        f"set it with `--setting NAME=VALUE` (`--set {executor}.NAME=VALUE` in a run on several backends), below "
        f"`[executors.{executor}]` in atoll.toml, or with `settings=`"
    )


def annotated_kinds(owner: Callable[..., Any]) -> dict[str, Kind]:
    """The rule of each parameter: the `Kind` in its `Annotated[…]`, or one for a plain type such as `float | None`.

    A parameter of any other type has no rule here.
    """
    try:
        function = owner.__init__ if isinstance(owner, type) else owner  # type: ignore[misc]
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # an annotation that only type checkers can resolve
        return {}
    return {name: kind for name, hint in hints.items() if name != "return" and (kind := _kind_of(hint))}


def _only_python(owners: Sequence[Callable[..., Any]]) -> set[str]:
    """Parameters that take objects, which no configuration file can give."""
    rules = {name: kind for owner in owners for name, kind in annotated_kinds(owner).items()}
    return {name for name, kind in rules.items() if kind._replace(may_be_none=False) in (OBJECT, FUNCTION, CLOCK)}


def _name_problems(owners: Sequence[Callable[..., Any]], named: Mapping[str, Any]) -> list[str]:
    """Names that no owner accepts, and names that an owner requires. An owner passes `**settings` to the next one."""
    found = {p.name: p for owner in owners for p in signature(owner).parameters.values()}
    names = [name for name, p in found.items() if p.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in signature(owners[-1]).parameters.values())
    unknown = [] if takes_all else [name for name in named if name not in names]
    plain_names = [name for name in names if name not in _only_python(owners)]
    listed = f"; there are {', '.join(f'`{name}`' for name in plain_names)}" if plain_names else ""
    missing = [name for name in names if found[name].default is Parameter.empty and name not in named]
    return [
        *(f"{name}: there is no such setting{did_you_mean(name, names) or listed}" for name in unknown),
        *(f"{name}: missing" for name in missing),
    ]


def _kind_of(hint: Any) -> Kind | None:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((part for part in parts if isinstance(part, Kind)), None) or _kind_of(parts[0])
    if origin in (Union, UnionType):
        return _any_of(parts)
    if origin is Literal:
        return Kind(f"one of {', '.join(map(str, parts))}", lambda value: value in parts)
    container = origin if isinstance(origin, type) else hint if isinstance(hint, type) else object
    if issubclass(container, os.PathLike):
        return PATH
    if parts and issubclass(container, Mapping):
        return a_table_of(item) if (item := _kind_of(parts[-1])) else None
    if parts and issubclass(container, Sequence):
        return a_list_of(item) if (item := _kind_of(parts[0])) else None
    return _PLAIN.get(hint)


def _any_of(parts: Sequence[Any]) -> Kind | None:
    kinds = [_kind_of(part) for part in parts if part is not NoneType]
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    if len(known) == 1:
        return known[0]._replace(may_be_none=NoneType in parts or known[0].may_be_none)
    words = " or ".join(dict.fromkeys(kind.words for kind in known))
    return Kind(words, lambda value: any(kind.fits(value) for kind in known), NoneType in parts)
