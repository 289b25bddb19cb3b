"""What is wrong with the arguments of a call, in words for who wrote them: names that are not there, missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from atoll.errors import did_you_mean

_LONGEST = 60


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
