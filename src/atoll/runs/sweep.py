"""Find replicas that still run although their run is over, and those of runs whose record cannot be read.

Backends find what carries Atoll's label. The record of the run says whether the run goes on; without a record that is
unknown, because the store may only be out of reach from here.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from atoll import journal, registry
from atoll.context import RunContext
from atoll.errors import AtollError
from atoll.executors.base import Stray, Sweeper
from atoll.stores.fast import with_retry_timeout

log = logging.getLogger("atoll.runs")
_TIMEOUT_S = 10.0


class Leftover(NamedTuple):
    """A replica, or a group of replicas, that may have to be stopped."""

    stray: Stray
    is_unknown: bool
    """Whether the record of the run could not be read, so that the run may be healthy."""
    message: str


def leftovers(executor: Sweeper) -> list[Leftover]:
    """What runs on this backend for runs that are over or unknown."""
    verdicts: dict[RunContext, Leftover | None] = {}
    found = []
    for stray in executor.strays():
        if stray.context is None:
            found.append(Leftover(stray, False, stray.message))
            continue
        if stray.context not in verdicts:
            verdicts[stray.context] = _judged(stray, stray.context)
        if (verdict := verdicts[stray.context]) is not None:
            found.append(verdict._replace(stray=stray))
    return found


def _judged(stray: Stray, context: RunContext) -> Leftover | None:
    """None if the run goes on."""
    name = f"run `{context.run_id}`"
    try:
        store = with_retry_timeout(registry.open_store(context.store_uri), _TIMEOUT_S)
        journal.read_run(store, context.run_id)
        newest = journal.newest_launch(store, context.run_id)
        is_cancelled = journal.is_cancelled(store, context.run_id, launch=context.launch)
    except AtollError as exc:
        return Leftover(stray, True, f"{name}: its record cannot be read: {exc.message.partition(chr(10))[0]}")
    if is_cancelled:
        return Leftover(stray, False, f"{name} was cancelled")
    if newest.number > context.launch or (newest.number == context.launch and newest.undone is not None):
        followed = newest.is_resume and newest.number > context.launch
        what = f"was followed by launch {newest.number}" if followed else "was undone"
        return Leftover(stray, False, f"launch {context.launch} of {name} {what}")
    return None
