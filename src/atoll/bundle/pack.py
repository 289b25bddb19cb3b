"""Packs a folder into one archive and uploads it. `runs.run` calls `build` and `upload`.

The archive is a gzipped tar with sorted paths, no times, no owners and two modes, so equal folders give equal bytes.
`Manifest` describes it for people; a folder that is too big is refused with the largest files in it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING

from atoll import keys
from atoll.bundle.files import list_files
from atoll.errors import ConfigError, KeyExists, KeyNotFound

if TYPE_CHECKING:
    from tarfile import TarFile, TarInfo

    from atoll.stores.base import Store

MAX_BYTES = 256 * 1024**2
MAX_FILES = 20_000
_GZIP_LEVEL = 1
_WALK_LIMIT = 10
"""Times the limit: a walk stops after this many files; they suffice to name the folder that is too big."""
_LEAVE_OUT = "name what replicas do not need in .gitignore, or in .atollignore if git tracks it"
_SHOWN = 5
_DOMINATES = 0.9
_MAX_HOPS = 40
_MAX_PATH_BYTES, _MAX_NAME_BYTES, _MAX_DEPTH = 1024, 255, 100
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OTHER_NAME = "rename it, or name it in .gitignore or .atollignore"


@dataclass(frozen=True)
class Bundle:
    """A packed folder. `data` maps an unnamed temporary file, which is deleted with the bundle."""

    digest: str
    """The sha256 of `data`, in hex."""
    manifest: Manifest
    data: memoryview

    @property
    def key(self) -> str:
        """Its key in the store."""
        return keys.bundle(self.digest)


def build(
    root: Path,
    *,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
    without: Iterable[str | os.PathLike[str]] = (),
) -> Bundle:
    """Pack the files of the folder `root` that no ignore rule excludes; `ConfigError` if that is not possible.

    The folders `without`, if they are under `root`, are left out.
    """
    place = os.fsencode(os.path.realpath(root))
    if not os.path.isdir(place):
        raise ConfigError(f"`{root}` is not a folder")
    listing = list_files(place, at_most=_WALK_LIMIT * max_files, without=_below(place, without))
    entries = read_entries(place, listing.paths)
    _check_size(root, entries, max_bytes, max_files)
    notes = (*listing.notes, *entries.notes, *check_links(entries), *_cache_notes(entries))
    digest, data = _packed(place, entries)
    largest = largest_files({path: file.size_bytes for path, file in entries.files.items()})
    manifest = Manifest(digest, entries.count, entries.size_bytes, len(data), largest, listing.source, notes)
    return Bundle(digest, manifest, data)


def _below(place: bytes, folders: Iterable[str | os.PathLike[str]]) -> list[bytes]:
    """Those of these folders that are under `place`, relative to it."""
    real = [os.fsencode(os.path.realpath(folder)) for folder in folders]
    return [os.path.relpath(folder, place) for folder in real if folder.startswith(place.rstrip(b"/") + b"/")]


def upload(bundle: Bundle, store: Store) -> str:
    """Upload the bundle unless the store has it, and return its key."""
    try:
        store.get(bundle.key, length=1)  # saves the upload if the bundle exists
    except KeyNotFound:
        try:
            store.create(bundle.key, bundle.data)
        except KeyExists:
            pass  # the key is the digest, so the content is equal
    return bundle.key


def _check_size(root: Path, entries: Entries, max_bytes: int, max_files: int) -> None:
    if not entries.count:
        raise ConfigError(
            f"`{root}` has no files to send, or all of them are ignored",
            hint="start in the folder with your code; `git status --ignored` lists ignored files",
        )
    has_too_many, is_too_big = entries.count > max_files, entries.size_bytes > max_bytes
    if not has_too_many and not is_too_big:
        return
    shares = biggest_shares(entries.sizes, by_count=not is_too_big)
    at_least = "at least " if entries.count >= _WALK_LIMIT * max_files else ""
    found = f"{at_least}{size_text(entries.size_bytes)} in {count_text(entries.count)}"
    limit = f"{size_text(max_bytes)} in {count_text(max_files)}"
    head = f"`{root}` is too big to send: {found}, and the limit is {limit}; the biggest are:"
    raise ConfigError(
        "\n".join([head, *(f"  {share.text()}" for share in shares)]),
        hint=f"{_LEAVE_OUT}: a line such as `/{printable(shares[0].name)}`",
    )


def _cache_notes(entries: Entries) -> list[str]:
    if not any("__pycache__" in path.split("/") for path in entries.files):
        return []
    return ["`__pycache__` is sent too, so the digest changes with every run here; name it in .gitignore"]


def _packed(root: bytes, entries: Entries) -> tuple[str, memoryview]:
    import hashlib
    import mmap
    import tempfile

    try:
        with tempfile.TemporaryFile() as file:
            write_archive(root, entries, file)
            file.flush()
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as exc:
        raise ConfigError(f"cannot write the bundle to the temporary folder: {exc}") from exc
    return hashlib.sha256(data).hexdigest(), data


def write_archive(root: bytes, entries: Entries, sink: IO[bytes]) -> None:
    """Write the archive of `entries` to `sink`; `ConfigError` names a file that has changed since the listing."""
    import gzip
    import tarfile

    with (
        gzip.GzipFile(filename="", fileobj=sink, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(chain(entries.files, entries.links)):
            info = tarfile.TarInfo(path)
            if path in entries.links:
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, entries.links[path], 0o777
                tar.addfile(info)
            else:
                _add_file(tar, info, os.path.join(root, path.encode()), entries.files[path])


def _add_file(tar: TarFile, info: TarInfo, place: bytes, file: File) -> None:
    info.size, info.mode = file.size_bytes, 0o755 if file.is_executable else 0o644
    with _opened(place, info.name, file) as source:
        try:
            tar.addfile(info, source)
        except OSError as exc:
            if stamp(os.fstat(source.fileno())) != file.stamp:
                raise _changed(info.name) from exc
            raise ConfigError(f"cannot pack `{printable(info.name)}`: {exc}") from exc
        if stamp(os.fstat(source.fileno())) != file.stamp:
            raise _changed(info.name)


@contextmanager
def _opened(place: bytes, name: str, file: File) -> Iterator[IO[bytes]]:
    try:
        handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise _changed(name) from exc
        hint = "make it readable, or name it in .gitignore or .atollignore"
        raise ConfigError(f"cannot read `{printable(name)}`: {exc.strerror}", hint=hint) from exc
    if stamp(os.fstat(handle)) != file.stamp:
        os.close(handle)
        raise _changed(name)
    with os.fdopen(handle, "rb") as source:
        yield source


def _changed(name: str) -> ConfigError:
    hint = "try again when nothing writes to it, or name it in .gitignore or .atollignore"
    return ConfigError(f"`{printable(name)}` changed while it was being read", hint=hint)


class LinkProblem(Exception):
    """Why a link cannot be part of a bundle."""


@dataclass(frozen=True)
class File:
    """A regular file; a different `stamp` later means that it has changed."""

    size_bytes: int
    is_executable: bool
    stamp: tuple[int, ...]


@dataclass(frozen=True)
class Entries:
    """Files and links by path, and notes about files that were left out."""

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
    """Two equal stamps of a file mean that it was not written to in between, as far as the file system knows."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def read_entries(root: bytes, paths: Iterable[bytes]) -> Entries:
    """The files and links at these paths. Special files are left out with a note, deleted files without."""
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
            raise ConfigError(f"cannot read `{printable(path)}`: {exc.strerror}") from exc
    return entries


def check_links(entries: Entries) -> list[str]:
    """Raise `ConfigError` for all links that lead outside; return notes about links with no target in the bundle."""
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
        raise LinkProblem("is a circle of links")
    return target.split("/")


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"the name {raw!r} is not UTF-8, so it would not be the same on every machine",
            hint=_OTHER_NAME,
        ) from exc


@dataclass(frozen=True)
class Manifest:
    """A description of the content of a bundle. `text()` is for people."""

    digest: str
    count: int
    """Files and links."""
    size_bytes: int
    """The size of the content; `packed_bytes` is the size of the upload."""
    packed_bytes: int
    largest: tuple[tuple[str, int], ...]
    """The five largest files and their sizes, largest first."""
    source: str = "walk"
    """`git` if git named the files, `walk` if the ignore files alone decided."""
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """A few lines to print before the upload."""
        by = "git" if self.source == "git" else "the ignore files"
        sizes = f"{size_text(self.size_bytes)}, {size_text(self.packed_bytes)} packed"
        head = f"bundle {self.digest[:12]}: {count_text(self.count)}, {sizes}, chosen by {by}"
        rows = [f"  {size_text(size):>10}  {printable(name)}" for name, size in self.largest]
        return "\n".join([head, *rows, *(f"  note: {printable(note)}" for note in self.notes)])


@dataclass(frozen=True)
class Share:
    """A file or folder with its size in the bundle; the name of a folder ends with `/`."""

    name: str
    size_bytes: int
    count: int

    def text(self) -> str:
        files = f"  ({count_text(self.count)})" if self.name.endswith("/") else ""
        return f"{size_text(self.size_bytes):>10}  {printable(self.name)}{files}"


def largest_files(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The five largest, largest first; equal ones by name."""
    return tuple(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN])


def biggest_shares(sizes: Mapping[str, int], *, by_count: bool = False) -> list[Share]:
    """The five files or folders to leave out first, none inside another.

    If one file or folder is nearly all of a folder, it is listed instead of that folder.
    """
    shares, inside = _shares(sizes)

    def weight(share: Share) -> int:
        return share.count if by_count else share.size_bytes

    def heaviest(names: Sequence[str]) -> list[Share]:
        return sorted((shares[name] for name in names), key=lambda share: (-weight(share), share.name))

    def narrowed(share: Share) -> Share:
        while share.name in inside:
            largest = heaviest(inside[share.name])[0]
            if weight(largest) < _DOMINATES * weight(share):
                break
            share = largest
        return share

    return [narrowed(share) for share in heaviest(inside[""])[:_SHOWN]]


def _shares(sizes: Mapping[str, int]) -> tuple[dict[str, Share], dict[str, list[str]]]:
    """Every file and folder by name, and the names directly in each folder; the root is the empty name."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    inside: dict[str, list[str]] = defaultdict(list)
    for path, size in sizes.items():
        parts = path.split("/")
        above = ""
        for name in [*("/".join(parts[:depth]) + "/" for depth in range(1, len(parts))), path]:
            if name not in totals:
                inside[above].append(name)
            totals[name][0] += size
            totals[name][1] += 1
            above = name
    return {name: Share(name, *total) for name, total in totals.items()}, dict(inside)


def size_text(size_bytes: int) -> str:
    """Such as `512 B` or `1.5 MiB`."""
    power = min((max(size_bytes, 1).bit_length() - 1) // 10, 4)
    return f"{size_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB" if power else f"{size_bytes} B"


def count_text(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """The text with escaped control characters and broken unicode, so that a file name cannot garble a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
