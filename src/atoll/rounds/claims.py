"""Who plays a rank: claims are numbered, and only the newest incarnation of a rank counts.

A process that was restarted takes the next number, which fences the one before: a zombie sees it before it publishes,
and a commit is made only of offers whose incarnation was still the newest when the claims were read after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import CorruptUpdate, Fenced, KeyNotFound
from atoll.rounds.keys import RoundKeys
from atoll.rounds.ops import Steps
from atoll.rounds.records import Claim
from atoll.rounds.requests import Requests

_LOOKS = 6


@dataclass(frozen=True)
class Standing:
    """The newest claim of a rank."""

    incarnation: int
    has_left: bool


def standings(io: Requests, keys: RoundKeys) -> Steps[Mapping[int, Standing]]:
    """The newest claim of every rank; one LIST."""
    found: dict[int, Standing] = {}
    for key in (yield from io.list(keys.claims_prefix())):
        rank, incarnation, has_left = keys.parse_claim(key)
        known = found.get(rank)
        if known is None or (incarnation, has_left) > (known.incarnation, known.has_left):
            found[rank] = Standing(incarnation, has_left)
    return found


def take_rank(io: Requests, keys: RoundKeys, rank: int, attempt: int, token: str) -> Steps[Claim]:
    """Claim a rank with the next incarnation. A later attempt that came first means `Fenced`."""
    looks = 0
    while True:
        newest = (yield from standings(io, keys)).get(rank)
        looks += 1
        if newest is not None:
            try:
                holder = yield from _holder(io, keys, rank, newest.incarnation)
            except KeyNotFound:
                # The LIST was spoilt on its way: a claim is never deleted. Skipping a number would leave a zombie
                # unfenced, for it looks only at the number after its own.
                if looks >= _LOOKS:
                    raise
                continue
            if holder is not None and holder.token == token:
                return holder
            if holder is not None and holder.attempt > attempt:
                message = f"attempt {attempt} of rank {rank} comes after attempt {holder.attempt} took over"
                raise Fenced(message, hint="to start it anew on purpose, give it a higher attempt number")
        claim = Claim(rank, 0 if newest is None else newest.incarnation + 1, attempt, token)
        yield from io.create(keys.claim(rank, claim.incarnation), claim.seal())
        # Read back: an answer may have been lost, and an equal number may be somebody else's.
        if (yield from _holder(io, keys, rank, claim.incarnation)) == claim:
            return claim


def check_rank(io: Requests, keys: RoundKeys, claim: Claim, round_no: int = -1) -> Steps[None]:
    """Raise `Fenced` if a newer incarnation of this rank exists."""
    if (yield from io.probe(keys.claim(claim.rank, claim.incarnation + 1), is_awaited=False)) is not None:
        raise fenced(claim, round_no)


def fenced(claim: Claim, round_no: int = -1) -> Fenced:
    message = f"another process has taken over rank {claim.rank} (incarnation {claim.incarnation} is not the newest)"
    return Fenced(message, round_no=round_no, reason="replaced", hint="end this process; the other one goes on")


def leave(io: Requests, keys: RoundKeys, claim: Claim) -> Steps[None]:
    """Say that this process takes part no more."""
    yield from io.create(keys.departure(claim.rank, claim.incarnation), claim.seal())


def _holder(io: Requests, keys: RoundKeys, rank: int, incarnation: int) -> Steps[Claim | None]:
    """The claim as written, or None when it cannot be read; the next number is then simply taken."""
    try:
        return (yield from io.read(keys.claim(rank, incarnation), Claim.open))
    except CorruptUpdate:
        return None
