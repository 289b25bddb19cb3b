"""Watching a run until it is over: a live table on a terminal, plain lines elsewhere, events for programs."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from atoll.cli.lookout import Lookout
from atoll.cli.outage import Outage, View, way_back
from atoll.cli.output import Output
from atoll.cli.render import progress_line, status_json
from atoll.cli.waits import avoid_text, outlook_text, waiting_text
from atoll.errors import AtollError
from atoll.runs.run import Run, could_restart
from atoll.status import RunStatus

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
    lookout, outage = Lookout(run), Outage()

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
