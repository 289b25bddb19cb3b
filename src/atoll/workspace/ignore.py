"""The ignore files of a folder tree, and which paths they exclude. Each file is read once, when first needed."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.workspace.patterns import Pattern, parse
from atoll.workspace.repository import git_folder

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


@dataclass(frozen=True)
class _Layer:
    """The patterns of one ignore file, last line first, and how much of a path lies above it."""

    above: int
    patterns: tuple[Pattern, ...]


class Ignore:
    """The rules of every file called `filename` in the folder `top` and below.

    With `like_git`, as git reads them: not through links, with `info/exclude`, and afresh in a nested repository.
    """

    def __init__(self, top: bytes, filename: bytes, *, like_git: bool) -> None:
        self._top, self._filename, self._like_git = top, filename, like_git
        self._folders: dict[bytes, tuple[_Layer, ...] | None] = {}

    def excludes(self, path: bytes, *, is_folder: bool) -> bool:
        """True if a rule excludes `path` (relative to the top) or a folder above it."""
        layers = self._layers(path.rpartition(b"/")[0])
        return layers is None or _is_excluded(layers, path, is_folder)

    def _layers(self, folder: bytes) -> tuple[_Layer, ...] | None:
        """What applies inside `folder`, or None if the folder itself is excluded: nothing below it comes back."""
        if folder not in self._folders:
            self._folders[folder] = self._read_layers(folder)
        return self._folders[folder]

    def _read_layers(self, folder: bytes) -> tuple[_Layer, ...] | None:
        outer = self._layers(folder.rpartition(b"/")[0]) if folder else ()
        if outer is None or (folder and _is_excluded(outer, folder, True)):
            return None
        place = os.path.join(self._top, folder)
        sources = [os.path.join(place, self._filename)]
        if self._like_git and (inside := git_folder(place)):
            outer, sources = (), [os.path.join(inside, b"info", b"exclude"), *sources]
        above = len(folder) + 1 if folder else 0
        read = (parse(_content(source, follow=not self._like_git)) for source in sources)
        return outer + tuple(_Layer(above, tuple(reversed(patterns))) for patterns in read if patterns)


def _is_excluded(layers: tuple[_Layer, ...], path: bytes, is_folder: bool) -> bool:
    name = path.rpartition(b"/")[2]
    for layer in reversed(layers):
        below = path[layer.above :]
        for pattern in layer.patterns:
            if pattern.folders_only and not is_folder:
                continue
            if pattern.matches(name if pattern.by_name else below):
                return not pattern.takes_back
    return False


def _content(file: bytes, *, follow: bool) -> bytes:
    """The bytes of an ignore file; none if there is no such regular file."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
        with os.fdopen(handle, "rb") as opened:
            return opened.read() if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    except OSError as exc:
        if exc.errno in (*_NO_FILE, errno.EISDIR):
            return b""
        raise ConfigError(f"cannot read the ignore file `{os.fsdecode(file)}`: {exc.strerror}") from exc
