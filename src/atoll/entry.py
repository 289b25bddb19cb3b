"""Entry: the code that a replica runs, as text that another process can import.

It is `package.module:function`, `path/to/script.py` or `path/to/script.py:function`; a task record can also hold a
dotted name. This module also knows whether this process is a replica that is loading such code.
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

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")


@dataclass(frozen=True)
class Entry:
    """A parsed entry point. Exactly one of `module`, `script` and `dotted` is set; a module has a function.

    `dotted` is a name such as `package.module.function` before it is decided what it names: if the whole name is a
    module, its `main`, else a function of the module before the last dot. `launch` and the command line take no such
    text.
    """

    module: str | None = None
    script: str | None = None
    function: str | None = None
    dotted: str | None = None

    def __str__(self) -> str:
        return f"{self.place}:{self.function}" if self.function else self.place

    @property
    def is_program(self) -> bool:
        """Whether this is a script that runs as a program, so that no function is called."""
        return self.script is not None and self.function is None

    @property
    def place(self) -> str:
        """The module or the script that has to be there; for a dotted name, the name itself."""
        return self.module or self.script or self.dotted or ""

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Parse one of the three forms; `ValueError` shows them."""
        place, colon, function = text.rpartition(":") if ":" in text else (text, "", "")
        if colon and not function.isidentifier():
            raise ValueError(f"`{function}` after the last `:` is not a function name")
        if place.endswith(".py"):
            return cls(None, place, function or None)
        if not _MODULE.match(place):
            raise ValueError("write `package.module:function`, `script.py` or `script.py:function`")
        if not function:
            before, _, last = place.rpartition(".")
            meant = f"`{before}:{last}` or " if before else ""
            raise ValueError(f"which function of `{place}`? write {meant}`{place}:function`")
        return cls(place, None, function)

    @classmethod
    def of_record(cls, text: str) -> Entry:
        """Parse the entry of a task record, which may also be a dotted name."""
        is_dotted = not text.endswith(".py") and _MODULE.match(text) is not None
        return cls(dotted=text) if is_dotted else cls.parse(text)

    @classmethod
    def of(cls, target: str | Callable[..., Any] | Entry) -> Entry:
        """The entry point for a text or a callable; `ValueError` if another process could not import it."""
        if isinstance(target, Entry):
            if cls.of_record(str(target)) != target:
                raise ValueError(f"`{target}` is not a dotted name such as `package.module.function`")
            return target
        return cls.parse(target) if isinstance(target, str) else _of_callable(target)


def unfit(name: str, kind: str, module: str = "") -> str:
    """Why `name`, which is a `class`, `async`, … or an object of the type `kind`, cannot be an entry point."""
    match kind:
        case "class":
            return f"`{name}` is a class; an entry point is a function: define one that makes and uses `{name}(…)`"
        case "async":
            return f"`{name}` is `async`; an entry point is a plain function: define one with `asyncio.run({name}(…))`"
        case "generator function":
            return f"`{name}` has a `yield`, so calling it runs nothing; an entry point returns its result"
        case "module":
            return f"`{name}` is a module; name a function of it: `{module or name}:function`"
        case _:
            return f"`{name}` is of type `{kind}`; an entry point is a function"


def object_problem(found: object, name: str) -> str | None:
    """Why this object cannot be an entry point; None if it can: it is called like a function."""
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
        raise ValueError("a `partial` has no name to import it by; give the function, and its arguments as `args`")
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
    if script is None or script == "<stdin>":
        raise ValueError(f"`{name}` is defined in an interactive session; put it in a file")
    return Entry(None, os.path.abspath(script), name)


_is_loading = False
_script: str | None = None


@contextmanager
def loading() -> Iterator[None]:
    """A replica imports user code inside this block."""
    global _is_loading
    _is_loading = True
    try:
        yield
    finally:
        _is_loading = False


def playing(script: str) -> None:
    """Record that this replica runs this script as its main program."""
    global _script
    _script = os.path.realpath(script)


def own_script(entry: str | Callable[..., Any] | Entry) -> str | None:
    """The script that this replica runs, if it is about to launch itself or one of its own functions."""
    if _script is None:
        return None
    try:
        found = Entry.of(entry)
    except (ValueError, TypeError):
        return None  # the launch refuses it with a better message
    modules = [found.place, found.place.rpartition(".")[0]] if found.dotted else [found.place]
    files = [found.script] if found.script else map(_file_of, modules)
    return _script if any(file is not None and os.path.realpath(file) == _script for file in files) else None


def _file_of(module: str) -> str | None:
    from importlib.util import find_spec

    try:
        return getattr(find_spec(module), "origin", None)
    except (ValueError, ImportError):
        return None


def is_loading() -> bool:
    """Whether a replica is importing user code. A launch during the import would repeat in each new replica."""
    return _is_loading
