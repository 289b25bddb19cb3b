"""What is wrong with the arguments of a call, in words for who wrote them: names that are not there, missing ones, and
values that are not of the kind they must be.

Numbers that do not fit each other are found later, by those who know what they are for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from types import MethodType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from atoll.errors import InvalidSpec, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_LONGEST = 60


class Kind(NamedTuple):
    """What an argument is, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]
    may_be_none: bool = False

    def problem(self, name: str, value: Any) -> str | None:
        """Name, value and rule, if the value is something else."""
        if self.fits(value) or (value is None and self.may_be_none):
            return None
        return f"{name}={shown(value)}: {self.words}"


def checked(
    method: Callable[P, R],
    kinds: Mapping[str, Kind],
    hint: Callable[[Mapping[str, Any], str], str | None] = lambda _given, _called: None,
) -> Callable[P, R]:
    """The method, but it raises `InvalidSpec` with every argument that is not there, or not what it must be.

    Numbers of numpy and torch are taken as those of Python, which can be written down for the other replicas.
    """
    call_it: Callable[..., R] = method

    @wraps(method)
    def checking(*given: P.args, **named: P.kwargs) -> R:
        bound = MethodType(method, given[0])
        called = type(given[0]).__name__ + ("" if method.__name__ == "__init__" else f".{method.__name__}")
        if problems := call_problems(bound, given[1:], named):
            raise InvalidSpec(called, problems)
        call = signature(bound).bind(*given[1:], **named)
        call.arguments.update({name: plain(value) for name, value in call.arguments.items()})
        if problems := list(_misfits(call.arguments, kinds)):
            raise InvalidSpec(called, problems, hint=hint(call.arguments, called))
        return call_it(given[0], *call.args, **call.kwargs)

    return checking


def checked_fields(kinds: Mapping[str, Kind]) -> Callable[[type[T]], type[T]]:
    """A dataclass that looks at what it is given as `checked` does, and so do dataclasses that are made of it."""

    def decorate(cls: type[T]) -> type[T]:
        cls.__init__ = checked(cls.__init__, kinds)  # type: ignore[method-assign]
        # Theirs is another `__init__`, that knows nothing of this one, but ends with what they inherit here.
        cls.__post_init__ = _checked_after(getattr(cls, "__post_init__", None), kinds)  # type: ignore[attr-defined]
        return cls

    return decorate


def plain(value: Any) -> Any:
    """A number of numpy or torch as one of Python; anything else as it is."""
    # Asked of the class: an object may answer for any name, or raise anything.
    is_array = hasattr(type(value), "ndim") and hasattr(type(value), "item")
    return value.item() if is_array and value.ndim == 0 else value


def a(kind: type) -> Callable[[Any], bool]:
    """Whether something is one of these."""
    return lambda value: isinstance(value, kind)


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return is_whole(value) and value >= 1


def is_number(value: Any) -> bool:
    """Whether it is one that can be told as a float: finite, and not too large."""
    return (is_whole(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max


def one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in words


COUNT = Kind("a whole number from 1", is_count)
INDEX = Kind("a whole number from 0", lambda value: is_whole(value) and value >= 0)
SWITCH = Kind("True or False", a(bool))
SECONDS = Kind("seconds, 0 or more", lambda value: is_number(value) and value >= 0)
SECONDS_ABOVE_0 = Kind("seconds above 0", lambda value: is_number(value) and value > 0)


def call_problems(function: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> list[str]:
    """Why `function(*given, **named)` would not even begin; empty if it would."""
    return list(_problems(list(signature(function).parameters.values()), given, named))


def shown(value: object) -> str:
    """A value in a few words: plain ones as they are written, others by their class."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is not None and not isinstance(value, bool | int | float | str | list | tuple | dict | set):
        return f"{type(value).__name__}(…)"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _checked_after(then: Callable[[Any], None] | None, kinds: Mapping[str, Kind]) -> Callable[[Any], None]:
    """A `__post_init__` that looks at the fields before its own work."""

    def check(self: Any) -> None:
        fields = {name: plain(getattr(self, name)) for name in kinds}
        if problems := list(_misfits(fields, kinds)):
            raise InvalidSpec(type(self).__name__, problems)
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # they are frozen
        if then is not None:
            then(self)

    return check


def _misfits(arguments: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Iterator[str]:
    for name, kind in kinds.items():
        if name in arguments and (problem := kind.problem(name, arguments[name])):
            yield problem


def _problems(parameters: list[Parameter], given: Sequence[Any], named: Mapping[str, Any]) -> Iterator[str]:
    by_place = [p.name for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    if len(given) > len(by_place) and Parameter.VAR_POSITIONAL not in kinds:
        first = given[len(by_place)]
        yield f"{shown(first)}: only {_listed(by_place) or 'nothing'} can be given without a name"
    filled = by_place[: len(given)]
    for name in named:
        if name in filled:
            yield f"{name}: given twice"
        elif name not in by_name and Parameter.VAR_KEYWORD not in kinds:
            meant = did_you_mean(name, by_name) or (f"; there are {_listed(by_name)}" if by_name else "")
            yield f"{name}: there is no such argument{meant}"
    for parameter in parameters:
        is_plain = parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if is_plain and parameter.default is Parameter.empty and parameter.name not in (*filled, *named):
            yield f"{parameter.name}: missing"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
