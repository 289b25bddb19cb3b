"""Meeting under a name that may have been used before: ranks agree on a fresh session, so old objects confuse nobody.

Rank 0 offers a session with a new nonce. Every other rank signs into the session on offer with `create`; a session
somebody else signed as that rank is an old one, so it waits for the next. When all have signed, rank 0 opens the
session by writing down every signature, and a rank that finds its own there is in.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from atoll._time import backoff
from atoll.errors import CorruptUpdate, QuorumLost
from atoll.rounds.keys import MeanKeys
from atoll.rounds.ops import Gather, Steps
from atoll.rounds.records import member, text, texts
from atoll.rounds.requests import Requests
from atoll.rounds.seal import open_record, seal_record
from atoll.stores.base import Buffer


@dataclass(frozen=True)
class Meeting:
    """One rank's way into a session."""

    io: Requests
    keys: MeanKeys
    rank: int
    world_size: int
    timeout_s: float
    poll_s: float

    def pauses(self) -> Iterator[float]:
        return backoff(self.poll_s / 8, factor=1.5, cap_s=self.poll_s, jitter=0.25, rng=self.io.rng)


def meet(meeting: Meeting) -> Steps[str]:
    """The session all ranks are in, or `QuorumLost` naming who did not come."""
    token = uuid.uuid4().hex
    if meeting.rank == 0:
        return (yield from _host(meeting, token))
    return (yield from _attend(meeting, token))


def _host(meeting: Meeting, token: str) -> Steps[str]:
    io, keys = meeting.io, meeting.keys
    session = token
    yield from io.put(keys.session(), seal_record({"kind": "session", "session": session}))
    tokens: dict[int, str] = {0: token}
    began, pauses = io.clock.monotonic(), meeting.pauses()
    while missing := [rank for rank in range(meeting.world_size) if rank not in tokens]:
        found: list[Buffer | None] = yield Gather([io.probe(keys.joined(session, rank)) for rank in missing], 8)
        for rank, data in zip(missing, found, strict=True):
            if data is not None:
                tokens[rank] = yield from io.read(keys.joined(session, rank), _signature)
        if len(tokens) == meeting.world_size:
            break
        if io.clock.monotonic() - began >= meeting.timeout_s:
            raise _nobody(meeting, sorted(set(missing) - set(tokens)))
        yield from io.sleep(next(pauses))
    record = {"kind": "opened", "tokens": [tokens[rank] for rank in range(meeting.world_size)]}
    yield from io.create(keys.opened(session), seal_record(record))
    return session


def _attend(meeting: Meeting, token: str) -> Steps[str]:
    io, keys = meeting.io, meeting.keys
    began, pauses = io.clock.monotonic(), meeting.pauses()
    signed: set[str] = set()
    refused: set[str] = set()
    while True:
        offered = yield from _offered(meeting)
        if offered is not None and offered not in signed | refused:
            mine = seal_record({"kind": "joined", "rank": meeting.rank, "token": token})
            key = keys.joined(offered, meeting.rank)
            won = yield from io.create(key, mine)
            is_ours = won or (yield from io.read(key, _signature)) == token
            (signed if is_ours else refused).add(offered)
        for session in signed:
            if (yield from io.probe(keys.opened(session))) is not None:
                tokens = yield from io.read(keys.opened(session), _signatures)
                if meeting.rank < len(tokens) and tokens[meeting.rank] == token:
                    return session
        if io.clock.monotonic() - began >= meeting.timeout_s:
            raise _nobody(meeting, [0])
        yield from io.sleep(next(pauses))


def _offered(meeting: Meeting) -> Steps[str | None]:
    data = yield from meeting.io.probe(meeting.keys.session())
    if data is None:
        return None
    try:
        return text(open_record(data, kind="session").get("session"))
    except CorruptUpdate:
        return None  # look again


def _signature(data: Buffer) -> str:
    return text(open_record(data, kind="joined").get("token"))


def _signatures(data: Buffer) -> tuple[str, ...]:
    return texts(member(open_record(data, kind="opened"), "tokens", list))


def _nobody(meeting: Meeting, missing: list[int]) -> QuorumLost:
    ranks = ", ".join(map(str, missing))
    message = f"rank {meeting.rank} waited {meeting.timeout_s:g} s for rank {ranks} to begin"
    return QuorumLost(message, round_no=0, missing=missing, hint="are all ranks running, with the same store address?")
