"""Other defaults of an adapter where its facade has no argument: short pauses, a store in a folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any


def set_defaults(adapter: str, values: Mapping[str, Any], setter: Callable[[Any, str, Any], None] = setattr) -> None:
    """Set defaults of `module:Class` and of its settings. `MonkeyPatch.setattr` as the setter restores them later."""
    for owner, attribute, value in _changes(adapter, values):
        setter(owner, attribute, value)


def prelude(adapter: str, values: Mapping[str, Any]) -> str:
    """Code that does the same in another process, which finds the folder of the tests."""
    return f"from services.defaults import set_defaults\nset_defaults({adapter!r}, {dict(values)!r})\n"


def _changes(adapter: str, values: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    module, _, name = adapter.partition(":")
    made = getattr(import_module(module), name)
    own = inspect.unwrap(made.__init__)
    yield own, "__kwdefaults__", {key: values.get(key, value) for key, value in own.__kwdefaults__.items()}
    settings = made.settings_class.__init__
    parameters = [each for each in inspect.signature(settings).parameters.values() if each.default is not each.empty]
    yield settings, "__defaults__", tuple(values.get(each.name, each.default) for each in parameters)
