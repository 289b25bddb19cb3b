"""Objects as files under one folder: on a disk of this machine, or on a file system that several machines mount.

A writer fills a temporary file in a private folder, makes it durable on disk, and then gives it its name: `create` by
hard link, which the file system refuses if the name exists; `put` by rename. Both are atomic, so a reader sees a whole
object or none. A crash leaves at most a temporary file, which a later writer removes.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlsplit

from atoll.errors import ConfigError, KeyExists, KeyNotFound, did_you_mean
from atoll.stores.base import Buffer, Data, check_key, check_prefix, check_range
from atoll.stores.fast import size_of
from atoll.stores.file import io
from atoll.stores.file.io import FileBody, Given, file_system, given, is_local, read, write
from atoll.stores.file.paths import TEMP_FOLDER, file_errors, key_of_file, key_of_folder, path_of
from atoll.stores.file.recycle import SPARE_FOLDER, RecycledFiles

log = logging.getLogger("atoll.stores")
_LEFTOVER_AGE_S = 24 * 3600.0
_DEFAULTS = {"fsync": True, "recycle": False}
_AFTER_REFUSAL_S = 60.0
"""How long to write without huge pages after the kernel had none: the search for one can be slow."""
_numbers = count()


class FileStore:
    """`file:///folder`, or a plain path. With `fsync=False`, objects may be lost in a power failure.

    `recycle=True` writes new objects into the files of deleted ones, and lets rounds delete objects that all replicas
    have read. It is faster; a late reader may get bytes of another object, which checksums detect.
    """

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = True, recycle: bool = False) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self._root = str(self.root)  # paths are strings here, because `Path` is slower
        options = {"fsync": fsync, "recycle": recycle}
        chosen = [f"{name}={int(value)}" for name, value in options.items() if value is not _DEFAULTS[name]]
        self.uri = "file://" + quote(os.fsencode(self.root)) + ("?" + "&".join(chosen) if chosen else "")
        self._fsync = fsync
        self._is_swept = False
        self._prefix = f"{uuid.uuid4().hex}."
        self._kind: str | None = None
        self._no_huge_until = 0.0
        self._folders: set[str] = set()
        self._recycled = RecycledFiles(f"{self._root}/{TEMP_FOLDER}/{SPARE_FOLDER}") if recycle else None

    @property
    def recycles(self) -> bool:
        return self._recycled is not None

    @classmethod
    def from_uri(cls, uri: str, **options: Any) -> FileStore:
        address, _, query = uri.partition("?") if "://" in uri else (uri, "", "")
        options = {**dict(parse_qsl(query, keep_blank_values=True)), **options}
        for name in sorted(set(options) - set(_DEFAULTS)):
            raise ConfigError(
                f"a file:// store has no option `{name}`{did_you_mean(name, list(_DEFAULTS))}",
                hint=f"options: {', '.join(_DEFAULTS)}",
            )
        return cls(_path_in(address), **{name: _switch(name, value) for name, value in options.items()})

    def __repr__(self) -> str:
        return f"FileStore({str(self.root)!r})"

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        check_range(start, length)
        fd = self._open(key)
        try:
            with file_errors("read", self.uri, key):
                return read(fd, start, length, may_map=is_local(self._file_system()))
        finally:
            os.close(fd)

    def open(self, key: str) -> FileBody:
        return FileBody(self._open(key), self.uri, key, may_be_huge=self._file_system() == "tmpfs")

    def put(self, key: str, data: Data) -> None:
        path, whole = self._path(key), given(data)
        with file_errors("write", self.uri, key), self._written(whole) as temp:
            folder = self._make_folder(os.path.dirname(path))
            os.replace(temp, path)
            self._sync_folder(folder)

    def create(self, key: str, data: Data) -> None:
        path, whole = self._path(key), given(data)
        with file_errors("create", self.uri, key), self._written(whole) as temp:
            folder = self._make_folder(os.path.dirname(path))
            try:
                os.link(temp, path)
            except FileExistsError:
                # A network file system may repeat a link whose response was lost; our file then has two names. (S12)
                if os.stat(temp).st_nlink < 2:
                    raise KeyExists(key, uri=self.uri) from None
            self._sync_folder(folder)

    def list(self, prefix: str = "") -> Iterator[str]:
        folder, slash, _ = check_prefix(prefix).rpartition("/")
        start = path_of(self._root, folder, is_folder=True) if folder else self._root
        return self._walk(start, folder + slash, prefix)

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        for key in self.list(prefix):
            with suppress(FileNotFoundError, NotADirectoryError):  # deleted since
                yield key, os.stat(self._path(key)).st_size

    def delete(self, key: str) -> None:
        path = self._path(key)
        with file_errors("delete", self.uri, key):
            try:
                if self._recycled is None or not self._recycled.keep(path):
                    os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            self._sync_folder(os.path.dirname(path))

    def _open(self, key: str) -> int:
        path = self._path(key)
        with file_errors("read", self.uri, key):
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise KeyNotFound(key, uri=self.uri) from None

    def _file_system(self) -> str:
        if self._kind is None:
            self._kind = file_system(self.root)
        return self._kind

    def _path(self, key: str) -> str:
        return path_of(self._root, check_key(key), is_folder=False)

    @contextmanager
    def _written(self, data: Given) -> Iterator[str]:
        """A temporary file with these bytes, durable on disk; removed afterwards unless it was renamed."""
        temp = self._new_temp()
        is_recycled = self._recycled is not None and self._recycled.take(size_of(data), temp)
        try:
            fd = os.open(temp, os.O_RDWR | os.O_CLOEXEC | (0 if is_recycled else os.O_CREAT | os.O_EXCL), 0o666)
            try:
                if not (self.recycles and self._write_huge(fd, data)):
                    write(fd, data)
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            yield temp
        except OSError as exc:
            if exc.errno == errno.ENOSPC and self._recycled is not None:
                self._recycled.clear()  # a retry can use their space
            raise
        finally:
            with suppress(OSError):
                os.unlink(temp)

    def _write_huge(self, fd: int, data: Given) -> bool:
        """Write a large file of a tmpfs in huge pages; False if it must be written like any other."""
        if size_of(data) < io.HUGE or self._file_system() != "tmpfs":
            return False
        if time.monotonic() < self._no_huge_until:
            return False
        is_done = io.write_huge(fd, data)
        if not is_done:
            log.debug("no huge pages for %s in the next %g s", self.uri, _AFTER_REFUSAL_S)
            self._no_huge_until = time.monotonic() + _AFTER_REFUSAL_S
        return is_done

    def _new_temp(self) -> str:
        folder = self._make_folder(f"{self._root}/{TEMP_FOLDER}")
        if not self._is_swept:
            self._is_swept = True
            _sweep(folder)
        return f"{folder}/{self._prefix}{os.getpid()}.{next(_numbers)}"  # a forked child has the same prefix and count

    def _make_folder(self, folder: str) -> str:
        """Create a folder and those above it, each durable in its parent. Folders are never removed."""
        if folder not in self._folders:
            if not os.path.isdir(folder):
                above = self._make_folder(os.path.dirname(folder))
                with suppress(FileExistsError):
                    os.mkdir(folder)
                self._sync_folder(above)
            self._folders.add(folder)
        return folder

    def _sync_folder(self, folder: str) -> None:
        if not self._fsync:
            return
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _walk(self, folder: str, above: str, prefix: str) -> Iterator[str]:
        with file_errors("list", self.uri, prefix):
            entries = _entries(folder, above)
        for key, path in entries:
            if path is None:
                if key.startswith(prefix):
                    yield key
            elif key.startswith(prefix) or prefix.startswith(key):
                yield from self._walk(path, key, prefix)


def _entries(folder: str, above: str) -> list[tuple[str, str | None]]:
    """The entries of one folder in key order: objects as `key`, folders as `key/` with their path."""
    found: list[tuple[str, str | None]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    name = key_of_folder(entry.name)
                    if name is not None:
                        found.append((f"{above}{name}/", entry.path))
                else:
                    name = key_of_file(entry.name)
                    if name is not None:
                        found.append((above + name, None))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda item: item[0])


def _switch(name: str, value: Any) -> bool:
    known = {"0": False, "1": True, "false": False, "true": True}.get(str(value).lower())
    if known is None:
        raise ConfigError(f"the option {name} of a file store is 0 or 1, not {value!r}")
    return known


def _path_in(uri: str) -> str:
    if "://" not in uri:
        return uri
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"not the address of a folder: {uri!r}", hint="write file:///absolute/path, or a plain path")
    return os.fsdecode(unquote_to_bytes(uri.split("://", 1)[1].removeprefix("localhost")))


def _sweep(folder: str) -> None:
    """Remove the files of writers that died: those older than a day, which is longer than any write."""
    oldest = time.time() - _LEFTOVER_AGE_S
    RecycledFiles(f"{folder}/{SPARE_FOLDER}").clear(oldest)
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry.path)
