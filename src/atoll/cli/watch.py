"""Watching a run until it is over: a live table on a terminal, plain lines elsewhere, events for programs.

Ctrl-C where it must not cut something in two.

Looks at the rounds of a run while somebody watches: whom a round waits for, and what the last ones took.

A store that does not answer is nobody's reason to fail: what was known stays.

What is said when a store or a backend does not answer: since when, that the run goes on, and what to do next.
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

from atoll import units
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.cli.output import Output
from atoll.cli.render import progress_line, status_json
from atoll.cli.waits import avoid_text, outlook_text, waiting_text
from atoll.errors import AtollError, BackendError, StoreError, StoreUnavailable
from atoll.rounds.metrics import Waiting, latest_records, waiting_for
from atoll.rounds.timeline import RoundRecord
from atoll.runs.run import Run, could_restart
from atoll.status import RunStatus
from atoll.stores.fast import with_retry_timeout


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold the first Ctrl-C back until the block is done, then raise it; a second one is not held."""
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


_WAITING_EVERY_S = 2.0
_ROUNDS_EVERY_S = 2.0
_ASK_S = 10.0
"""Whoever watches is not kept waiting for longer by a store that does not answer."""


class RoundPoller:
    """Asks the store now and then; in between it answers from memory."""

    def __init__(self, run: Run, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run_id, self._store, self._clock = run.id, with_retry_timeout(run.store, _ASK_S), clock
        self._waiting: Waiting | None = None
        self._records: dict[int, RoundRecord] = {}
        self._waiting_at = self._records_at = -60.0

    def waiting(self, status: RunStatus) -> Waiting | None:
        """The round that some have arrived at and others have not, of a run that still goes on."""
        if status.is_terminal:
            return None
        now = self._clock.monotonic()
        if now - self._waiting_at >= _WAITING_EVERY_S:
            self._waiting_at = now
            try:
                self._waiting = waiting_for(self._store, self._run_id, len(status.replicas))
            except AtollError:
                self._waiting = None
        return self._waiting

    def records(self, *, anew: bool = False) -> dict[int, RoundRecord]:
        """The last round of each rank that is written down."""
        now = self._clock.monotonic()
        if anew or now - self._records_at >= _ROUNDS_EVERY_S:
            self._records_at = now
            try:
                self._records = latest_records(self._store, self._run_id)
            except AtollError:
                return self._records
        return self._records


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


class OutageReporter:
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


_LINE_EVERY_S = 5.0


def watch(run: Run, out: Output, *, live: bool = True, **wait: Any) -> RunStatus:
    """Wait for the end and show how it is going; `wait` goes to `Run.wait`."""
    show: AbstractContextManager[View]
    if live and out.is_live:
        from atoll.cli.live import live_view

        show = live_view(run, out)
    else:
        show = nullcontext(_lines(run, out))
    with way_back(run), show as view:
        return run.wait(on_change=view.on_change, on_trouble=view.on_trouble, **wait)


def _lines(run: Run, out: Output) -> View:
    """A line when a count changes, when nobody answers, and now and then in between."""
    last: dict[str, Any] = {"counts": None, "at": 0.0, "avoid": ""}
    lookout, outage = RoundPoller(run), OutageReporter()

    def on_change(status: RunStatus) -> None:
        out.event("status", status_json(run.id, status))
        now = time.monotonic()
        if status.counts() != last["counts"] or now - last["at"] >= _LINE_EVERY_S:
            last.update(counts=status.counts(), at=now)
            waiting = None if out.is_json else lookout.waiting(status)
            texts = waiting_text(waiting, status, time.time()), outlook_text(waiting, status, run.id, time.time())
            _say(out, "; ".join(filter(None, (progress_line(status), *texts))))
            avoid = avoid_text(waiting, status, could_restart=could_restart(run.spec, run.executor))
            if avoid and not last["avoid"]:
                last["avoid"] = avoid
                _say(out, avoid)

    def on_trouble(error: AtollError | None) -> None:
        if text := outage.hear(error):
            out.event("no_answer" if error else "answer", {"run_id": run.id, "message": text})
            _say(out, text)

    return View(on_change, on_trouble)


def _say(out: Output, text: str) -> None:
    out.say(f"{time.strftime('%H:%M:%S')} {text}")
