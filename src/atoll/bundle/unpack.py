"""Downloads a bundle and unpacks it into a folder. Each replica calls `fetch_and_unpack`.

The digest is checked before the archive is opened, and one rename makes the result visible. The archive is not
trusted: files are written while no link exists, so no path can lead out of the folder, and each link is checked before
it is created. Members that `pack` never writes are refused: other types, second copies, paths through links.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from atoll import keys
from atoll.bundle.pack import MAX_BYTES, MAX_FILES, LinkProblem, path_problem, printable, resolve, size_text
from atoll.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from gzip import GzipFile
    from tarfile import TarFile, TarInfo

    from atoll.stores.base import Store

OVERHEAD_BYTES = 4096
"""Room in an archive for the headers and padding of one file."""
_COPY_BYTES = 256 * 1024
_HEADER_BYTES = 1024**2
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


class Refused(Exception):
    """Why this archive is not one of ours."""


def extract(archive: IO[bytes], root: str, *, max_bytes: int, max_files: int) -> None:
    """Unpack `archive` into the empty folder `root`; `Refused` or an error of tarfile or zlib if it is not ours."""
    import gzip
    import tarfile

    with gzip.GzipFile(fileobj=archive, mode="rb") as content:
        source = _ForwardReader(content, max_bytes + (max_files + 1) * OVERHEAD_BYTES)
        readable: Any = source  # tarfile calls read, seek and tell, and its types want all of IO
        with tarfile.open(fileobj=readable, mode="r:") as tar:
            links = _write_files(tar, root, max_bytes, max_files)
            if tar.pax_headers:
                raise Refused("headers for the whole archive")
        _check_end(source)
    _make_links(root, links)


class _ForwardReader:
    """Reads on and never back, a bounded amount in all and at a time.

    tarfile follows the sizes in an archive wherever they point: back in a loop, or into a header of many gigabytes.
    """

    def __init__(self, source: GzipFile, limit_bytes: int) -> None:
        self._source, self._limit_bytes = source, limit_bytes
        self._at = 0
        self.last_read = b""

    def tell(self) -> int:
        return self._at

    def seek(self, position: int) -> int:
        if not self._at <= position <= self._limit_bytes:
            raise Refused("a size that points out of the archive")
        while self._at < position:
            if not self.read(min(_COPY_BYTES, position - self._at)):
                raise Refused("cut short")
        return position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _HEADER_BYTES:
            raise Refused(f"a header of more than {size_text(_HEADER_BYTES)}")
        self.last_read = self._source.read(size)
        self._at += len(self.last_read)
        if self._at > self._limit_bytes:
            raise Refused(f"more than {size_text(self._limit_bytes)} unpacked")
        return self.last_read


def _check_end(source: _ForwardReader) -> None:
    """tarfile takes a broken header for the end, and looks at nothing behind it, not even the checksum of gzip."""
    if source.last_read != bytes(512):
        raise Refused("no proper end")
    while chunk := source.read(_COPY_BYTES):
        if chunk.count(0) != len(chunk):
            raise Refused("something behind its end")


def _write_files(tar: TarFile, root: str, max_bytes: int, max_files: int) -> dict[str, str]:
    """Write the regular files, and return the links."""
    links: dict[str, str] = {}
    count = size_bytes = 0
    for member in tar:
        _check_member(member, root)
        count, size_bytes = count + 1, size_bytes + member.size
        if count > max_files:
            raise Refused(f"more than {max_files} files")
        if size_bytes > max_bytes:
            raise Refused(f"more than {size_text(max_bytes)} of content")
        if member.name in links:
            raise Refused(f"`{printable(member.name)}` is there twice")
        if member.issym():
            links[member.name] = member.linkname
        else:
            _write_file(root, member, tar.extractfile(member))
    return links


def _check_member(member: TarInfo, root: str) -> None:
    import tarfile

    if problem := path_problem(member.name):
        raise Refused(f"`{printable(member.name[:200])}` {problem}")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.SYMTYPE) or member.sparse is not None:
        raise Refused(f"`{printable(member.name)}` is neither a plain file nor a symbolic link")
    if member.size < 0 or (member.size and member.issym()):
        raise Refused(f"`{printable(member.name)}` has a size of {member.size}")
    if member.isreg() and hasattr(tarfile, "data_filter"):
        # A second opinion, where this Python has it; on links it is wrong if they lead through one not made yet.
        tarfile.data_filter(member, root)


def _write_file(root: str, member: TarInfo, source: IO[bytes] | None) -> None:
    place = os.path.join(root, member.name)
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        mode = 0o777 if member.mode & 0o100 else 0o666
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as exc:
        raise Refused(f"`{printable(member.name)}` is there twice, or inside a file") from exc
    with os.fdopen(handle, "wb") as file:
        left = member.size
        while left and source is not None:
            chunk = source.read(min(_COPY_BYTES, left))
            if not chunk:
                raise Refused("cut short")
            file.write(chunk)
            left -= len(chunk)


def _make_links(root: str, links: dict[str, str]) -> None:
    for path in links:
        try:
            resolve(path, links)
        except LinkProblem as exc:
            raise Refused(f"the link `{printable(path)}` -> `{printable(links[path][:200])}` {exc}") from exc
        if any(path[:at] in links for at, char in enumerate(path) if char == "/"):
            raise Refused(f"`{printable(path)}` lies behind a link")
    for path, target in links.items():
        place = os.path.join(root, path)
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(target, place)
        except (FileExistsError, NotADirectoryError) as exc:
            raise Refused(f"`{printable(path)}` is there twice, or inside a file") from exc
