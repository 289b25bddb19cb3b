"""Values of user code as JSON. Replicas convert what a function returns; the facades convert arguments.

Converted without loss that matters: tuples and sets (sorted) to lists, dataclasses and mappings to objects, paths to
texts, numbers of numpy and torch (also arrays without dimensions) to numbers, members of an `Enum` to their values.
NaN and infinities stay as they are. Anything else is replaced by its `repr` and named as a leftover.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, NamedTuple

from atoll.validation import plain

_MOST_CHARACTERS = 10_000
"""Characters of a `repr` that are kept."""
_MOST_DEPTH = 200
"""Levels of nesting; readers of the JSON recurse once or twice for each."""
_MOST_DIGITS = 4300
"""Python reads no longer number from a text."""
_MOST_WARNINGS, _MOST_PATH = 20, 500
"""Warnings about one value, and characters of the place that each names."""
_EXACT: dict[type, Callable[[Any], Any]] = {str: str.__str__, float: float.__float__, int: int.__int__}


class Leftover(NamedTuple):
    """A part of a value that JSON cannot hold."""

    where: str
    """Such as `result.model` or `result[3]`."""
    what: str
    """Such as `a `Module``."""


def to_json(value: Any, where: str = "result") -> tuple[Any, tuple[str, ...]]:
    """The value as JSON, with the `repr` of each part that is not JSON, and a warning for each of these parts."""
    converted, left = convert(value, where)
    warnings = [f"{part.where}: {part.what} is not JSON; its repr is kept" for part in left[:_MOST_WARNINGS]]
    if hidden := len(left) - len(warnings):
        warnings.append(f"{where}: {hidden} more parts are not JSON; their repr is kept")
    return converted, tuple(warnings)


def problems(value: Any, where: str) -> list[str]:
    """One line for each part of the value that cannot be converted, for a caller that refuses such a value."""
    return [f"{part.where}: {part.what} is not JSON" for part in convert(value, where)[1]]


def convert(value: Any, where: str) -> tuple[Any, list[Leftover]]:
    """The value as JSON, and the parts of which only the `repr` is left. Never raises because of the value."""
    converter = _Converter()
    return converter.converted(value, where, ()), converter.left


class _Converter:
    def __init__(self) -> None:
        self.left: list[Leftover] = []

    def converted(self, value: Any, where: str, above: tuple[int, ...]) -> Any:
        """The value as JSON; `above` has the ids of the values that contain it."""
        try:
            return self._converted(value, where, above)
        except BaseException:  # noqa: BLE001  code of the value's class can raise anything; the stack can be too deep
            return self._leave(value, where, f"a `{type(value).__name__}`")

    def _converted(self, value: Any, where: str, above: tuple[int, ...]) -> Any:
        value = _scalar(value)
        if _is_atom(value):
            return value
        if isinstance(value, str):
            return self._leave(value, where, "a text that is not Unicode")
        if isinstance(value, int):
            return self._leave(value, where, f"a number of more than {_MOST_DIGITS} digits")
        if not isinstance(value, list | tuple | set | frozenset | Mapping) and not _is_record(value):
            return self._leave(value, where, f"a `{type(value).__name__}`")
        if id(value) in above:
            return self._leave(value, where, f"a `{type(value).__name__}` that contains itself")
        if len(above) >= _MOST_DEPTH:
            return self._leave(value, where, f"a `{type(value).__name__}` below {_MOST_DEPTH} others")
        within = (*above, id(value))
        if isinstance(value, list | tuple):
            return [self.converted(item, f"{where}[{at}]", within) for at, item in enumerate(value)]
        if isinstance(value, set | frozenset):
            return _in_order(self.converted(item, f"{where}[…]", within) for item in value)
        if not isinstance(value, Mapping):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        found: dict[str, Any] = {}
        for key, item in value.items():
            name = self._key(key, where, found)
            found[name] = self.converted(item, f"{where}.{name}", within)
        return found

    def _key(self, key: Any, where: str, taken: Mapping[str, Any]) -> str:
        """The key as the `json` module writes it; the `repr` of another key, or of one whose text is taken."""
        atom = _scalar(key)
        is_text, is_known = isinstance(atom, str), _is_atom(atom)
        name = atom if is_text else json.dumps(atom) if is_known else ""
        if is_known and name not in taken:
            return str(name)
        what = f"a key of type `{type(key).__name__}`" if not is_known else "a key with the text of another key"
        return self._leave(key, where, what)

    def _leave(self, value: Any, where: str, what: str) -> str:
        path = "".join(each if each.isprintable() else "·" for each in where[:_MOST_PATH])
        self.left.append(Leftover(path, what))
        return shown(value)


def shown(value: Any) -> str:
    """The `repr` of a value, cut to a length that can be stored; a note in angle brackets if it has none."""
    try:
        text = _storable(repr(value))
    except BaseException as exc:  # noqa: BLE001  a broken `__repr__`, or nested too deep
        return f"<a `{type(value).__name__}` whose repr raised {type(exc).__name__}>"
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def _scalar(value: Any) -> Any:
    """The plain text or number of a member of an `Enum`, a path, or a number of another library; else the value."""
    if isinstance(value, Enum):
        return _scalar(value.value)
    if isinstance(value, PurePath):
        return str(value)
    found = plain(value)
    if isinstance(found, bool):
        return found
    # Subclasses, such as numpy's float64, may print themselves in another way.
    exact = next((copy(found) for kind, copy in _EXACT.items() if isinstance(found, kind)), None)
    return value if exact is None else exact


def _is_atom(value: Any) -> bool:
    """Whether JSON has this text, number or constant as it is."""
    if isinstance(value, str):
        return _storable(value) == value
    if isinstance(value, int) and value.bit_length() > 3 * _MOST_DIGITS:
        return bool(abs(value) < 10**_MOST_DIGITS)
    return value is None or isinstance(value, bool | int | float)


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _in_order(items: Iterable[Any]) -> list[Any]:
    """The items of a set, in the same order in every process."""
    found = list(items)
    try:
        return sorted(found)
    except TypeError:  # of several types
        return sorted(found, key=lambda item: json.dumps(item, sort_keys=True))


def _storable(text: str) -> str:
    """Escape what UTF-8 cannot encode, such as parts of file names."""
    return text.encode("utf-8", "backslashreplace").decode()
