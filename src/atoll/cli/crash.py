"""An exception nobody expected, told as a bug of ours: where it happened, and what to send along."""

from __future__ import annotations

import traceback

from atoll.errors import InternalError

_SHOWN = 4


def crash(exc: BaseException) -> InternalError:
    """The error to report; `ATOLL_DEBUG=1` shows the whole traceback."""
    frames = traceback.extract_tb(exc.__traceback__)[-_SHOWN:]
    places = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    error = InternalError("\n".join([f"{type(exc).__name__}: {exc}", *places]))
    error.hint = f"{error.hint}; ATOLL_DEBUG=1 shows more"
    error.__cause__ = exc
    return error
