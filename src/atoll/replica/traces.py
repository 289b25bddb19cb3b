"""Tracebacks as users would see them in a script of their own: our frames are left out.

Of an error of the user's own, those that led to their code. Of an error of ours also those after it: where we found out
helps nobody but us, and what we were told below it is in our message. `ATOLL_DEBUG=1` shows all.
"""

from __future__ import annotations

import os
import sysconfig
from traceback import FrameSummary, TracebackException

import atoll
from atoll.errors import AtollError, InternalError

_LEADING = ("atoll/replica/", "importlib/", "<frozen ")
_OURS = os.path.dirname(os.path.abspath(atoll.__file__)) + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def traceback_text(exc: BaseException) -> str:
    """What `traceback.format_exception` gives, without our frames."""
    shown = TracebackException(type(exc), exc, exc.__traceback__)
    if not os.environ.get("ATOLL_DEBUG"):
        while len(shown.stack) > 1 and any(mark in shown.stack[0].filename for mark in _LEADING):
            del shown.stack[0]
        _shorten(shown, exc)
    return "".join(shown.format())


def _shorten(shown: TracebackException, exc: BaseException) -> None:
    """Cut what is ours from an error of ours, and from those that it came of."""
    if isinstance(exc, AtollError) and not isinstance(exc, InternalError):
        entered = next((at for at, frame in enumerate(shown.stack) if _is_ours(frame)), len(shown.stack))
        if entered:  # else nobody but us had a part in it
            del shown.stack[entered:]
        if shown.__cause__ is not None and not _has_users_frames(shown.__cause__):
            shown.__cause__ = None
        if shown.__context__ is not None and not _has_users_frames(shown.__context__):
            shown.__context__ = None
    if shown.__cause__ is not None and exc.__cause__ is not None:
        _shorten(shown.__cause__, exc.__cause__)
    if shown.__context__ is not None and exc.__context__ is not None:
        _shorten(shown.__context__, exc.__context__)


def _has_users_frames(shown: TracebackException) -> bool:
    return any(not (_is_ours(frame) or _is_installed(frame)) for frame in shown.stack)


def _is_ours(frame: FrameSummary) -> bool:
    return frame.filename.startswith(_OURS)


def _is_installed(frame: FrameSummary) -> bool:
    return frame.filename.startswith((*_INSTALLED, "<frozen "))
