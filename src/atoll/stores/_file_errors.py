"""What the operating system says, as a store error."""

from __future__ import annotations

import errno
from types import TracebackType

from atoll.errors import AtollError, BadKey, StoreError, StoreRefused, StoreUnavailable

_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_UNAVAILABLE = {
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN, errno.EINTR,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENODEV, errno.ENXIO, errno.EHOSTDOWN, errno.EREMOTEIO,
}  # fmt: skip
_NO_HARD_LINKS = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class file_errors:  # noqa: N801 - used as a function is
    """Turn an `OSError` inside the block into a typed store error, keeping the cause. (S11)"""

    __slots__ = ("_what",)

    def __init__(self, verb: str, uri: str, key: str) -> None:
        self._what = verb, uri, key

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(exc, OSError) and not isinstance(exc, AtollError):
            raise translated(exc, *self._what) from exc


def translated(exc: OSError, verb: str, uri: str, key: str) -> StoreError:
    message = f"cannot {verb} `{key}` in {uri}: {exc.strerror or exc}"
    if exc.errno == errno.ENAMETOOLONG:
        return BadKey(key, f"this file system cannot hold so long a name under {uri}")
    if (exc.errno == errno.EPERM and exc.filename2 is not None) or exc.errno in _NO_HARD_LINKS:
        hint = "this file system has no hard links, so `create` cannot be atomic here; use another folder"
        return StoreRefused(message, uri=uri, key=key, reason="hard_links", hint=hint)
    if exc.errno in _REFUSED:
        return StoreRefused(message, uri=uri, key=key, hint="check who owns the folder and how it is mounted")
    if exc.errno in _UNAVAILABLE:
        return StoreUnavailable(message, uri=uri, key=key)
    return StoreError(message, uri=uri, key=key)
