"""The records of a launch's calls, in the store of the run. Modal has neither names nor a list of calls.

    launch/calls/plan.json          which request this launch sends; another one is refused. For a part of a run that
                                    begins with rank 3 this is `plan-00003.json`
    launch/calls/sent/TOKEN.json    one for each launcher: rank -> call id, or null before Modal has answered;
                                    and the ranks for which an answer was lost
    launch/calls/stop/00002.json    a cancel of rank 2 was sent
    start/00002.000.json            the claim of rank 2 with the id of its call; see `journal.Claim`

The claim is one `create`, so exactly one call of each rank enters user code, however many calls were sent. A cancel
that does not know every call of a rank takes the claim itself: then no call of this rank runs any more.

The records have the ranks of the run. The methods here count the replicas of a part from 0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from atoll import journal
from atoll._threads import map_in_background
from atoll.context import RunContext
from atoll.errors import Conflict, KeyExists, KeyNotFound, StoreError
from atoll.journal import Claim
from atoll.keys import RunKeys
from atoll.stores.base import Store

_AT_ONCE = 16
BARRED = ""
"""The holder of a claim that a cancel has taken."""


@dataclass(frozen=True)
class RankCalls:
    """What the records say about the calls of one rank."""

    sent: tuple[str, ...] = ()
    """Call ids that launchers have recorded."""
    has_unknown: bool = False
    """A launcher may have sent a call whose id it has not recorded."""
    holder: str | None = None
    """The call that has claimed the rank; None if none has, `BARRED` if a cancel has."""
    is_stopped: bool = False
    """A cancel was sent."""
    claimed_at: float | None = None
    """When the rank was claimed, by the clock of the container."""

    @property
    def is_known(self) -> bool:
        """Whether a launcher has begun to start this rank."""
        return bool(self.sent or self.has_unknown or self.holder is not None)

    @property
    def ids(self) -> tuple[str, ...]:
        """Every known call of the rank, the one that has claimed it first."""
        holder = (self.holder,) if self.holder else ()
        return (*holder, *(each for each in self.sent if each not in holder))


class CallRecords:
    """The records of one launch, or of one part of it."""

    def __init__(self, store: Store, context: RunContext, claims: dict[int, Claim] | None = None) -> None:
        """`claims` are claims that were read before, by rank, which never change; `read` adds to them."""
        self.store, self._run_id, self._launch = store, context.run_id, context.launch
        self._first = context.first_rank
        self._keys = RunKeys(context.run_id, context.launch)
        self._claims: dict[int, Claim] = {} if claims is None else claims
        self._attempts: dict[int, int] = {}
        """Rank -> its newest attempt."""

    def check_plan(self, token: str) -> None:
        """Record the request of this launch. `Conflict` if another request was recorded before."""
        key = self._keys.calls_plan(self._first)
        try:
            self.store.create(key, _encoded({"request_sha256": token}))
        except KeyExists:
            if _decoded(self.store.get(key)).get("request_sha256") != token:
                what = [f"launch {self._launch}: begun with another placement or setting"]
                raise Conflict(self._run_id, what) from None

    def record_sent(
        self, launcher: str, calls: Mapping[int, str | None], *, lost: Collection[int], handle: str
    ) -> None:
        """Record which calls this launcher has sent, or is about to send. `lost` are ranks that may have one more."""
        record = {
            "calls": {str(self._first + rank): call for rank, call in calls.items()},
            "lost": sorted(self._first + rank for rank in lost),
            "handle": handle,
            "at": time.time(),
        }
        self.store.put(self._keys.calls_sent(launcher), _encoded(record))

    def record_stop(self, rank: int) -> None:
        self.store.put(self._keys.call_stop(self._first + rank), _encoded({"at": time.time()}))

    def bar(self, rank: int) -> bool:
        """Take the claim of a rank, so that no call runs it. False if a call has it."""
        return journal.bar_rank(self.store, self._run_id, self._first + rank, launch=self._launch)

    def read(self, replicas: int) -> list[RankCalls]:
        """What is recorded about each rank: two LISTs, a GET for each launcher, and a GET for each new claim."""
        sent: dict[int, list[str]] = {}
        unknown, stopped = set[int](), set[int]()
        for key in self.store.list(self._keys.calls_prefix()):
            kind, name = self._keys.parse_calls(key)
            if kind == "sent":
                calls, lost = self._sent(key)
                unknown |= {*lost, *(rank for rank, call in calls.items() if call is None)}
                for rank, call in calls.items():
                    if call is not None and call not in sent.setdefault(rank, []):
                        sent[rank].append(call)
            elif kind == "stop":
                stopped.add(int(name))
        self._attempts = dict(map(self._keys.parse_start, self.store.list(self._keys.starts_prefix())))
        for rank in self._claims.keys() - self._attempts.keys():  # the run was removed, and may be launched again
            del self._claims[rank]
        ranks = range(self._first, self._first + replicas)
        new = [rank for rank in self._attempts if rank in ranks and rank not in self._claims]
        self._claims.update(zip(new, map_in_background(self._claim, new, most=_AT_ONCE), strict=True))
        found = []
        for rank in ranks:
            claim = self._claims.get(rank)
            holder, at = (None, None) if claim is None else (_holder(claim), claim.at)
            found.append(RankCalls(tuple(sent.get(rank, ())), rank in unknown, holder, rank in stopped, at))
        return found

    def _claim(self, rank: int) -> Claim:
        return journal.read_claim(self.store, self._run_id, rank, launch=self._launch)

    def ended(self) -> set[int]:
        """Ranks whose newest attempt, as `read` found it, has an outcome in the store."""
        listed = map(self._keys.parse_outcome, self.store.list(self._keys.outcomes_prefix()))
        return {rank - self._first for rank, attempt in listed if attempt >= self._attempts.get(rank, 0)}

    def heard_at(self, rank: int) -> float | None:
        """When a claimed rank gave its last sign of life: its heartbeat, else its claim. None if neither is there."""
        number = self._first + rank
        for key, name in ((self._keys.beat(number), "beat_at"), (self._keys.start(number, 0), "at")):
            try:
                at = _decoded(self.store.get(key)).get(name)
            except KeyNotFound:
                continue
            if isinstance(at, int | float):
                return float(at)
        return None

    def _sent(self, key: str) -> tuple[dict[int, str | None], set[int]]:
        try:
            record = _decoded(self.store.get(key))
        except KeyNotFound:
            return {}, set()
        calls = record.get("calls") or {}
        return {int(rank): call and str(call) for rank, call in calls.items()}, set(record.get("lost") or ())


def _holder(claim: Claim) -> str | None:
    """`RankCalls.holder` of a claim; None for that of a container to which Modal has not told the id of its call."""
    return BARRED if claim.is_barred else claim.job or None


def sent_handles(store: Store) -> dict[str, list[str]]:
    """The handle of every launch that has records in this store, and the keys of these records."""
    found: dict[str, list[str]] = {}
    for key in store.list("runs/"):
        if "/calls/sent/" in key:
            found.setdefault(str(_decoded(store.get(key)).get("handle")), []).append(key)
    return found


def _encoded(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _decoded(data: Any) -> dict[str, Any]:
    try:
        found = json.loads(bytes(data))
    except ValueError as exc:
        raise StoreError(f"a record of a call is damaged: {exc}", reason="damaged") from exc
    if not isinstance(found, dict):
        raise StoreError("a record of a call is damaged: it is no JSON object", reason="damaged")
    return found
