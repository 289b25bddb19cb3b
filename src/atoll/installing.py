"""How to install what is missing: the one place that words it, right for a checkout and for an installed package."""

from __future__ import annotations

import os
from pathlib import Path


def install_command(extra: str) -> str:
    """The command that brings an extra of Atoll, such as `pip install 'atoll[train]'`."""
    import shlex

    root = checkout(Path(__file__))
    if root is None:
        return f"pip install {shlex.quote(f'atoll[{extra}]')}"
    return f"pip install -e {shlex.quote(f'{_from_here(root)}[{extra}]')}"


def checkout(module: Path) -> Path | None:
    """The folder of the clone that this file of ours runs from; None if it is an installed copy."""
    source = module.absolute().parents[1]
    return source.parent if source.name == "src" and (source.parent / "pyproject.toml").is_file() else None


def _from_here(root: Path) -> str:
    try:
        return "." if os.path.samefile(root, os.curdir) else str(root)
    except OSError:  # the working folder was deleted
        return str(root)
