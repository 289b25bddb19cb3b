"""What is packed: the files and links of a folder as they were when looked at, and whether links stay inside."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from atoll.errors import ConfigError
from atoll.workspace.manifest import printable

_MAX_HOPS = 40
_MAX_PATH_BYTES, _MAX_NAME_BYTES, _MAX_DEPTH = 1024, 255, 100
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


_OTHER_NAME = "rename it, or name it in .gitignore or .atollignore"


class LinkProblem(Exception):
    """Why a link cannot be part of a bundle."""


@dataclass(frozen=True)
class File:
    """A regular file; `stamp` tells whether it has changed since."""

    size_bytes: int
    is_executable: bool
    stamp: tuple[int, ...]


@dataclass(frozen=True)
class Entries:
    """Files and links by path, and notes on what was left out."""

    files: dict[str, File] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.files) + len(self.links)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def sizes(self) -> dict[str, int]:
        return {path: file.size_bytes for path, file in self.files.items()} | dict.fromkeys(self.links, 0)


def stamp(found: os.stat_result) -> tuple[int, ...]:
    """Equal for two looks at a file if, as far as the file system says, nobody wrote to it between them."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def look_at(root: bytes, paths: Iterable[bytes]) -> Entries:
    """What is at each path. Special files are left out with a note; what is gone by now is left out."""
    entries = Entries()
    for raw in paths:
        place, path = os.path.join(root, raw), _text(raw)
        if problem := path_problem(path):
            raise ConfigError(f"`{printable(path)}` {problem}", hint=_OTHER_NAME)
        try:
            found = os.lstat(place)
            if stat.S_ISREG(found.st_mode):
                is_executable = bool(found.st_mode & stat.S_IXUSR)
                entries.files[path] = File(found.st_size, is_executable, stamp(found))
            elif stat.S_ISLNK(found.st_mode):
                entries.links[path] = _text(os.readlink(place))
            else:
                kind = _KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")
                entries.notes.append(f"`{path}` is {kind}: left out")
        except FileNotFoundError:
            continue
        except OSError as exc:
            raise ConfigError(f"cannot look at `{printable(path)}`: {exc.strerror}") from exc
    return entries


def check_links(entries: Entries) -> list[str]:
    """Refuse links that lead outside, all at once; return notes on links to what is not in the bundle."""
    notes, problems = [], []
    folders = {""} | {path[:at] for path in entries.sizes for at, char in enumerate(path) if char == "/"}
    for path, target in entries.links.items():
        try:
            end = resolve(path, entries.links)
        except LinkProblem as exc:
            problems.append(f"  `{printable(path)}` -> `{printable(target)}`: {exc}")
            continue
        if end not in entries.files and end not in folders:
            notes.append(f"the link `{path}` -> `{target}` leads to nothing in the bundle")
    if problems:
        raise ConfigError(
            "\n".join(["replicas cannot follow these links:", *problems]),
            hint="name them in .gitignore or .atollignore, or make them relative links inside the folder",
        )
    return notes


def resolve(path: str, links: Mapping[str, str]) -> str:
    """The path that the link at `path` leads to, through other links; `LinkProblem` if it ever leaves the root."""
    here: list[str] = []
    ahead = path.split("/")[::-1]
    hops = 0
    while ahead:
        part = ahead.pop()
        if part in ("", "."):
            continue
        if part == ".." and not here:
            raise LinkProblem("leads outside the folder")
        if part == "..":
            here.pop()
            continue
        here.append(part)
        if (target := links.get("/".join(here))) is not None:
            hops += 1
            here.pop()
            ahead += _steps(target, hops)[::-1]
    return "/".join(here)


def path_problem(path: str) -> str | None:
    """Why `path` cannot be the path of a file in a bundle, or None."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        return "is not a plain path inside the folder"
    longest = max(len(part.encode()) for part in parts)
    if len(path.encode()) > _MAX_PATH_BYTES or longest > _MAX_NAME_BYTES or len(parts) > _MAX_DEPTH:
        return f"is longer than {_MAX_PATH_BYTES} bytes or deeper than {_MAX_DEPTH} folders"
    return None


def _steps(target: str, hops: int) -> list[str]:
    if target.startswith("/"):
        raise LinkProblem("is absolute")
    if not target or "\0" in target or len(target.encode()) > _MAX_PATH_BYTES:
        raise LinkProblem(f"is not 1 to {_MAX_PATH_BYTES} bytes")
    if hops > _MAX_HOPS:
        raise LinkProblem("goes round in circles")
    return target.split("/")


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"the name {raw!r} is not UTF-8, so it would not be the same on every machine",
            hint=_OTHER_NAME,
        ) from exc
