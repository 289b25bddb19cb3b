"""Which files of the user an entry point uses, and whether they have changed. Reads the source, runs nothing.

The files are those of the entry point and of the modules that it imports, as far as they are in the folder of the
code. Their digests are part of the record of a run whose replicas use the code in place.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.entry import Entry
from atoll.journal import changed_files
from atoll.runs.entry_check import find_module, syntax_tree
from atoll.spec import Code, Task

if TYPE_CHECKING:
    from atoll.bundle import Bundle
    from atoll.stores.base import Store

_MOST_FILES = 500
_DIGITS = 16


def with_files(task: Task, code: Code) -> Code:
    """The code in place with the digests of its files as they are now; other code as it is."""
    if code.kind != "in_place" or code.root is None:
        return code
    return replace(code, files=files_of(Entry.of_record(task.entry), code.root, code.path))


def code_differences(
    before: Task, now: Task, workspace: str | None, store: Store, bundle: Bundle | None = None
) -> list[str]:
    """How the code of a launch differs from that of the launch before it; one line for each difference.

    `bundle` is the code of the launch, if it was packed from the folder `workspace`.
    """
    was, code = before.code, now.code
    if was.kind == code.kind == "bundle":
        return [] if bundle is None else named_files(store, was.digest, bundle)
    files = code.files
    if code.kind == "bundle" and workspace is not None:
        files = files_of(Entry.of_record(now.entry), workspace, None)
    if was.files is not None and files is not None:
        return changed_files(was.files, files)
    return [] if was.kind == code.kind else [f"code: there `{was.kind}`, here `{code.kind}`"]


def named_files(store: Store, before: str | None, bundle: Bundle) -> list[str]:
    """One line for each file that differs between the stored bundle with this digest and the new one."""
    from atoll.bundle.compare import bundle_differences

    return bundle_differences(store, before or "", bundle)


def files_of(entry: Entry, root: str, path: str | None) -> dict[str, str]:
    """Relative path -> the first digits of the SHA-256, of each file of the entry point's code."""
    places = [os.path.abspath(place) for place in (root, path) if place]
    waiting = _first_files(entry, places)
    found: dict[str, str] = {}
    while waiting and len(found) < _MOST_FILES:
        file = waiting.pop()
        name = _name(file, places)
        if name is None or name in found:
            continue
        try:
            source = Path(file).read_bytes()
        except OSError:
            continue
        found[name] = hashlib.sha256(source).hexdigest()[:_DIGITS]
        for module in _imports(source, name):
            waiting += _files_of_module(module, places)
    return dict(sorted(found.items()))


def _first_files(entry: Entry, places: list[str]) -> list[str]:
    if entry.script is not None:
        places.append(os.path.dirname(os.path.join(places[0], entry.script)))
        return [os.path.join(places[0], entry.script)]
    names = [entry.place, entry.place.rpartition(".")[0]] if entry.dotted else [entry.place]
    return [file for name in names for file in _files_of_module(name, places)]


def _files_of_module(module: str, places: list[str]) -> list[str]:
    """The file of a module and those of the packages above it."""
    parts = module.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts)) if all(parts)]
    files = [find_module(name, places) for name in names]
    return [file for file in files if file is not None and file.endswith(".py")]


def _name(file: str, places: list[str]) -> str | None:
    """The path below the first folder that contains the file; None if none does, or if it is an installed package."""
    file = os.path.abspath(file)
    if "site-packages" in Path(file).parts:
        return None
    return next((os.path.relpath(file, place) for place in places if file.startswith(place + os.sep)), None)


def _imports(source: bytes, name: str) -> Iterator[str]:
    """The modules that a file may import, by their full names; a name that a module defines is among them."""
    try:
        tree = syntax_tree(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    package = Path(name).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            if base:
                yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")
