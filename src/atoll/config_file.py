"""Finding `atoll.toml` or `[tool.atoll]`, reading it, and telling on which line a key is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError

_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?\Z")
_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_.-])+)\s*=""")


@dataclass(frozen=True)
class ConfigFile:
    """One file with settings: its path, its text, and the table that is ours."""

    path: Path
    text: str
    table: Mapping[str, Any]
    prefix: tuple[str, ...] = ()
    """`("tool", "atoll")` in a pyproject.toml."""

    def place(self, *key: str) -> str:
        """`atoll.toml:3` for a key, or just the file where the line cannot be told."""
        line = line_of(self.text, (*self.prefix, *key))
        shown = _shown(self.path)
        return f"{shown}:{line}" if line else shown


def find(directory: Path) -> ConfigFile | None:
    """The nearest file in `directory` or above, up to the repository's root or the home folder."""
    home = Path(os.path.expanduser("~"))
    for folder in (directory, *directory.parents):
        if found := _in_folder(folder):
            return found
        if folder == home or (folder / ".git").exists():
            return None
    return None


def read(path: Path) -> ConfigFile:
    """This very file; a missing or broken one is a `ConfigError`."""
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as exc:
        raise ConfigError(f"cannot read {_shown(path)}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{_shown(path)} is not valid TOML: {exc}") from exc
    if path.name != "pyproject.toml":
        return ConfigFile(path, text, table)
    ours = table.get("tool", {}).get("atoll", {})
    return ConfigFile(path, text, ours, ("tool", "atoll"))


def _in_folder(folder: Path) -> ConfigFile | None:
    if (path := folder / "atoll.toml").is_file():
        return read(path)
    path = folder / "pyproject.toml"
    # Most projects have a pyproject.toml without a word about us; a broken one is then none of our business.
    if path.is_file() and "tool.atoll" in path.read_text(encoding="utf-8", errors="replace"):
        return read(path)
    return None


def line_of(text: str, key: tuple[str, ...]) -> int | None:
    """The line (from 1) where a key is set; None when it is inside an inline table or a long value."""
    wanted = ".".join(key)
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = _plain(header[1])
            if section == wanted:
                return number
        elif found := _KEY.match(line):
            name = _plain(found[1])
            if (f"{section}.{name}" if section else name) == wanted:
                return number
    return None


def _plain(dotted: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in dotted.split("."))


def _shown(path: Path) -> str:
    """Short where the file is in or below the current folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
