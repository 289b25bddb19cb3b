"""Checks of the values that users pass to the library: each problem names the argument, the value and the rule.

Rules between several arguments are checked by the class or function that owns them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, NamedTuple

from atoll.errors import InvalidSpec, did_you_mean

_LONGEST = 60


class Kind(NamedTuple):
    """A rule for one argument: a description and a test."""

    words: str
    fits: Callable[[Any], bool]
    may_be_none: bool = False

    def problem(self, name: str, value: Any) -> str | None:
        """Name, value and description, if the value breaks the rule."""
        if self.fits(value) or (value is None and self.may_be_none):
            return None
        return f"{name}={shown(value)}: {self.words}"


def check_arguments(
    called: str, given: Mapping[str, Any], kinds: Mapping[str, Kind], hint: str | None = None
) -> dict[str, Any]:
    """The arguments that `kinds` names, with numbers of numpy and torch as numbers of Python.

    Raises one `InvalidSpec` with every argument that is not of its kind; `hint` is what to do then.
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
    """A number of numpy or torch as one of Python; anything else as it is."""
    # The class is asked: an instance may have a `__getattr__` that accepts any name or raises anything.
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


COUNT = Kind("a whole number from 1", is_count)
INDEX = Kind("a whole number from 0", lambda value: is_whole(value) and value >= 0)
SWITCH = Kind("True or False", a(bool))
SECONDS = Kind("seconds, 0 or more", lambda value: is_number(value) and value >= 0)
SECONDS_ABOVE_0 = Kind("seconds above 0", lambda value: is_number(value) and value > 0)


def keyword_problems(function: Callable[..., Any], named: Mapping[str, Any]) -> list[str]:
    """Why `function(**named)` would raise a `TypeError`: names it does not accept, and names it requires."""
    parameters = signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    unknown = [] if any(p.kind is Parameter.VAR_KEYWORD for p in parameters) else [n for n in named if n not in names]
    listed = f"; there are {', '.join(f'`{name}`' for name in names)}" if names else ""
    missing = [p.name for p in parameters if p.name in names and p.default is Parameter.empty and p.name not in named]
    return [
        *(f"{name}: there is no such argument{did_you_mean(name, names) or listed}" for name in unknown),
        *(f"{name}: missing" for name in missing),
    ]


def shown(value: object) -> str:
    """A value for a message: a short `repr` of plain values, the class name of others."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is not None and not isinstance(value, bool | int | float | str | list | tuple | dict | set):
        return f"{type(value).__name__}(…)"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
