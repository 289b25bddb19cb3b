"""What counts as a git repository on disk, without asking git."""

from __future__ import annotations

import os


def is_repository(folder: bytes) -> bool:
    """True if `folder` is the top of a git work tree: a clone, a linked work tree or a checked-out submodule."""
    return git_folder(folder) is not None


def git_folder(folder: bytes) -> bytes | None:
    """Where the repository of the work tree at `folder` keeps its things, or None if there is none."""
    place = os.path.join(folder, b".git")
    if os.path.isfile(place):
        place = os.path.join(folder, _pointed_to(place))
    has_objects = os.path.isdir(os.path.join(place, b"objects")) and os.path.isdir(os.path.join(place, b"refs"))
    is_linked = os.path.isfile(os.path.join(place, b"commondir"))
    return place if os.path.lexists(os.path.join(place, b"HEAD")) and (has_objects or is_linked) else None


def work_tree_of(folder: bytes) -> bytes | None:
    """The nearest work tree that `folder` (an absolute path) is in, or None."""
    while not is_repository(folder):
        parent = os.path.dirname(folder)
        if parent == folder:
            return None
        folder = parent
    return folder


def _pointed_to(file: bytes) -> bytes:
    try:
        with open(file, "rb") as opened:
            text = opened.read(8192)
    except OSError:
        return b"."
    return text.removeprefix(b"gitdir:").strip() if text.startswith(b"gitdir:") else b"."
