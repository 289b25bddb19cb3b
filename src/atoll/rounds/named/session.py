"""Who exchanges with whom: a session is one process for each rank, all of them alive at the same time.

Processes find each other through numbered sessions with one seat for each rank. A seat is created once, so a process
that finds its seat taken, by an earlier job or by its own predecessor, opens the next session and the others follow.
The session's nonce is a digest of all its seats, and every key of the exchange contains it: whatever lies there was
written by a process that had seen our own seat. So nothing an earlier job left behind can be taken for a live peer,
and no clock is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property

from atoll._time import backoff
from atoll.errors import CorruptUpdate, Fenced, KeyNotFound, RanksMissing
from atoll.keys import number
from atoll.rounds.frames import digest, open_record, seal_record
from atoll.rounds.io import Gather, Steps, StoreIO
from atoll.rounds.named.keys import NamedKeys
from atoll.rounds.records import member, text, texts, whole
from atoll.stores.base import Buffer

POLL_CAP_S = 2.0
STARTED_AGAIN = "was started again"


@dataclass(frozen=True)
class Seat:
    """One client in one session. `beside` has the tokens of those that were alive in the same process and space."""

    session: int
    rank: int
    token: str
    beside: tuple[str, ...] = ()

    def seal(self) -> bytes:
        return seal_record({"kind": "seat", **asdict(self)})

    @classmethod
    def open(cls, data: Buffer) -> Seat:
        r = open_record(data, kind="seat")
        return cls(
            whole(r.get("session")), whole(r.get("rank")), text(r.get("token")), texts(member(r, "beside", list))
        )

    def replaces(self, other: Seat) -> bool:
        """Whether the other's client is over. If it lives in the same process, that goes on with both."""
        return other.token not in (self.token, *self.beside)


@dataclass(frozen=True)
class Session:
    """All seats of a session, in rank order."""

    number: int
    seats: tuple[Seat, ...]

    @cached_property
    def nonce(self) -> str:
        return digest("".join(f"{seat.session} {seat.token}\n" for seat in self.seats).encode())


@dataclass
class Attendance:
    """Which seats are taken, by session, and who has left."""

    seated: dict[int, set[int]] = field(default_factory=dict)
    left: dict[int, set[int]] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        return max(self.seated, default=0)

    def later_than(self, session: int, rank: int) -> int | None:
        """The newest session after `session` where this rank has a seat."""
        return max((n for n, ranks in self.seated.items() if n > session and rank in ranks), default=None)


@dataclass(frozen=True)
class Rendezvous:
    """How one client meets the others in a space."""

    io: StoreIO
    keys: NamedKeys
    rank: int
    token: str
    poll_first_s: float
    beside: Callable[[], Collection[str]]
    """Tokens of the clients that are alive in this process and space, this one or not."""

    @property
    def everyone(self) -> set[int]:
        return set(range(self.keys.world_size))

    def meet(self, deadline_at: float, *, after: int = -1) -> Steps[Session]:
        """Take a seat in a session later than `after`, and wait until every seat of it is taken."""
        current = yield from self._take_seat(after)
        pauses = backoff(self.poll_first_s, cap_s=max(POLL_CAP_S, self.poll_first_s), jitter=0.25, rng=self.io.rng)
        while True:
            seen = yield from self.attendance()
            if seen.newest > current:  # nobody comes to a session once there is a later one
                yield from self._check_not_replaced(seen, current)
                current = yield from self._take_seat(current)
                continue
            missing = self.everyone - seen.seated.get(current, set())
            if not missing:
                found: list[Seat | None] = yield Gather([self._read_seat(current, r) for r in sorted(self.everyone)], 8)
                seats = tuple(seat for seat in found if seat is not None)
                if len(seats) == len(found):
                    return Session(current, seats)
                missing = {rank for rank, seat in enumerate(found) if seat is None}
            left_s = deadline_at - self.io.clock.monotonic()
            if left_s <= 0:
                raise (yield from self._nobody_came(missing))
            yield from self.io.sleep(min(next(pauses), left_s))

    def attendance(self) -> Steps[Attendance]:
        """Who is where; one LIST."""
        seen = Attendance()
        for key in (yield from self.io.list(self.keys.seats_prefix())):
            session, rank, has_left = self.keys.parse_seat(key)
            ranks = (seen.left if has_left else seen.seated).setdefault(session, set())
            if rank is not None:
                ranks.add(rank)
        return seen

    def absences(self, session: Session, missing: Collection[int]) -> Steps[Mapping[int, str]]:
        """Of the ranks we miss, those who will not come any more, and why. Raises `Fenced` if we were replaced."""
        seen = yield from self.attendance()
        yield from self._check_not_replaced(seen, session.number)
        gone = {rank: "has left" for rank in missing if rank in seen.left.get(session.number, ())}
        for rank in set(missing) - set(gone):
            later = seen.later_than(session.number, rank)
            if later is not None and (yield from self._is_replaced(session.seats[rank], later)):
                gone[rank] = STARTED_AGAIN
        return gone

    def is_alive_here(self, session: int) -> Steps[bool]:
        """Whether a client of this very process holds our seat in that session, and is still in use."""
        seat = yield from self._read_seat(session, self.rank)
        return seat is not None and seat.token in self.beside()

    def _take_seat(self, after: int) -> Steps[int]:
        session = max((yield from self.attendance()).newest, after + 1)
        while True:
            seat = Seat(session, self.rank, self.token, tuple(sorted(self.beside())))
            if (yield from self.io.create(self.keys.seat(session, self.rank), seat.seal())):
                return session
            taken = yield from self._read_seat(session, self.rank)
            if taken is not None and taken.token == self.token:  # only the answer was lost
                return session
            session += 1

    def _read_seat(self, session: int, rank: int) -> Steps[Seat | None]:
        """A seat as it was taken; None when it is gone or spoilt, and then nobody waits there."""
        try:
            seat = yield from self.io.read(self.keys.seat(session, rank), Seat.open)
        except (CorruptUpdate, KeyNotFound):
            return None
        return seat if (seat.session, seat.rank) == (session, rank) else None

    def _is_replaced(self, seat: Seat, later: int) -> Steps[bool]:
        found = yield from self._read_seat(later, seat.rank)
        return found is not None and found.replaces(seat)

    def _check_not_replaced(self, seen: Attendance, session: int) -> Steps[None]:
        later = seen.later_than(session, self.rank)
        if later is not None and (yield from self._is_replaced(Seat(session, self.rank, self.token), later)):
            message = f"another process has taken over rank {self.rank} in {self.keys.prefix}"
            raise Fenced(message, hint="end this process; the other one goes on")

    def _nobody_came(self, missing: Collection[int]) -> Steps[RanksMissing]:
        ranks = tuple(sorted(missing))
        message = f"rank {', '.join(map(str, ranks))} of {self.keys.world_size} did not come to {self.keys.prefix}"
        listed = yield from self.io.list(self.keys.space_prefix)
        others = {key.removeprefix(self.keys.space_prefix).split("/")[0] for key in listed}
        others.discard(number(self.keys.world_size, 5))
        if others:
            message += f"; others were there with world_size {', '.join(str(int(n)) for n in sorted(others))}"
        hint = "every rank must use the same store, round_id and world_size, and be running now"
        return RanksMissing(message, round_no=-1, missing=ranks, hint=hint)
