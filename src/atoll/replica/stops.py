"""Requests to stop that reach a supervisor through the store, for machines that no launcher can reach otherwise.

The uploader looks for them if the plan has `store_stops`: a record of `journal.record_stop`, which is a cancel; and, if
ranks are claimed (`is_claimed`), a later attempt of the rank, which runs on another machine after this one was silent.
"""

from __future__ import annotations

import time
from typing import Any

from atoll import journal
from atoll.errors import KeyNotFound
from atoll.keys import RunKeys
from atoll.replica.rank_process import StopReason
from atoll.stores.base import Store

_LOOK_S, _LOOK_FILE_S = 2.0, 0.25


class StopLooks:
    """What the store says about the ranks of one supervisor. Each request is returned once."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._run_id, self._launch = plan["run_id"], plan.get("launch", 1)
        self._ranks: list[int] = list(plan["ranks"])
        self._is_claimed = bool(plan.get("is_claimed"))
        self._attempts: dict[int, int] = {}
        """Rank -> the newest attempt that this supervisor has started."""
        self._found: set[int] = set()
        self._pause_s = _LOOK_FILE_S if plan["store"].startswith("file:") else _LOOK_S
        self._look_at = 0.0

    @property
    def are_due(self) -> bool:
        return time.monotonic() >= self._look_at

    def note(self, rank: int, attempt: int) -> None:
        """This supervisor has started an attempt."""
        self._attempts[rank] = max(attempt, self._attempts.get(rank, attempt))

    def look(self, store: Store) -> dict[int, StopReason]:
        """The ranks that must stop, and were not returned before."""
        self._look_at = time.monotonic() + self._pause_s
        ranks = [rank for rank in self._ranks if rank not in self._found]
        found: dict[int, StopReason] = {}
        if self._is_claimed:
            found |= {rank: StopReason.REPLACED for rank in ranks if self._is_replaced(store, rank)}
        found |= dict.fromkeys(self._stopped(store, ranks), StopReason.CANCEL)
        self._found |= found.keys()
        return found

    def _stopped(self, store: Store, ranks: list[int]) -> list[int]:
        """One GET for a single rank, else one LIST."""
        if len(ranks) == 1:
            is_stopped = journal.is_stop_requested(store, self._run_id, ranks[0], launch=self._launch)
            return ranks if is_stopped else []
        stopped = journal.read_stops(store, self._run_id, launch=self._launch) if ranks else set()
        return [rank for rank in ranks if rank in stopped]

    def _is_replaced(self, store: Store, rank: int) -> bool:
        if rank not in self._attempts:
            return False
        try:
            store.get(RunKeys(self._run_id, self._launch).start(rank, self._attempts[rank] + 1))
        except KeyNotFound:
            return False
        return True
