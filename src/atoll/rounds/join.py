"""Before step 1: all replicas agree on layout, settings and initial weights, or say clearly why they cannot.

The first writer's weights stand and everyone loads them, so differing seeds cannot make replicas differ.

Who plays a rank: claims are numbered, and only the newest incarnation of a rank counts.

A process that was restarted takes the next number, which fences the one before: a zombie sees it before it publishes,
and a commit is made only of offers whose incarnation was still the newest when the claims were read after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.errors import Conflict, CorruptUpdate, Fenced, InvalidSpec, KeyNotFound
from atoll.rounds import blobs
from atoll.rounds.io import Steps, StoreIO
from atoll.rounds.keys import RoundKeys
from atoll.rounds.records import Agreement, Blob, Claim
from atoll.rounds.tuning import CLOSE_S, Tuning, good_chunk
from atoll.stores.base import Buffer

_LOOKS = 6


@dataclass(frozen=True)
class LatestClaim:
    """The newest claim of a rank."""

    incarnation: int
    has_left: bool


def latest_claims(io: StoreIO, keys: RoundKeys) -> Steps[Mapping[int, LatestClaim]]:
    """The newest claim of every rank; one LIST."""
    found: dict[int, LatestClaim] = {}
    for key in (yield from io.list(keys.claims_prefix())):
        rank, incarnation, has_left = keys.parse_claim(key)
        known = found.get(rank)
        if known is None or (incarnation, has_left) > (known.incarnation, known.has_left):
            found[rank] = LatestClaim(incarnation, has_left)
    return found


def take_rank(io: StoreIO, keys: RoundKeys, rank: int, attempt: int, token: str) -> Steps[Claim]:
    """Claim a rank with the next incarnation. A later attempt that came first means `Fenced`."""
    looks = 0
    while True:
        newest = (yield from latest_claims(io, keys)).get(rank)
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


def check_rank(io: StoreIO, keys: RoundKeys, claim: Claim, round_no: int = -1) -> Steps[None]:
    """Raise `Fenced` if a newer incarnation of this rank exists."""
    if (yield from io.probe(keys.claim(claim.rank, claim.incarnation + 1), is_awaited=False)) is not None:
        raise fenced(claim, round_no)


def fenced(claim: Claim, round_no: int = -1) -> Fenced:
    message = f"another process has taken over rank {claim.rank} (incarnation {claim.incarnation} is not the newest)"
    return Fenced(message, round_no=round_no, reason="replaced", hint="end this process; the other one goes on")


def leave(io: StoreIO, keys: RoundKeys, claim: Claim) -> Steps[None]:
    """Say that this process takes part no more."""
    yield from io.create(keys.departure(claim.rank, claim.incarnation), claim.seal())


def _holder(io: StoreIO, keys: RoundKeys, rank: int, incarnation: int) -> Steps[Claim | None]:
    """The claim as written, or None when it cannot be read; the next number is then simply taken."""
    try:
        return (yield from io.read(keys.claim(rank, incarnation), Claim.open))
    except CorruptUpdate:
        return None


@dataclass(frozen=True)
class Start:
    """The agreed beginning: the record, and the initial buffers, one for each tensor, in layout order."""

    agreement: Agreement
    initial: list[Buffer]


def begin(
    io: StoreIO, keys: RoundKeys, wanted: Agreement, initial: Sequence[Buffer], rank: int, tuning: Tuning
) -> Steps[Start]:
    """Propose `wanted` with these weights, or adopt what is there. `wanted.initial` is filled in here."""
    check_sizes(wanted, initial)
    wanted = replace(wanted, initial=blobs.describe(0, initial))
    agreement = yield from _await_first(io, keys, rank, tuning)
    if agreement is None:
        chunk = wanted.chunk or (yield from _good_chunk(io, keys, wanted))
        yield from blobs.write_blob(io, keys, wanted.initial, initial)
        # Another may propose at the same moment, and another size: who wanted any takes the one that stands.
        yield from io.create(keys.agreement(), replace(wanted, chunk=chunk).seal())
        agreement = yield from io.read(keys.agreement(), Agreement.open)
    refuse_differences(agreement, wanted, rank)
    if agreement.initial.digest == wanted.initial.digest:
        return Start(agreement, list(initial))
    whole = yield from blobs.read_blob(io, keys, agreement.initial)
    return Start(agreement, list(blobs.sections(whole, tensor_bytes(agreement))))


def read_agreement(io: StoreIO, keys: RoundKeys) -> Steps[Agreement | None]:
    if (yield from io.probe(keys.agreement())) is None:
        return None
    return (yield from io.read(keys.agreement(), Agreement.open))


def tensor_bytes(agreement: Agreement) -> list[int]:
    return [tensor.size_bytes for layout in agreement.layouts for tensor in layout.tensors]


def check_sizes(wanted: Agreement, initial: Sequence[Buffer]) -> None:
    """The buffers are the tensors of the layout, in order."""
    found = [memoryview(buffer).nbytes for buffer in initial]
    if found != tensor_bytes(wanted):
        tensors = [tensor for layout in wanted.layouts for tensor in layout.tensors]
        problems = [
            f"{tensor.name}: {size} bytes, not {tensor.size_bytes}"
            for tensor, size in zip(tensors, found, strict=False)
            if size != tensor.size_bytes
        ]
        raise InvalidSpec("initial weights", problems or [f"{len(found)} buffers for {len(tensors)} tensors"])


def refuse_differences(agreed: Agreement, wanted: Agreement, rank: int) -> None:
    """Raise `Conflict` with every difference that would keep this replica from training the same model."""
    names = ("run_id", "codec", "mean_codec", *(("chunk",) if wanted.chunk != ANY_CHUNK else ()))
    agreed_values = {name: getattr(agreed, name) for name in names}
    wanted_values = {name: getattr(wanted, name) for name in agreed_values}
    if rank < agreed.world_size:  # a rank beyond it is one that joined later
        agreed_values["world_size"], wanted_values["world_size"] = agreed.world_size, wanted.world_size
    agreed_values |= _flat(agreed.settings)
    wanted_values |= _flat(wanted.settings)
    lines = [
        f"{name}: agreed {agreed_values.get(name)!r}, here {wanted_values.get(name)!r}"
        for name in sorted({*agreed_values, *wanted_values})
        if agreed_values.get(name) != wanted_values.get(name)
    ]
    if len(agreed.layouts) != len(wanted.layouts):
        lines.append(f"fragments: agreed {len(agreed.layouts)}, here {len(wanted.layouts)}")
    for i, (theirs, ours) in enumerate(zip(agreed.layouts, wanted.layouts, strict=False)):
        lines += [f"layout of fragment {i}, {line}" for line in ours.differences(theirs)]
    if lines:
        raise Conflict(
            agreed.run_id,
            lines,
            what=f"rank {rank} cannot join run `{agreed.run_id}`: it was made otherwise than what was agreed there",
            hint="every replica must build the same model with the same settings, and one that comes back the same as "
            "before; to change them, start a run with another id",
        )


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`{"outer": {"lr": 1}}` as `{"outer.lr": 1}`, so that a difference shows what differs and nothing else."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{above}{name}.") if value and isinstance(value, Mapping) else {above + name: value}
    return found


def _await_first(io: StoreIO, keys: RoundKeys, rank: int, tuning: Tuning) -> Steps[Agreement | None]:
    """The agreement; or None when it is on us to write it: at once for rank 0, after a while for the others."""
    began = io.clock.monotonic()
    pause = tuning.poll_first_s
    while True:
        found = yield from read_agreement(io, keys)
        if found is not None or rank == 0 or io.clock.monotonic() - began >= tuning.init_patience_s:
            return found
        yield from io.sleep(pause * (1 + io.rng.uniform(-0.25, 0.25)))
        pause = min(tuning.poll_cap_s, 1.5 * pause)


def _trip(io: StoreIO, keys: RoundKeys) -> Steps[float]:
    """How long one small request takes."""
    asked = io.clock.monotonic()
    yield from io.probe(keys.agreement())
    return io.clock.monotonic() - asked


def _good_chunk(io: StoreIO, keys: RoundKeys, wanted: Agreement) -> Steps[int]:
    """From the size of what is averaged, and the distance to the store."""
    trip_s = yield from _trip(io, keys)
    if trip_s >= CLOSE_S:
        trip_s = min(trip_s, (yield from _trip(io, keys)))  # a busy machine may have kept the first one waiting
    return good_chunk(trip_s, max((layout.size for layout in wanted.layouts), default=0), wanted.world_size)


ANY_CHUNK = 0
"""Stands in `wanted.chunk` for whatever was agreed, or will be chosen."""
NO_BLOB = Blob(0, "0" * 32, 0, ())
"""Stands in `wanted.initial` until the weights have been looked at."""
