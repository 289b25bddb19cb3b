"""Entry points: which code a replica runs, as text that another process can follow.

Three spellings: `package.module:function`, `path/to/script.py`, and `path/to/script.py:function`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

_is_loading = False
_script: str | None = None
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")


@dataclass(frozen=True)
class Entry:
    """A parsed entry point. Exactly one of `module` and `script` is set; only a script may have no function."""

    module: str | None
    script: str | None
    function: str | None

    def __str__(self) -> str:
        place = self.module or self.script or ""
        return f"{place}:{self.function}" if self.function else place

    @classmethod
    def parse(cls, text: str) -> Entry:
        """`ValueError` says what an entry point looks like."""
        place, colon, function = text.rpartition(":") if ":" in text else (text, "", "")
        if colon and not function.isidentifier():
            raise ValueError(f"`{function}` after the last `:` is not a function name")
        if place.endswith(".py"):
            return cls(None, place, function or None)
        if not _MODULE.match(place):
            raise ValueError("write `package.module:function`, `script.py` or `script.py:function`")
        if not function:
            raise ValueError(f"which function of `{place}`? write `{place}:function`")
        return cls(place, None, function)

    @classmethod
    def of(cls, target: str | Callable[..., Any]) -> Entry:
        """The entry point for a text or a callable; `ValueError` says why a callable cannot be one."""
        return cls.parse(target) if isinstance(target, str) else _of_callable(target)


@contextmanager
def loading() -> Iterator[None]:
    """Around the import of user code in a replica."""
    global _is_loading
    _is_loading = True
    try:
        yield
    finally:
        _is_loading = False


def playing(script: str) -> None:
    """This process is a replica that runs this script as its main program."""
    global _script
    _script = os.path.realpath(script)


def is_own_script(entry: object) -> bool:
    """Whether a replica that runs a script is about to launch that script again."""
    return _script is not None and isinstance(entry, str) and os.path.realpath(entry) == _script


def is_loading() -> bool:
    """Whether this is a replica whose user code is being imported: what launches a run there launches runs for ever."""
    return _is_loading


def unfit(name: str, kind: str, module: str = "") -> str:
    """Why what is called `name` cannot be an entry point, being a `class`, `async`, … or something of that type."""
    match kind:
        case "class":
            return f"`{name}` is a class; an entry point is a function: define one that makes and uses `{name}(…)`"
        case "async":
            return f"`{name}` is `async`; an entry point is a plain function: define one with `asyncio.run({name}(…))`"
        case "generator function":
            return f"`{name}` has a `yield`, so a call of it runs nothing; an entry point returns its result"
        case "module":
            return f"`{name}` is a module; name a function of it: `{module or name}:function`"
        case _:
            return f"`{name}` is of type `{kind}`; an entry point is a function"


def object_problem(found: object, name: str) -> str | None:
    """Why this object cannot be an entry point; None if it can. What can be called as a function can be one."""
    import inspect

    if isinstance(found, type):
        return unfit(name, "class")
    if inspect.ismodule(found):
        return unfit(name, "module", found.__name__)
    if not callable(found):
        return unfit(name, type(found).__name__)
    called = (found, type(found).__call__)
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in called):
        return unfit(name, "async")
    return unfit(name, "generator function") if any(map(inspect.isgeneratorfunction, called)) else None


def _of_callable(function: Callable[..., Any]) -> Entry:
    if problem := object_problem(function, getattr(function, "__name__", "entry")):
        raise ValueError(problem)
    if isinstance(function, partial):
        raise ValueError("a `partial` has no name to import it by; give the function, and what it is given as `args`")
    name = getattr(function, "__qualname__", None)
    module_name = getattr(function, "__module__", None)
    if name is None or module_name is None or hasattr(function, "__self__"):
        raise ValueError("only a plain function can be imported by another process; define one at module level")
    if name == "<lambda>":
        raise ValueError("a lambda has no name to import it by; define a function at module level")
    if "<locals>" in name or "." in name:
        raise ValueError(f"`{name}` is defined inside a function or class; move it to module level")
    module = sys.modules.get(module_name)
    if module is None or getattr(module, name, None) is not function:
        raise ValueError(f"`{module_name}.{name}` is not this function, so another process could not find it")
    if module_name != "__main__":
        return Entry(module_name, None, name)
    if (spec := getattr(module, "__spec__", None)) is not None:
        return Entry(spec.name, None, name)  # `python -m package.module`: its imports may be relative
    script = getattr(module, "__file__", None)
    if script is None:
        raise ValueError(f"`{name}` lives in an interactive session; put it in a file")
    return Entry(None, os.path.abspath(script), name)
