"""Averaging while the round is still being agreed: others' chunks are read as they land, and their mean published.

Everybody expects the ranks of the last round to take part again, and knows which chunks would be whose. If that is what
is committed, most of the work is done by then, and uploads and downloads have gone on side by side. If not, nothing
is lost but the effort: a mean names the party it was made of.
"""

from __future__ import annotations

import numpy as np

from atoll.errors import CorruptUpdate
from atoll.rounds import fused
from atoll.rounds.average import Reduced, finish
from atoll.rounds.chunks import Encoded, open_update, update_header
from atoll.rounds.codec import F32, as_bytes, codec
from atoll.rounds.ops import Gather, Steps
from atoll.rounds.parts import Foreseen, joined, mean_name
from atoll.rounds.party import Party, Seat
from atoll.rounds.reduce import Accumulator
from atoll.rounds.seal import checksum
from atoll.rounds.turn import Turn


def anticipate(turn: Turn) -> Steps[None]:
    """Average what will be ours if everybody takes part, until it is known who does."""
    member, expected = turn.member, turn.expected
    if not expected or turn.is_inline or (width := member.connections // len(expected)) < 1:
        return
    chunks = range(len(member.grid(turn.fragment)))
    mine = [i for i in chunks if turn.mode == "whole" or turn.ranks[i % len(expected)] == member.rank]
    if not turn.is_separate:  # the mean will take the place of the update, which may yet be needed: keep it aside
        mine = mine[: max(1, member.connections // 2)]
    # Until the others are there, only the first chunk is asked for.
    if mine and (yield from _foresee(turn, mine[0])):
        yield Gather([_foresee(turn, i) for i in mine[1:]], width)


def _foresee(turn: Turn, chunk: int) -> Steps[bool]:
    """Average one chunk; False when the round was agreed before everything was there, or without it."""
    member = turn.member
    children = [_await_part(turn, rank, chunk) for rank in turn.ranks]
    found: list[Encoded | None] = yield Gather(children, len(children))
    parts = [part for part in found if part is not None]
    if len(parts) < len(found) or not all(part.weight > 0 for part in parts):
        return False
    seats = zip(turn.ranks, parts, strict=True)
    party = Party(tuple(Seat(rank, turn.expected[rank], part.weight) for rank, part in seats))
    start, stop = member.grid(turn.fragment).span(chunk)
    room = turn.room(start, stop)
    began = member.io.clock.monotonic()
    reduced = _reduced(turn, party, parts, np.empty(stop - start, np.float32) if room is None else room)
    member.io.spend("reduce", began)
    if reduced is None:
        return False
    if turn.mode == "scatter":
        name = mean_name(member, turn.round_no, turn.fragment, party.id, chunk)
        key = member.keys.mean(turn.round_no, party.id, chunk)
        if not (yield from member.io.create(key, name.seal(reduced.parts, reduced.encoded, check=reduced.check))):
            return False
    if turn.is_separate and reduced.values is not room:
        turn.sink.write(start, reduced.values)
    turn.foreseen[chunk] = Foreseen(party.id, reduced.parts, None if turn.is_separate else reduced.values)
    return True


def _reduced(turn: Turn, party: Party, parts: list[Encoded], out: F32) -> Reduced | None:
    """The mean of these parts; None if one of them is not what it claims to be, or values are not finite."""
    agreement, payloads = turn.member.agreement, [part.payload for part in parts]
    if agreement.codec == "fp32" and (turn.mode == "whole" or agreement.mean_codec == "fp32"):
        done = fused.average_and_check(payloads, party.coefficients, out)
        reduced = Reduced(out, [as_bytes(out)], done.check, done.is_finite, done.checks)
    else:
        accumulator = Accumulator(out.size, party.coefficients, out)
        try:
            accumulator.add_all(codec(agreement.codec), payloads)
        except CorruptUpdate:
            return None
        reduced = finish(turn.member, accumulator, tuple(checksum(payload) for payload in payloads), turn.mode)
    is_right = all(part.check in ("", check) for part, check in zip(parts, reduced.parts, strict=True))
    return reduced if reduced.is_finite and is_right else None


def _await_part(turn: Turn, rank: int, chunk: int) -> Steps[Encoded | None]:
    """A rank's bytes of a chunk as soon as they are there; None once it is known who takes part."""
    member = turn.member
    if rank == member.rank:
        values = turn.source.read(*member.grid(turn.fragment).span(chunk))
        return Encoded(joined(codec(turn.draft.codec).encode(values)), "", turn.weight)
    header = update_header(turn.draft, member.grid(turn.fragment), chunk)
    header |= {"rank": rank, "incarnation": turn.expected[rank]}
    del header["attempt"], header["weight"]
    key = member.keys.update(turn.round_no, rank, turn.expected[rank], chunk)
    pauses = member.pauses()
    while not turn.is_over:
        data = yield from member.io.probe(key)
        if data is not None:
            try:
                return open_update(data, header, is_checked=False)
            except CorruptUpdate:
                pass
        yield from member.io.sleep(next(pauses))
    return None
