"""Make any attempt to unpickle fail loudly. (S14)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import NoReturn
from unittest.mock import patch

BOMB = b"catoll.testing._unpickling\nexplode\n(tR."
"""A pickle that calls `explode`: whoever unpickles it, by whatever route, is found out."""


def explode(*_: object, **__: object) -> NoReturn:
    raise AssertionError("something on the read path unpickled an object of the store")


@contextmanager
def unpickling_forbidden() -> Iterator[None]:
    """While this is open, every way into `pickle` raises."""
    with ExitStack() as patches:
        for module in ("pickle", "_pickle"):
            for name in ("load", "loads", "Unpickler"):
                patches.enter_context(patch.object(import_module(module), name, explode))
        yield
