"""Keys as paths below the root of a file store and back, and operating system errors as store errors.

Unlike a file system, a store may have `a` and `a/b` at once. So objects and folders have different names: a name with a
dot is an object, one without is a folder, and all others get a mark (the object `a` is `a~f`, the folder `v1.2` is
`v1.2~d`). Usual keys, such as `exp/run.json`, stay as they are. No key has a path outside of the root, or in the folder
of unfinished files.
"""

from __future__ import annotations

import errno
from functools import lru_cache
from types import TracebackType

from atoll.disk import STORE_MARK, is_full
from atoll.errors import AtollError, BadKey, StoreError, StoreRefused, StoreUnavailable
from atoll.stores.base import check_key

_FILE_MARK, _FOLDER_MARK = "~f", "~d"

TEMP_FOLDER = STORE_MARK
"""The folder of unfinished files. No key has this path: the name `.atoll-tmp` has a dot, so it gets no mark."""


def path_of(root: str, key: str, *, is_folder: bool) -> str:
    """The path of an object, or of the folder for the keys below `key`."""
    above, _, last = key.rpartition("/")
    folder = _folder_of(root, above) if above else root
    return f"{folder}/{_folder_name(last) if is_folder else _file_name(last)}"


@lru_cache(maxsize=256)
def _folder_of(root: str, key: str) -> str:
    return "/".join((root, *map(_folder_name, key.split("/"))))


def key_of_file(name: str) -> str | None:
    """The last part of the key whose object has this file name, or None if no object has it."""
    part = name.removesuffix(_FILE_MARK)
    return part if _file_name(part) == name and _is_key(part) else None


def key_of_folder(name: str) -> str | None:
    """The part of a key with this folder name, or None if no key has it."""
    part = name.removesuffix(_FOLDER_MARK)
    return part if _folder_name(part) == name and _is_key(part) else None


def _file_name(part: str) -> str:
    return part if "." in part and not _is_marked(part) else part + _FILE_MARK


def _folder_name(part: str) -> str:
    return part if "." not in part and not _is_marked(part) else part + _FOLDER_MARK


def _is_marked(part: str) -> bool:
    return part.endswith((_FILE_MARK, _FOLDER_MARK))


def _is_key(part: str) -> bool:
    """False for files of other programs, whose names no key can have."""
    try:
        check_key(part)
    except BadKey:
        return False
    return True


_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_UNAVAILABLE = {
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN, errno.EINTR,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENODEV, errno.ENXIO, errno.EHOSTDOWN, errno.EREMOTEIO,
}  # fmt: skip
_FULL_HINT = "free space on the disk of this folder, or use a store elsewhere"
_NO_HARD_LINKS = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class file_errors:  # noqa: N801 - used like a function
    """Translate an `OSError` of the block to a typed store error. (S11)"""

    __slots__ = ("_request",)

    def __init__(self, verb: str, uri: str, key: str) -> None:
        self._request = verb, uri, key

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(exc, OSError) and not isinstance(exc, AtollError):
            raise translated(exc, *self._request) from exc


def translated(exc: OSError, verb: str, uri: str, key: str) -> StoreError:
    """The store error for an error of the operating system."""
    message = f"cannot {verb} `{key}` in {uri}: {exc.strerror or exc}"
    if exc.errno == errno.ENAMETOOLONG:
        return BadKey(key, f"this file system cannot hold so long a name under {uri}")
    if (exc.errno == errno.EPERM and exc.filename2 is not None) or exc.errno in _NO_HARD_LINKS:
        hint = "this file system has no hard links, so `create` cannot be atomic here; use another folder"
        return StoreRefused(message, uri=uri, key=key, reason="hard_links", hint=hint)
    if exc.errno in _REFUSED:
        return StoreRefused(message, uri=uri, key=key, hint="check the owner of the folder and how it is mounted")
    if exc.errno in _UNAVAILABLE:
        return StoreUnavailable(message, uri=uri, key=key, hint=_FULL_HINT if is_full(exc) else None)
    is_no_folder = exc.errno in (errno.ENOENT, errno.ENOTDIR)
    advice = "check the path: a folder cannot be made there" if is_no_folder else None
    return StoreError(message, uri=uri, key=key, hint=advice)
