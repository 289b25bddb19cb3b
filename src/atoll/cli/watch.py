"""Waits for a run and shows its progress: a live table on a terminal, lines elsewhere, events for programs.

Also what the commands share around it: `RoundPoller` reads the rounds, `OutageReporter` describes a store or backend
that does not answer, and the hints say how to continue after an error. An outage never changes the run itself.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from atoll import units
from atoll._threads import Unanswered, answer_within
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.cli.output import Output
from atoll.cli.render import counts_text, held_ranks, held_text, problems_text, progress_line, status_json
from atoll.cli.waits import advice_text, outlook_text, waiting_text
from atoll.errors import AtollError, BackendError, StoreError, StoreUnavailable
from atoll.rounds.metrics import Waiting, latest_records, waiting_for
from atoll.rounds.timeline import RoundRecord
from atoll.runs.run import Run, could_restart
from atoll.status import RunStatus
from atoll.stores.fast import with_retry_timeout

log = logging.getLogger("atoll.cli")
_LINE_EVERY_S = 5.0
_POLL_EVERY_S = 2.0
_POLL_TIMEOUT_S = 10.0
"""A store that does not answer delays a view by at most this long."""
_POLL_ANSWER_S = 1.0
"""A line of progress waits at most this long for the round that waits, and is printed without it otherwise."""
_REPORT_EVERY_S = 15.0


class View(NamedTuple):
    """The callbacks that show how a wait goes."""

    on_change: Callable[[RunStatus], None]
    on_trouble: Callable[[AtollError | None], None]


def watch(run: Run, out: Output, *, live: bool = True, **wait: Any) -> RunStatus:
    """Wait until the run has ended and show its progress; `wait` goes to `Run.wait`."""
    show: AbstractContextManager[View]
    if live and out.is_live:
        from atoll.cli.live import live_view

        show = live_view(run, out)
    else:
        show = nullcontext(_line_view(run, out))
    with resume_hint(run), show as view:
        return run.wait(on_change=view.on_change, on_trouble=view.on_trouble, **wait)


def _line_view(run: Run, out: Output) -> View:
    """A line when a count or a problem changes, when a service does not answer, and every few seconds in between."""
    last: dict[str, Any] = {"shown": None, "at": 0.0, "advice": ""}
    poller, outage = RoundPoller(run), OutageReporter()

    def say(text: str) -> None:
        out.say(f"{time.strftime('%H:%M:%S')} {text}")

    def on_change(status: RunStatus) -> None:
        out.event("status", status_json(run.id, status))
        now = time.monotonic()
        shown = counts_text(status), problems_text(status), held_ranks(status.replicas)
        if out.is_json or (shown == last["shown"] and now - last["at"] < _LINE_EVERY_S):
            return
        last.update(shown=shown, at=now)
        waiting = poller.waiting(status)
        texts = waiting_text(waiting, status, time.time()), outlook_text(waiting, status, run.id, time.time())
        say("; ".join(filter(None, (progress_line(status), *texts, held_text(status.replicas)))))
        advice = advice_text(waiting, status, could_restart=could_restart(run.spec, run.executor))
        if advice and not last["advice"]:
            last["advice"] = advice
            say(advice)

    def on_trouble(error: AtollError | None) -> None:
        if text := outage.report(error):
            out.event("no_answer" if error else "answer", {"run_id": run.id, "message": text})
            say(text)

    return View(on_change, on_trouble)


class RoundPoller:
    """Reads the rounds of a run from its store, at most every two seconds; in between it answers from its cache."""

    def __init__(self, run: Run, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run_id, self._store, self._clock = run.id, with_retry_timeout(run.store, _POLL_TIMEOUT_S), clock
        self._launch = run.rounds_of
        self._waiting: Waiting | None = None
        self._records: dict[int, RoundRecord] = {}
        self._waiting_at = self._records_at = -60.0

    def waiting(self, status: RunStatus) -> Waiting | None:
        """The round at which some ranks have arrived and others have not; None if the run has ended."""
        if status.is_terminal:
            return None
        now = self._clock.monotonic()
        if now - self._waiting_at >= _POLL_EVERY_S:
            self._waiting_at = now
            read = partial(waiting_for, self._store, self._run_id, len(status.replicas), launch=self._launch)
            try:
                self._waiting = answer_within(_POLL_ANSWER_S, read)
            except (AtollError, Unanswered) as exc:
                log.debug("run %s: cannot read which round waits: %s", self._run_id, exc)
                self._waiting = None
        return self._waiting

    def records(self, *, refresh: bool = False) -> dict[int, RoundRecord]:
        """The last round that each rank has recorded; the cached ones if the store does not answer."""
        now = self._clock.monotonic()
        if refresh or now - self._records_at >= _POLL_EVERY_S:
            self._records_at = now
            try:
                self._records = latest_records(self._store, self._run_id, launch=self._launch)
            except AtollError as exc:
                log.debug("run %s: cannot read the round records: %s", self._run_id, exc.message)
        return self._records


class OutageReporter:
    """Describes an outage of the store or the backend: at its start, every 15 seconds, and at its end."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._began: float | None = None
        self._reported_at = 0.0
        self._service = self._since = ""
        self.text = ""
        """The outage in one sentence; empty if there is none."""

    def report(self, error: AtollError | None) -> str:
        """The text to print after a request: `error` is None if it succeeded. Empty if there is nothing to print."""
        now = self._clock.monotonic()
        if error is None:
            began, self._began, self.text = self._began, None, ""
            return "" if began is None else f"{self._service} answers again, after {units.duration_text(now - began)}"
        if self._began is None:
            self._since = time.strftime("%H:%M:%S", time.localtime(self._clock.time()))
            self._began, self._reported_at = now, now - _REPORT_EVERY_S
        self._service = f"the {'store' if isinstance(error, StoreError) else 'backend'}"
        self.text = f"{self._service} has not answered since {self._since}: {error.message}; retrying"
        if now - self._reported_at < _REPORT_EVERY_S:
            return ""
        self._reported_at = now
        return self.text


@contextmanager
def deferred_interrupt(notice: str) -> Iterator[None]:
    """Delay the first Ctrl-C until the block is done, and print the notice; a second one interrupts the block."""
    received: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        os.write(2, f"\n{notice}\n".encode())  # not through Python's streams, which the handler may have interrupted

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


@contextmanager
def resume_hint(run: Run, *, is_over: bool = False) -> Iterator[None]:
    """Add to a store or backend error that the run is not affected, and the commands that show it again."""
    try:
        yield
    except (StoreError, BackendError) as exc:
        name = shlex.quote(run.id)
        if is_over:
            look = f"the run has ended: `atoll result {name}` shows its result"
        else:
            look = f"the run continues: `atoll wait {name}` waits for it, `atoll status {name}` shows it"
        exc.hint = "; ".join(filter(None, (look, _outage_hint(exc))))
        raise


@contextmanager
def relaunch_hint(again: str) -> Iterator[None]:
    """Add to an outage during a launch how to finish the launch."""
    try:
        yield
    except StoreUnavailable as exc:
        exc.hint = "; ".join(filter(None, (_outage_hint(exc), again)))
        raise


def relaunch_text(run_id: str) -> str:
    return f"the same command with `--run-id {shlex.quote(run_id)}` continues the launch"


def store_hint(error: AtollError) -> str:
    """What to check after a store error: the error's own hint, or the address and the access to it."""
    if error.hint:
        return error.hint
    if isinstance(error, StoreUnavailable):
        return "check the address, and that the service there answers"
    return "check the address, and that you may write there"


def error_hint(error: AtollError) -> str | None:
    """The next step after an error that ended a command."""
    hint = _outage_hint(error)
    return hint if hint == error.hint else f"{hint}; runs continue in the meantime"


def _outage_hint(error: AtollError) -> str | None:
    """The error's own hint; for a store that does not answer, the command that tests it."""
    if error.hint is not None or not isinstance(error, StoreUnavailable):
        return error.hint
    test = f"; `atoll doctor --store {shlex.quote(error.uri)}` tests it" if error.uri else ""
    return f"{store_hint(error)}{test}"
