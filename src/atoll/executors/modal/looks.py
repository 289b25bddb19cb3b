"""Which calls a status asks Modal about.

Modal answers for one call at a time, and the store answers for all of them in pages. So Modal is asked only about calls
that the store leaves open, and about a small sample of the others: replicas that have just sent a heartbeat, and calls
that wait for a machine. Each status takes the calls that were not asked about for longest, so that a process that waits
for the run asks about all of them in turn. If the sample shows an end that the store does not, all are asked about.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence

from atoll._threads import map_in_background
from atoll.errors import StoreError
from atoll.executors.modal.calls import Calls, Look, Phase
from atoll.executors.modal.records import CallRecords, RankCalls

FRESH_S = 25.0
"""A replica sends a heartbeat at least every 10 s; one that is older than this says nothing."""
_MOST_WAITING = 5
"""How many of the calls that wait for a machine are asked about."""
_RUNNING_PAGE = 100
"""One of so many replicas with a new heartbeat is asked about."""
_AT_ONCE = 16


class Looks:
    """Remembers which calls were asked about last, and which of them were over."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._order: dict[str, int] = {}
        self._over: set[str] = set()
        """Calls that were over at the last look, whatever the store says: an end that was shown stays."""

    def of(self, records: CallRecords, calls: Mapping[int, RankCalls]) -> dict[str, Look]:
        """What is known about the call that has claimed each rank, or about all its calls while none has."""
        ids = {rank: (each.holder,) if each.holder else each.ids for rank, each in calls.items()}
        try:
            ended = records.ended() if any(each.holder for each in calls.values()) else set()
            heard = _heard_lately(records, [rank for rank in calls if _is_claimed(calls[rank]) and rank not in ended])
        except StoreError:
            ended, heard = set(), set()
        running = [ids[rank][0] for rank in heard if ids[rank][0] not in self._over]
        waiting = [ids[rank][0] for rank, each in calls.items() if _is_waiting(each) and ids[rank][0] not in self._over]
        samples = [(running, 1 + len(running) // _RUNNING_PAGE), (waiting, _MOST_WAITING)]
        left_open = [call for each in ids.values() for call in each if call not in {*running, *waiting}]
        chosen = {call for group, most in samples for call in self._least_recent(group, most)}
        looks = self._ask([*left_open, *chosen])
        if any(looks[call].is_over for call in chosen):
            looks |= self._ask(call for group, _ in samples for call in group if call not in looks)
        unasked = {call: Look(call, Phase.PENDING) for group, _ in samples for call in group if call not in looks}
        return looks | unasked

    def _least_recent(self, group: Sequence[str], most: int) -> list[str]:
        """These calls of a group; in a new process, any."""
        shuffled = random.sample(group, len(group))
        return sorted(shuffled, key=lambda call: self._order.get(call, 0))[:most]

    def _ask(self, call_ids: Iterable[str]) -> dict[str, Look]:
        looks = self._calls.look_all(call_ids)
        newest = max(self._order.values(), default=0)
        self._order.update(dict.fromkeys(looks, newest + 1))
        self._over = (self._over - looks.keys()) | {call for call, look in looks.items() if look.is_over}
        return looks


def _is_claimed(calls: RankCalls) -> bool:
    """A call has claimed the rank, and no cancel was sent."""
    return bool(calls.holder) and not calls.is_stopped


def _is_waiting(calls: RankCalls) -> bool:
    """The one call of the rank was sent, and has not claimed it."""
    return calls.holder is None and len(calls.ids) == 1 and not (calls.is_stopped or calls.has_unknown)


def _heard_lately(records: CallRecords, ranks: Sequence[int]) -> set[int]:
    """Those of these ranks that have sent a heartbeat, or have claimed their rank, a moment ago.

    If the clock of this machine or of a container is wrong, the rank does not count, and Modal is asked.
    """
    times = map_in_background(records.heard_at, ranks, most=_AT_ONCE)
    now = time.time()
    return {rank for rank, at in zip(ranks, times, strict=True) if at is not None and abs(now - at) <= FRESH_S}
