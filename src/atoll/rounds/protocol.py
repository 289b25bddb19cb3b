"""A replica's side of the protocol, as steps to be driven: what `RoundClient` does, without the blocking.

Tests drive many of these in one thread; `RoundClient` drives one with threads and a real clock.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import CorruptUpdate, InternalError, LeftBehind
from atoll.rounds import claims, retention
from atoll.rounds import exchange as rounds_exchange
from atoll.rounds.begin import ANY_CHUNK, NO_BLOB, begin
from atoll.rounds.codec import codec
from atoll.rounds.codec_sizes import DEFAULT_CODEC, recommended_mean
from atoll.rounds.events import EventLog
from atoll.rounds.exchange import RoundOutcome
from atoll.rounds.grid import Grid
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Layout
from atoll.rounds.member import Member, Tuning
from atoll.rounds.ops import Steps
from atoll.rounds.quorum import Quorum
from atoll.rounds.records import Agreement
from atoll.rounds.requests import Requests
from atoll.rounds.snapshots import LoadedSnapshot, load_snapshot, snapshot_rounds, write_snapshot
from atoll.rounds.vectors import Sink, Source
from atoll.rounds.watch import read_commit
from atoll.stores.base import Buffer

REPLAY_LIMIT = 4
"""With a snapshot further ahead than this many rounds, loading it is less work than replaying them."""


@dataclass(frozen=True)
class Head:
    """Where a run is, as the store shows it."""

    next_round: int
    """The first round that is not committed."""
    oldest_round: int | None
    """The oldest committed round that is still there."""
    snapshot_round: int | None
    """The newest round that has a snapshot."""


class RoundProtocol:
    """One replica of one run. Call `join` first; then `exchange` once for every round, in order."""

    def __init__(
        self,
        run_id: str,
        rank: int,
        world_size: int,
        *,
        layouts: Sequence[Layout],
        attempt: int = 0,
        codec_name: str = DEFAULT_CODEC,
        mean_codec: str | None = None,
        chunk: int | None = None,
        quorum: Quorum | None = None,
        settings: Mapping[str, Any] | None = None,
        tuning: Tuning | None = None,
        lease_s: float = 900.0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
        token: str | None = None,
    ) -> None:
        self._keys = RoundKeys(run_id)
        self._rank, self._attempt = rank, attempt
        self._quorum, self.tuning = quorum or Quorum(), tuning or Tuning()
        self._token = token or uuid.uuid4().hex
        self._quorum.check_reachable(world_size)
        if chunk:
            Grid(0, chunk)  # refuses odd sizes
        self._wanted = Agreement(
            run_id,
            world_size,
            tuple(layouts),
            chunk or ANY_CHUNK,
            codec(codec_name).name,
            codec(mean_codec or recommended_mean(codec_name)).name,
            dict(settings or {}),
            NO_BLOB,
        )
        self.io = Requests(clock, rng or random.Random(), retry_s=self.tuning.retry_s)
        self._leases = retention.Leases(lease_s)
        self._acks = 0
        self._member: Member | None = None

    @property
    def member(self) -> Member:
        if self._member is None:
            raise InternalError("a replica joins before it does anything else")
        return self._member

    def join(self, initial: Sequence[Buffer]) -> Steps[list[Buffer]]:
        """Agree on everything and claim the rank; the initial weights that stand come back."""
        # In this order, so that a process that was built differently is refused before it fences the right one.
        start = yield from begin(self.io, self._keys, self._wanted, initial, self._rank, self.tuning)
        claim = yield from claims.take_rank(self.io, self._keys, self._rank, self._attempt, self._token)
        events = EventLog(self._keys, self._rank, claim.incarnation, self.io.clock)
        self.io.timeline.open(self._keys, self._rank, claim.incarnation)
        self._member = Member(
            self.io, self._keys, claim, start.agreement, self._quorum, self.tuning, events,
            previous=start.agreement.digest,
        )  # fmt: skip
        asked = self.io.clock.monotonic()  # now, while nothing else goes on: how far away is the store?
        yield from self.io.probe(self._keys.claim(self._rank, claim.incarnation))
        self._member.memory.trips.append(self.io.clock.monotonic() - asked)
        return start.initial

    def exchange(
        self, round_no: int, source: Source, sink: Sink, *, weight: float, fragment: int | None = None, base: str = ""
    ) -> Steps[RoundOutcome]:
        """Contribute to a round and take in its mean."""
        which = self._fragment(round_no) if fragment is None else fragment
        self.io.timeline.begin(round_no, which)
        try:
            outcome = yield from rounds_exchange.exchange(self.member, round_no, which, source, weight, base, sink)
        except BaseException:
            self.io.timeline.end(is_included=False, is_over=False)
            raise
        self.io.timeline.end(is_included=outcome.is_included)
        return outcome

    def replay(self, round_no: int, room: Callable[[int], Sink]) -> Steps[RoundOutcome | None]:
        """Take in a round without contributing; None when it is not committed. `room(fragment)` is the sink."""
        return (yield from rounds_exchange.replay(self.member, round_no, room))

    def is_committed(self, round_no: int) -> Steps[bool]:
        """Whether the store has the commit of a round; one GET."""
        return (yield from read_commit(self.member, round_no, is_awaited=False)) is not None

    def catch_up(
        self,
        round_no: int,
        room: Callable[[int], Sink],
        apply: Callable[[RoundOutcome], None],
        load: Callable[[LoadedSnapshot], None],
        *,
        replace_diverged: bool = False,
    ) -> Steps[int]:
        """Take in all that was committed from `round_no` on; the next round to contribute to comes back.

        `room(fragment)` gives the sink for a mean, `apply` is called once it is filled. `load` replaces the state when
        the rounds are gone, or when loading is less work than replaying; with `replace_diverged` also when the others
        rejected our state as different from theirs, which otherwise raises `CorruptUpdate`.
        """
        while (head := (yield from self.latest())).next_round > round_no:
            before, trouble = round_no, None
            is_far = head.snapshot_round is not None and head.snapshot_round > round_no + REPLAY_LIMIT
            if is_far or head.oldest_round is None or head.oldest_round > round_no:
                round_no = yield from self._jump(round_no, load)
            try:
                while (outcome := (yield from self.replay(round_no, room))) is not None:
                    apply(outcome)
                    round_no += 1
            except (LeftBehind, CorruptUpdate) as exc:
                if isinstance(exc, CorruptUpdate) and not (replace_diverged and exc.check == "base"):
                    raise
                trouble = exc
            if trouble is not None or round_no == before:  # there are later rounds, and this one is not to be had
                gone = round_no
                round_no = yield from self._jump(gone, load)
                if round_no == gone:
                    message = f"round {gone} is gone and no snapshot after it can be read"
                    raise LeftBehind(message, round_no=gone, latest=head.next_round - 1) from trouble
        return round_no

    def _jump(self, round_no: int, load: Callable[[LoadedSnapshot], None]) -> Steps[int]:
        """Take over a snapshot that is further than we are, if one can be read; the round that is next then."""
        loaded = yield from self.load_snapshot(round_no + 1)
        if loaded is None:
            return round_no
        load(loaded)
        return loaded.round_no

    def latest(self) -> Steps[Head]:
        """Where the others are; two LISTs."""
        keys = self.member.keys
        commits = [keys.parse_commit(key) for key in (yield from self.io.list(keys.commits_prefix()))]
        snapshots = yield from snapshot_rounds(self.member)
        next_round = max([-1, *commits, *(r - 1 for r in snapshots)]) + 1
        return Head(next_round, min(commits, default=None), max(snapshots, default=None))

    def write_snapshot(
        self, round_no: int, buffers: Mapping[str, Buffer], meta: Mapping[str, Any] | None = None
    ) -> Steps[bool]:
        """Publish the state before `round_no`, which must be the next round; False when another has."""
        return (yield from write_snapshot(self.member, round_no, buffers, meta or {}))

    def load_snapshot(self, at_least: int = 0) -> Steps[LoadedSnapshot | None]:
        """The newest readable snapshot; the next round to replay is its `round_no`."""
        return (yield from load_snapshot(self.member, at_least))

    def continue_from(self, position: str) -> None:
        """Take up after a checkpoint of one's own: `position` is `member.previous` as it was when that was written."""
        self.member.previous = position

    def acknowledge(self, round_no: int) -> Steps[None]:
        """Promise never to need a round below `round_no` again, even after a crash."""
        self._acks += 1
        yield from retention.acknowledge(self.member, round_no, self._acks)

    def retire(self) -> Steps[int]:
        """Delete what no live replica needs; one replica calling it, after it wrote a snapshot, is enough."""
        return (yield from retention.retire(self.member, self._leases))

    def _fragment(self, round_no: int) -> int:
        return round_no % len(self.member.agreement.layouts)

    def leave(self) -> Steps[None]:
        """Say goodbye: the others do not wait for this rank any more."""
        self.member.events.add("left", -1, rank=self._rank)
        yield from self.member.events.flush(self.io)
        yield from self.io.timeline.finish(self.io)
        yield from claims.leave(self.io, self._keys, self.member.claim)

    def finish(self) -> Steps[None]:
        """Leave in the store what was measured; quiet, and at once, if the store does not answer."""
        if self._member is not None and not self.io.is_cut_off:
            yield from self.io.timeline.finish(self.io)
