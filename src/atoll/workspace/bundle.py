"""Packing a folder into one archive that depends on nothing but its files, and putting it in the store.

The archive is a gzipped tar with sorted paths, no times, no owners and two modes, so equal folders give equal bytes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING

from atoll import keys
from atoll.errors import ConfigError, KeyExists, KeyNotFound
from atoll.workspace.entries import Entries, File, check_links, look_at, stamp
from atoll.workspace.listing import list_files
from atoll.workspace.manifest import Manifest, biggest_shares, count_text, largest_files, printable, size_text

if TYPE_CHECKING:
    from tarfile import TarFile, TarInfo

    from atoll.stores.base import Store

MAX_BYTES = 256 * 1024**2
MAX_FILES = 20_000
_GZIP_LEVEL = 1
_LOOK_AT = 10
"""Times the limit: how many files are worth looking at to say which folder is too big."""
_LEAVE_OUT = "name what replicas do not need in .gitignore, or in .atollignore if git tracks it"


@dataclass(frozen=True)
class Bundle:
    """A packed folder. `data` lies in an unnamed temporary file, not in memory; it goes when the bundle does."""

    digest: str
    """The sha256 of `data`, in hex."""
    manifest: Manifest
    data: memoryview

    @property
    def key(self) -> str:
        """Its name in the store."""
        return keys.bundle(self.digest)


def build(root: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> Bundle:
    """Pack what the ignore rules leave of the folder `root`; `ConfigError` says what stands in the way."""
    place = os.fsencode(os.path.realpath(root))
    if not os.path.isdir(place):
        raise ConfigError(f"`{root}` is not a folder")
    listing = list_files(place, at_most=_LOOK_AT * max_files)
    entries = look_at(place, listing.paths)
    _check_size(root, entries, max_bytes, max_files)
    notes = (*listing.notes, *entries.notes, *check_links(entries), *_cache_notes(entries))
    digest, data = _packed(place, entries)
    largest = largest_files({path: file.size_bytes for path, file in entries.files.items()})
    manifest = Manifest(digest, entries.count, entries.size_bytes, len(data), largest, listing.source, notes)
    return Bundle(digest, manifest, data)


def upload(bundle: Bundle, store: Store) -> str:
    """Put the bundle in the store, unless it is there already, and return its key."""
    try:
        store.get(bundle.key, length=1)  # saves sending it all just to hear that it exists
    except KeyNotFound:
        try:
            store.create(bundle.key, bundle.data)
        except KeyExists:
            pass  # the name is the content
    return bundle.key


def _check_size(root: Path, entries: Entries, max_bytes: int, max_files: int) -> None:
    if not entries.count:
        raise ConfigError(
            f"there is nothing to send in `{root}`: it has no files, or all of them are ignored",
            hint="start from the folder with your code, or see what `git status --ignored` says",
        )
    has_too_many, is_too_big = entries.count > max_files, entries.size_bytes > max_bytes
    if not has_too_many and not is_too_big:
        return
    shares = biggest_shares(entries.sizes, by_count=not is_too_big)
    at_least = "at least " if entries.count >= _LOOK_AT * max_files else ""
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
    """Write the archive of `entries` to `sink`; a file that is no longer what it was is an error that names it."""
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
