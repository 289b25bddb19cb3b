"""Joining a run: a replica agrees on layout, settings and initial weights (`begin`), then claims its rank.

The weights of the first writer count and every replica loads them, so different seeds cannot make replicas differ.

Claims of a rank are numbered by incarnation, and only the newest counts. A restarted process takes the next number,
which fences the one before: that process reads the claim before it publishes, and a commit contains only offers whose
incarnation was the newest when the claims were read after them.
"""

from __future__ import annotations

import logging
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

log = logging.getLogger("atoll.rounds")

ANY_CHUNK = 0
"""As `wanted.chunk`: accept the agreed chunk size, or choose one."""
NO_BLOB = Blob(0, "0" * 32, 0, ())
"""As `wanted.initial`, until `begin` has hashed the weights."""
_TRIES = 6


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


def present_claims(io: StoreIO, keys: RoundKeys) -> Steps[Mapping[int, LatestClaim]]:
    """As `latest_claims`, but a rank that left in an earlier launch has not left: this launch starts it again."""
    found = dict((yield from latest_claims(io, keys)))
    if keys.rounds_of is None:
        return found
    for rank, claim in found.items():
        if claim.has_left and (yield from _departed_in(io, keys, rank, claim.incarnation)) < keys.launch:
            found[rank] = replace(claim, has_left=False)
    return found


def take_rank(io: StoreIO, keys: RoundKeys, rank: int, attempt: int, token: str) -> Steps[Claim]:
    """Claim a rank with the next incarnation. Raises `Fenced` if a later attempt holds it."""
    tries = 0
    while True:
        newest = (yield from latest_claims(io, keys)).get(rank)
        tries += 1
        if newest is not None:
            try:
                holder = yield from _holder(io, keys, rank, newest.incarnation)
            except KeyNotFound:
                # The LIST was wrong, because claims are never deleted. Skipping a number would leave an old process
                # unfenced, because it reads only the claim after its own.
                if tries >= _TRIES:
                    raise
                continue
            if holder is not None and holder.token == token:
                return holder
            if holder is not None and holder.generation > (keys.launch, attempt):
                theirs = f" of launch {holder.launch}" if holder.launch > keys.launch else ""
                message = (
                    f"attempt {attempt} of rank {rank} is older than attempt {holder.attempt}{theirs}, "
                    "which holds the rank"
                )
                raise Fenced(message, hint="to restart the rank on purpose, use a higher attempt number")
        claim = Claim(rank, 0 if newest is None else newest.incarnation + 1, attempt, token, keys.launch)
        yield from io.create(keys.claim(rank, claim.incarnation), claim.seal())
        # Read it back: the answer may have been lost, and another process may have created the same number.
        if (yield from _holder(io, keys, rank, claim.incarnation)) == claim:
            return claim


def check_rank(io: StoreIO, keys: RoundKeys, claim: Claim, round_no: int = -1) -> Steps[None]:
    """Raise `Fenced` if a newer incarnation of this rank exists."""
    if (yield from io.probe(keys.claim(claim.rank, claim.incarnation + 1), is_awaited=False)) is not None:
        raise fenced(claim, round_no)


def fenced(claim: Claim, round_no: int = -1) -> Fenced:
    message = f"another process has taken over rank {claim.rank} (incarnation {claim.incarnation} is not the newest)"
    return Fenced(message, round_no=round_no, reason="replaced", hint="end this process; the other one continues")


def leave(io: StoreIO, keys: RoundKeys, claim: Claim) -> Steps[None]:
    """Record that this process has left the run."""
    yield from io.create(keys.departure(claim.rank, claim.incarnation), claim.seal())


def _departed_in(io: StoreIO, keys: RoundKeys, rank: int, incarnation: int) -> Steps[int]:
    """The launch in which this process left; the current one if the record cannot be read."""
    try:
        return (yield from io.read(keys.departure(rank, incarnation), Claim.open)).launch
    except (CorruptUpdate, KeyNotFound):
        return keys.launch


def _holder(io: StoreIO, keys: RoundKeys, rank: int, incarnation: int) -> Steps[Claim | None]:
    """The claim as written, or None when it is damaged; the caller then takes the next number."""
    try:
        return (yield from io.read(keys.claim(rank, incarnation), Claim.open))
    except CorruptUpdate:
        return None


@dataclass(frozen=True)
class Start:
    """The agreement, and the agreed initial buffers, one for each tensor, in layout order."""

    agreement: Agreement
    initial: list[Buffer]


def begin(
    io: StoreIO, keys: RoundKeys, wanted: Agreement, initial: Sequence[Buffer], rank: int, tuning: Tuning
) -> Steps[Start]:
    """Create the agreement `wanted` with these weights, or adopt the stored one. `wanted.initial` is filled in here."""
    check_sizes(wanted, initial)
    wanted = replace(wanted, initial=blobs.describe(0, initial))
    agreement = yield from _await_first(io, keys, rank, tuning)
    if agreement is None:
        chunk = wanted.chunk or (yield from _good_chunk(io, keys, wanted))
        yield from blobs.write_blob(io, keys, wanted.initial, initial)
        # Another replica may create it first, with another chunk size, so the stored agreement is read back.
        yield from io.create(keys.agreement(), replace(wanted, chunk=chunk).seal())
        agreement = yield from io.read(keys.agreement(), Agreement.open)
        log.debug("run %s: rank %d proposed the agreement; the chunk size is %d", wanted.run_id, rank, agreement.chunk)
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
    """Raise `InvalidSpec` unless the buffers have the sizes of the tensors, in order."""
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
    """Raise `Conflict` with every difference between this replica and the agreement."""
    names = ("run_id", "codec", "mean_codec", *(("chunk",) if wanted.chunk != ANY_CHUNK else ()))
    agreed_values = {name: getattr(agreed, name) for name in names}
    wanted_values = {name: getattr(wanted, name) for name in agreed_values}
    if rank < agreed.world_size:  # a higher rank joined later
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
            what=f"rank {rank} cannot join run `{agreed.run_id}`: it differs from the agreement of the run",
            hint="every replica must build the same model with the same settings, also after a restart; "
            "to change them, start a run with another id",
        )


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`{"outer": {"lr": 1}}` as `{"outer.lr": 1}`, so that a difference names one setting."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{above}{name}.") if value and isinstance(value, Mapping) else {above + name: value}
    return found


def _await_first(io: StoreIO, keys: RoundKeys, rank: int, tuning: Tuning) -> Steps[Agreement | None]:
    """The stored agreement; None when this rank must create it: rank 0 at once, others after `init_patience_s`."""
    began = io.clock.monotonic()
    pause = tuning.poll_first_s
    while True:
        found = yield from read_agreement(io, keys)
        if found is not None or rank == 0 or io.clock.monotonic() - began >= tuning.init_patience_s:
            return found
        yield from io.sleep(pause * (1 + io.rng.uniform(-0.25, 0.25)))
        pause = min(tuning.poll_cap_s, 1.5 * pause)


def _measure_latency(io: StoreIO, keys: RoundKeys) -> Steps[float]:
    """Seconds that one small request takes."""
    asked = io.clock.monotonic()
    yield from io.probe(keys.agreement())
    return io.clock.monotonic() - asked


def _good_chunk(io: StoreIO, keys: RoundKeys, wanted: Agreement) -> Steps[int]:
    """The chunk size for the largest fragment and the latency of the store."""
    latency_s = yield from _measure_latency(io, keys)
    if latency_s >= CLOSE_S:
        latency_s = min(latency_s, (yield from _measure_latency(io, keys)))  # a busy machine may have delayed the first
    return good_chunk(latency_s, max((layout.size for layout in wanted.layouts), default=0), wanted.world_size)
