"""Optional packages, imported when they are first needed."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from atoll.errors import MissingExtra


def require(module: str, *, extra: str) -> ModuleType:
    """The module, or `MissingExtra` naming the extra that brings it. An error inside the module stays what it is."""
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        package = module.partition(".")[0]
        if exc.name is None or exc.name.partition(".")[0] != package:
            raise
        raise MissingExtra(package, extra=extra) from exc
