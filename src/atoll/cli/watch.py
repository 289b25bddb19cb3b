"""Watching a run until it is over: a live table on a terminal, plain lines elsewhere, events for programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from atoll.cli.lookout import Lookout
from atoll.cli.output import Output
from atoll.cli.render import progress_line, status_json
from atoll.cli.waits import outlook_text, waiting_text
from atoll.run import Run
from atoll.status import RunStatus

_LINE_EVERY_S = 5.0


def watch(run: Run, out: Output, *, live: bool = True, **wait: Any) -> RunStatus:
    """Wait for the end and show how it is going; `wait` goes to `Run.wait`."""
    show: AbstractContextManager[Callable[[RunStatus], None]]
    if live and out.is_live:
        from atoll.cli.live import live_view

        show = live_view(run, out)
    else:
        show = nullcontext(_lines(run, out))
    with show as on_change:
        return run.wait(on_change=on_change, **wait)


def _lines(run: Run, out: Output) -> Callable[[RunStatus], None]:
    """A line when a count changes, and now and then in between."""
    last: dict[str, Any] = {"counts": None, "at": 0.0}
    lookout = Lookout(run)

    def on_change(status: RunStatus) -> None:
        out.event("status", status_json(run.id, status))
        now = time.monotonic()
        if status.counts() != last["counts"] or now - last["at"] >= _LINE_EVERY_S:
            last.update(counts=status.counts(), at=now)
            waiting = None if out.is_json else lookout.waiting(status)
            texts = waiting_text(waiting, status, time.time()), outlook_text(waiting, status, run.id, time.time())
            out.say(f"{time.strftime('%H:%M:%S')} " + "; ".join(filter(None, (progress_line(status), *texts))))

    return on_change
