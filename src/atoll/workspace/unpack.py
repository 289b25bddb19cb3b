"""Fetching a bundle: the digest is checked before the archive is opened, and one rename makes the result visible."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from atoll import keys
from atoll.errors import ConfigError, StoreError
from atoll.workspace.bundle import MAX_BYTES, MAX_FILES
from atoll.workspace.extract import OVERHEAD_BYTES, Refused, extract
from atoll.workspace.manifest import size_text

if TYPE_CHECKING:
    from atoll.stores.base import Store

_PIECE_BYTES = 8 * 1024**2


def fetch_and_unpack(
    store: Store, digest: str, destination: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES
) -> Path:
    """Unpack the bundle into a folder of its own in `destination`, and return that folder.

    Any number of processes may do this at once: one of them provides the folder, and all return it.
    """
    import shutil
    import tempfile

    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise StoreError(f"{digest!r} is not the digest of a bundle: 64 lower-case hexadecimal digits", uri=store.uri)
    key = keys.bundle(digest)
    destination = Path(destination).absolute()
    root = destination / digest
    with _local_problems(f"cannot unpack bundle {digest[:12]} in `{destination}`"):
        destination.mkdir(parents=True, exist_ok=True)
        if _is_ready(root):
            return root
        private = tempfile.mkdtemp(prefix=".unpacking-", dir=destination)
        try:
            fresh = os.path.join(private, "root")
            os.mkdir(fresh)
            with tempfile.TemporaryFile(dir=private) as archive:
                _download(store, key, digest, archive, max_bytes + (max_files + 1) * OVERHEAD_BYTES)
                with _archive_problems(store, key):
                    extract(archive, fresh, max_bytes=max_bytes, max_files=max_files)
            _publish(fresh, root)
        finally:
            shutil.rmtree(private, ignore_errors=True)
    return root


def _is_ready(root: Path) -> bool:
    """True if the folder is there: it appears by a rename, so it is whole."""
    try:
        found = os.lstat(root)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"`{root}` is in the way: not a folder of this user", hint="remove it")
    return bool(os.listdir(root))


def _publish(fresh: str, root: Path) -> None:
    try:
        os.rename(fresh, root)
    except OSError:
        if not _is_ready(root):
            raise


def _download(store: Store, key: str, digest: str, into: IO[bytes], limit_bytes: int) -> None:
    """Copy the object piece by piece; an object that is too long is not read to its end."""
    import hashlib

    seen, got = 0, hashlib.sha256()
    while True:
        piece = memoryview(store.get(key, start=seen, length=_PIECE_BYTES))
        seen += piece.nbytes
        if seen > limit_bytes:
            raise StoreError(f"bundle `{key}` is longer than {size_text(limit_bytes)}", uri=store.uri, key=key)
        got.update(piece)
        into.write(piece)
        if piece.nbytes < _PIECE_BYTES:
            break
    if got.hexdigest() != digest:
        raise StoreError(
            f"bundle `{key}` in {store.uri} is damaged: expected sha256 {digest}, got {got.hexdigest()}",
            uri=store.uri,
            key=key,
            hint="delete that object and launch again: the launcher puts it back",
        )
    into.seek(0)


@contextmanager
def _archive_problems(store: Store, key: str) -> Iterator[None]:
    import gzip
    import tarfile
    import zlib

    broken = (Refused, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError)
    try:
        yield
    except broken as exc:
        message = f"bundle `{key}` in {store.uri} is not an archive that Atoll makes, and was not unpacked: {exc}"
        raise StoreError(message, uri=store.uri, key=key) from exc


@contextmanager
def _local_problems(what: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise  # some are OSErrors too
    except OSError as exc:
        raise ConfigError(f"{what}: {exc.strerror or exc}", hint="free some space, or choose another folder") from exc
