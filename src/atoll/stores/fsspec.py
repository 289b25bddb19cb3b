"""Objects in any file system of fsspec that has an atomic `create`.

fsspec's own fallback for `create` checks first and writes later, and many file systems write in place. Replicas cannot
agree with either, so a file system without its own `create` is refused when it is opened, and any other is probed
before the first `create`. S12 does not hold here: file systems have no metadata that could mark the owner of an object.
`atoll.rounds` reads every record back, so a lost response does no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from atoll.errors import AtollError, ConfigError, KeyExists, KeyNotFound, StoreError, StoreRefused, StoreUnavailable
from atoll.registry import require
from atoll.stores.base import Buffer, Data, check_key, check_prefix, check_range, pieces
from atoll.stores.probe import probe

log = logging.getLogger("atoll.stores")
_TRANSIENT = ("timeout", "connect", "throttl", "slowdown", "serviceunavailable", "incompleteread", "serverdisconnected")


class FsspecStore:
    """`scheme://host/prefix` for a scheme of fsspec; options go to the file system."""

    def __init__(self, uri: str, **options: Any) -> None:
        if "::" in uri:
            raise ConfigError(f"{uri!r} chains file systems", hint="a cache would hide the objects of other writers")
        core = require("fsspec.core", extra="fsspec")
        self.uri = uri.rstrip("/")
        options = {"use_listings_cache": False, "skip_instance_cache": True} | options
        try:
            self._fs, self._root = core.url_to_fs(self.uri, **options)
        except (ValueError, ImportError) as exc:
            raise ConfigError(f"fsspec cannot open {uri!r}: {exc}") from exc
        except OSError as exc:
            raise StoreUnavailable(f"cannot reach {uri!r}: {exc}", uri=uri) from exc
        self._root = str(self._root).rstrip("/")
        self._refuse_without_create()
        self._lock, self._is_probed = Lock(), False

    @classmethod
    def from_uri(cls, uri: str, **options: Any) -> FsspecStore:
        return cls(uri, **options)

    def __repr__(self) -> str:
        return f"FsspecStore({self.uri!r})"

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Buffer:
        check_range(start, length)
        path = self._path(key)
        with self._translating("get", key):
            if not start and length is None:
                return bytes(self._fs.cat_file(path))
            size = int(self._fs.info(path)["size"])
            end = size if length is None else min(size, start + length)
            return bytes(self._fs.cat_file(path, start=start, end=end)) if start < end else b""

    def put(self, key: str, data: Data) -> None:
        path, whole = self._path(key), b"".join(pieces(data))
        with self._translating("put", key):
            self._fs.pipe_file(path, whole)

    def create(self, key: str, data: Data) -> None:
        path, whole = self._path(key), b"".join(pieces(data))
        self._check_create()
        self._create(key, path, whole)

    def list(self, prefix: str = "") -> Iterator[str]:
        folder = check_prefix(prefix).rpartition("/")[0]
        above = len(self._root) + 1
        try:
            with self._translating("list", prefix):
                found = self._fs.find(f"{self._root}/{folder}".rstrip("/"))
        except KeyNotFound:
            return iter(())
        return iter(sorted(key for key in (str(path)[above:] for path in found) if key and key.startswith(prefix)))

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            with self._translating("delete", key):
                self._fs.rm_file(path)
        except KeyNotFound:
            return

    def _create(self, key: str, path: str, whole: bytes) -> None:
        with self._translating("create", key):
            self._fs.pipe_file(path, whole, mode="create")

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _refuse_without_create(self) -> None:
        """Raise if the file system inherits fsspec's fallback, whose `create` is not atomic."""
        spec, asyn = require("fsspec.spec", extra="fsspec"), require("fsspec.asyn", extra="fsspec")
        kind = type(self._fs)
        is_fallback = kind.pipe_file is spec.AbstractFileSystem.pipe_file
        if isinstance(self._fs, asyn.AsyncFileSystem):
            is_fallback = kind._pipe_file is asyn.AsyncFileSystem._pipe_file
        if is_fallback:
            raise StoreError(
                f"cannot use {self.uri}: `create` of {kind.__name__} is not atomic (it checks first and writes later)",
                uri=self.uri,
                reason="not_atomic",
                hint="replicas need an atomic `create`; use s3://, gs://, az:// or a folder that every replica mounts",
            )

    def _check_create(self) -> None:
        with self._lock:
            if not self._is_probed:
                twin = FsspecStore.__new__(FsspecStore)
                twin.__dict__.update(self.__dict__, _lock=Lock(), _is_probed=True)
                log.debug("probing %s before the first create", self.uri)
                probe(twin)
                self._is_probed = True

    @contextmanager
    def _translating(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except AtollError:
            raise
        except FileNotFoundError as exc:
            raise KeyNotFound(key, uri=self.uri) from exc
        except FileExistsError as exc:
            raise KeyExists(key, uri=self.uri) from exc
        except Exception as exc:
            if verb == "create" and _is_unmet_condition(exc):
                raise KeyExists(key, uri=self.uri) from exc
            raise _translated(exc, f"cannot {verb} `{key}` in {self.uri}: {exc}", self.uri, key) from exc


def _is_unmet_condition(exc: BaseException | None) -> bool:
    """Whether the service refused an existing key (412), which s3fs and others hide in the cause of another error."""
    while exc is not None:
        if any(word in str(exc) for word in ("PreconditionFailed", "ConditionNotMet", "BlobAlreadyExists")):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def _translated(exc: Exception, message: str, uri: str, key: str) -> StoreError:
    """The store error for a vendor error. File systems have their own error classes, so their names decide too."""
    if isinstance(exc, PermissionError):
        return StoreRefused(message, uri=uri, key=key, hint="check the credentials and their permissions")
    names = " ".join(kind.__name__ for kind in type(exc).__mro__).lower()
    is_transient = isinstance(exc, TimeoutError | ConnectionError) or any(word in names for word in _TRANSIENT)
    if is_transient or (isinstance(exc, OSError) and exc.errno is not None):
        return StoreUnavailable(message, uri=uri, key=key)
    return StoreError(message, uri=uri, key=key)
