"""Folders to pack and repositories to ask, for the tests of the workspace."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.bundle.files import OWN_IGNORE_FILE, Ignore, Listing, list_files, tracked_and_untracked, walk

_NOBODY = 65534


def forget_git_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the person who runs the tests, and none of a hook they run in."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@contextmanager
def nobodys_folder() -> Iterator[Path]:
    """An empty folder, and an ordinary user to work in it: root reads everything."""
    with tempfile.TemporaryDirectory() as folder:
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(folder, _NOBODY, -1)
            os.seteuid(_NOBODY)
        try:
            yield Path(os.path.realpath(folder))
        finally:
            if is_root:
                os.seteuid(0)


def git(root: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    return subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True, text=True).stdout


def plant(root: Path, tree: Mapping[str, str | bytes]) -> Path:
    for path, content in tree.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def clear(root: Path) -> None:
    for entry in root.iterdir():
        if entry.name == ".git":
            continue
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def by_git(root: Path) -> set[str]:
    place = os.fsencode(root)
    paths, _ = tracked_and_untracked("git", place, Ignore(place, OWN_IGNORE_FILE, like_git=False))
    return {os.fsdecode(path) for path in paths}


def by_walk(root: Path) -> set[str]:
    place = os.fsencode(root)
    return {os.fsdecode(path) for path in walk(place, place, Ignore(place, OWN_IGNORE_FILE, like_git=False))}


def listed(root: Path) -> Listing:
    return list_files(os.fsencode(os.path.realpath(root)), at_most=10_000)


def names(root: Path) -> set[str]:
    return {os.fsdecode(path) for path in listed(root).paths}
