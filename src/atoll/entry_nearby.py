"""Which module or script somebody may have meant, by what lies in the folder where it was looked for."""

from __future__ import annotations

import os

from atoll.errors import did_you_mean


def module_meant(module: str, root: str) -> str:
    """`, did you mean `package.train`?` for the first part of the name that is not there; or nothing."""
    folder, found = root, ""
    for part in module.split("."):
        there = _modules(folder)
        if part not in there:
            return did_you_mean(found + part, [found + name for name in sorted(there)])
        folder, found = os.path.join(folder, part), f"{found}{part}."
    return ""


def script_meant(path: str) -> str:
    """`, did you mean `train.py`?` or nothing."""
    folder, name = os.path.split(path)
    return did_you_mean(name, [other for other in _listed(folder) if other.endswith(".py")])


def _modules(folder: str) -> set[str]:
    """The names that can be imported from a folder: its `.py` files, and folders, which are packages."""
    files = {name.removesuffix(".py") for name in _listed(folder) if name.endswith(".py")}
    folders = {name for name in _listed(folder) if os.path.isdir(os.path.join(folder, name))}
    return {name for name in files | folders if name.isidentifier() and name != "__pycache__"}


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
