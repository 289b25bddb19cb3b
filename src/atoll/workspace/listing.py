"""Which files of a folder belong to the bundle: asked of git where it can answer, else found by walking."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from atoll.errors import ConfigError
from atoll.workspace.ignore import Ignore
from atoll.workspace.repository import work_tree_of

OWN_IGNORE_FILE = b".atollignore"


@dataclass(frozen=True)
class Listing:
    """Paths relative to the folder, sorted; `notes` says what a person may be surprised by."""

    paths: tuple[bytes, ...]
    source: str
    """`git` or `walk`."""
    notes: tuple[str, ...] = ()


def list_files(root: bytes, *, at_most: int) -> Listing:
    """Every file and link under `root` (absolute, real) that no ignore rule excludes; a walk stops after `at_most`."""
    from shutil import which

    own = Ignore(root, OWN_IGNORE_FILE, like_git=False)
    top = work_tree_of(root)
    if top is not None and (git := which("git")):
        from atoll.workspace.git import tracked_and_untracked

        paths, notes = tracked_and_untracked(git, root, own)
        return Listing(tuple(sorted(paths)), "git", tuple(notes))
    missing = "git is not on PATH, so .gitignore decides alone: tracked files that it names are left out"
    found = islice(walk(root, top or root, own), at_most)
    return Listing(tuple(sorted(found)), "walk", (missing,) if top else ())


def walk(root: bytes, top: bytes, own: Ignore) -> Iterator[bytes]:
    """Everything under `root` but folders, without what `own` and the .gitignore files from `top` down exclude."""
    rules = Ignore(top, b".gitignore", like_git=True)
    prefix = b"" if root == top else os.path.relpath(root, top) + b"/"
    folders = [b""]
    while folders:
        folder = folders.pop()
        for entry in _entries(os.path.join(root, folder)):
            path = os.path.join(folder, entry.name)
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name == b".git" or rules.excludes(prefix + path, is_folder=is_folder):
                continue
            if own.excludes(path, is_folder=is_folder):
                continue
            if is_folder:
                folders.append(path)
            else:
                yield path


def _entries(folder: bytes) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []  # removed since its parent was read
    except OSError as exc:
        raise ConfigError(
            f"cannot read the folder `{os.fsdecode(folder)}`: {exc.strerror}",
            hint="make it readable, or name it in .gitignore or .atollignore",
        ) from exc
