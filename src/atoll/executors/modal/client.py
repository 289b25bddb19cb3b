"""Every request to Modal: limited in time, retried while the error may be transient, with its errors translated.

`ModalClient.call` is the only way from this package to the service. The `modal` package has no time limit of its own
for most requests, so each runs in a thread that the caller can leave.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from atoll._threads import answer_within
from atoll._time import Clock, Deadline, backoff
from atoll.errors import AtollError, MissingExtra
from atoll.executors.modal import errors
from atoll.registry import require

R = TypeVar("R")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0

log = logging.getLogger("atoll.executors")


class ModalClient:
    """The package `modal` and one connection: the one that the caller gave, or the one of this environment."""

    def __init__(self, *, given: Any, timeout_s: float, patience_s: float, clock: Clock) -> None:
        if not _is_installed():
            raise MissingExtra("modal", extra=errors.EXTRA)
        self._given, self._timeout_s, self._patience_s, self._clock = given, timeout_s, patience_s, clock

    @cached_property
    def modal(self) -> ModuleType:
        """The package, which takes a second to import: a plan does without it."""
        return require("modal", extra=errors.EXTRA)

    @cached_property
    def connection(self) -> Any:
        """The client object of `modal`. Call it only inside `call`: it connects."""
        return self._given or self.modal.Client.from_env()

    def function_call(self, call_id: str) -> Any:
        return self.modal.FunctionCall.from_id(call_id, client=self.connection)

    def call(
        self,
        operation: str,
        what: str,
        send: Callable[[], R],
        *,
        tries: int | None = None,
        timeout_s: float | None = None,
    ) -> R:
        """Make one request and return its answer.

        A transient error is retried for `patience_s`, or at most `tries` times for callers with a loop of their own.
        """
        deadline, pauses = self.deadline(), self.pauses()
        while True:
            log.debug("call modal: %s (%s)", operation, what)
            try:
                return answer_within(timeout_s or self._timeout_s, send)
            except Exception as exc:
                if not errors.is_of_service(exc):
                    raise
                error: AtollError = errors.translated(exc, what, operation)
                tries = None if tries is None else tries - 1
                if not getattr(error, "retryable", False) or tries == 0 or deadline.is_past:
                    raise error from exc
                log.info("retry %s after %s", what, type(exc).__name__)
            deadline.sleep(next(pauses))

    def pauses(self) -> Iterator[float]:
        """Growing pauses between tries, with jitter so that many launchers do not retry at once."""
        return backoff(_FIRST_PAUSE_S, factor=2.0, cap_s=_LONGEST_PAUSE_S, jitter=0.5)

    def deadline(self) -> Deadline:
        """The end of the time for which a request is retried."""
        return Deadline(self._patience_s, self._clock)


def _is_installed() -> bool:
    try:
        return find_spec("modal") is not None
    except ImportError:  # an import hook may refuse to look for it
        return False


def profile_environment() -> str | None:
    """The environment that MODAL_ENVIRONMENT or the user's profile names; None for the default of the workspace."""
    if given := os.environ.get("MODAL_ENVIRONMENT"):
        return given
    path = Path(os.environ.get("MODAL_CONFIG_PATH") or "~/.modal.toml").expanduser()
    try:
        profiles = tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return None
    tables = {name: each for name, each in profiles.items() if isinstance(each, dict)}
    active = next((name for name, each in tables.items() if each.get("active")), "default")
    found = tables.get(os.environ.get("MODAL_PROFILE") or active, {}).get("environment")
    return found if isinstance(found, str) and found else None
