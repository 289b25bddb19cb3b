"""How to install what is missing: the one place that words it, right for a checkout, a copy of one, and a package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def install_command(extra: str) -> str:
    """The command that brings an extra of Atoll, such as `pip install 'atoll[train]'`."""
    return f"pip install {requirement(Path(__file__), f'[{extra}]')}"


def reinstall_command() -> str:
    """The command that builds and installs Atoll itself once more."""
    return f"pip install --force-reinstall --no-deps {requirement(Path(__file__))}"


def requirement(module: Path, extra: str = "") -> str:
    """What pip is told to install the Atoll that this file belongs to, from where it came."""
    import shlex

    root = checkout(module)
    if root is not None:
        return f"-e {shlex.quote(f'{_from_here(root)}{extra}')}"
    return shlex.quote(_named(_direct_url(module), extra))


def checkout(module: Path) -> Path | None:
    """The folder of the clone that this file of ours runs from; None if it is an installed copy."""
    source = module.absolute().parents[1]
    return source.parent if source.name == "src" and (source.parent / "pyproject.toml").is_file() else None


def _named(origin: dict[str, Any], extra: str) -> str:
    """A requirement in the words of pip: the name alone is for who has it from an index."""
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    url = str(origin.get("url", ""))
    if not url:
        return f"atoll{extra}"
    if url.startswith("file://") and "vcs_info" not in origin:
        return f"{_from_here(Path(url2pathname(urlsplit(url).path)))}{extra}"
    vcs = origin.get("vcs_info", {})
    prefix = f"{vcs['vcs']}+" if "vcs" in vcs else ""
    revision = f"@{vcs['requested_revision']}" if "requested_revision" in vcs else ""
    return f"atoll{extra} @ {prefix}{url}{revision}"


def _direct_url(module: Path) -> dict[str, Any]:
    """What pip wrote down of where it got this copy from; empty if from an index, or if nobody wrote it down."""
    import json
    from importlib.metadata import distributions

    folder = str(module.absolute().parents[1])
    for found in distributions(name="atoll", path=[folder]):
        try:
            written = json.loads(found.read_text("direct_url.json") or "{}")
        except ValueError:
            return {}
        return written if isinstance(written, dict) else {}
    return {}


def _from_here(root: Path) -> str:
    try:
        return "." if os.path.samefile(root, os.curdir) else str(root)
    except OSError:  # the working folder was deleted, or the clone
        return str(root)
