"""What is said when a store or a backend does not answer: since when, that the run goes on, and what to do next."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from atoll import units
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import AtollError, BackendError, StoreError, StoreUnavailable
from atoll.runs.run import Run
from atoll.status import RunStatus

NO_ANSWER = "is the address right, and does the service there answer?"
NO_USE = "is the address right, and may you write there?"
_TOLD_EVERY_S = 15.0


class View(NamedTuple):
    """Who shows how a wait goes."""

    on_change: Callable[[RunStatus], None]
    on_trouble: Callable[[AtollError | None], None]


def store_hint(error: AtollError) -> str:
    """What to look at first, where the error itself does not say it."""
    return error.hint or (NO_ANSWER if isinstance(error, StoreUnavailable) else NO_USE)


def hint_of(error: AtollError) -> str | None:
    """The next step after an error that ended a command."""
    more = _more(error)
    return more if more == error.hint else f"{more}; runs go on meanwhile"


def _more(error: AtollError) -> str | None:
    """What the error says itself, or how to find out why nothing answers."""
    if error.hint is not None or not isinstance(error, StoreUnavailable):
        return error.hint
    tried = f" `atoll doctor --store {shlex.quote(error.uri)}` tries it" if error.uri else ""
    return f"{store_hint(error)}{tried}"


class Outage:
    """Hears of each time in vain, and says now and then since when that is so."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._began: float | None = None
        self._told = 0.0
        self._who = self._since = ""
        self.text = ""
        """What is known of it; empty when there is none."""

    def hear(self, error: AtollError | None) -> str:
        """What to say about it, None being an answer; empty if that was said a moment ago."""
        now = self._clock.monotonic()
        if error is None:
            began, self._began, self.text = self._began, None, ""
            return "" if began is None else f"{self._who} answers again, after {units.duration_text(now - began)}"
        if self._began is None:
            self._since = time.strftime("%H:%M:%S", time.localtime(self._clock.time()))
            self._began, self._told = now, now - _TOLD_EVERY_S
        self._who = f"the {'store' if isinstance(error, StoreError) else 'backend'}"
        self.text = f"{self._who} is out of reach since {self._since}: {error.message}; trying again, as replicas do"
        if now - self._told < _TOLD_EVERY_S:
            return ""
        self._told = now
        return self.text


@contextmanager
def way_back(run: Run, *, is_over: bool = False) -> Iterator[None]:
    """An error that ends a watch ends nothing else: say so, and how to look again."""
    try:
        yield
    except (StoreError, BackendError) as exc:
        name = shlex.quote(run.id)
        look = f"the run goes on without this command: `atoll wait {name}` waits for it, `atoll status {name}` looks"
        if is_over:
            look = f"the run is over: `atoll result {name}` shows what came of it"
        exc.hint = "; ".join(filter(None, (look, _more(exc))))
        raise


@contextmanager
def way_on(run_id: str) -> Iterator[None]:
    """An outage while a run is started leaves it half started: say how to go on."""
    try:
        yield
    except StoreUnavailable as exc:
        again = f"the same command with `--run-id {shlex.quote(run_id)}` goes on from there"
        exc.hint = "; ".join(filter(None, (_more(exc), again)))
        raise
