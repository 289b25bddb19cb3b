"""Looks at the rounds of a run while somebody watches: whom a round waits for, and what the last ones took.

A store that does not answer is nobody's reason to fail: what was known stays.
"""

from __future__ import annotations

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import AtollError
from atoll.rounds.metrics import Waiting, latest_records, waiting_for
from atoll.rounds.timeline import RoundRecord
from atoll.runs.run import Run
from atoll.status import RunStatus
from atoll.stores.fast import with_patience

_WAITING_EVERY_S = 2.0
_ROUNDS_EVERY_S = 2.0
_ASK_S = 10.0
"""Whoever watches is not kept waiting for longer by a store that does not answer."""


class Lookout:
    """Asks the store now and then; in between it answers from memory."""

    def __init__(self, run: Run, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run_id, self._store, self._clock = run.id, with_patience(run.store, _ASK_S), clock
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
