"""`atoll verify`: recompute a run from the objects in the store, in the simplest way, and compare.

For every committed round in the store: its link in the chain of commits, the checksum of every update it names, their
mean against the published one, the outer step, and the state that the replicas reported before the next round.
Reads only; shares the parsing of objects with the rest of the package, but none of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from atoll.errors import CorruptUpdate, KeyNotFound, RoundError, RunNotFound
from atoll.keys import RunKeys
from atoll.rounds.blobs import sections
from atoll.rounds.chunks import MeanName, inline_chunk, open_chunk, update_header
from atoll.rounds.codecs.base import F32, codec
from atoll.rounds.codecs.bf16 import from_bf16_bits
from atoll.rounds.contributions import Participants
from atoll.rounds.frames import checksum
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Layout, numpy_dtype
from atoll.rounds.outer import OuterRule, outer_step, state_digest
from atoll.rounds.records import Ack, Agreement, Blob, Claim, Commit, Contribution, Offer, Snapshot
from atoll.rounds.reduce import weighted_mean
from atoll.rounds.tuning import Grid
from atoll.stores.base import Buffer, Store
from atoll.stores.fast import recycles

T = TypeVar("T")

_PLAIN = OuterRule(lr=1.0, momentum=0.0)
"""The outer step of the tail that is averaged without momentum, such as running statistics."""


@dataclass
class Report:
    """What was checked, and the first difference."""

    run_id: str
    first_round: int = 0
    rounds: int = 0
    updates: int = 0
    means: int = 0
    """Published chunks of the mean that were recomputed and compared."""
    trusted: int = 0
    """Published chunks that were not recomputed, because a contribution was never uploaded or is overwritten."""
    partial: int = 0
    """Rounds before the first recomputed one of which objects are already deleted."""
    left_out: int = 0
    """Contributions to chunks that are in no mean, because their rank ended before it uploaded them."""
    rejected: dict[int, int] = field(default_factory=dict)
    """Rank → the number of its updates that failed a check and are in no mean."""
    states: int = 0
    """States of replicas or snapshots that were recomputed and compared."""
    records: int = 0
    """Claims and acknowledgements that passed their checks."""
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and why."""
    difference: str | None = None

    @property
    def is_right(self) -> bool:
        return self.difference is None


class Difference(Exception):
    """The store differs from the recomputed values."""


def verify(store: Store, run_id: str, *, launch: int = 1) -> Report:
    """Check a run; the report names the first difference, if any."""
    first = partial = 0
    while True:
        report = Report(run_id, partial=partial)
        try:
            Verification(store, run_id, report, launch).run(first)
        except (Difference, CorruptUpdate) as exc:
            report.difference = str(exc)
        except KeyNotFound as exc:
            if report.rounds == 0 and _is_being_retired(store, RoundKeys(run_id, launch), report.first_round):
                first, partial = report.first_round + 1, partial + 1
                continue
            report.difference = str(exc)
        return report


def _is_being_retired(store: Store, keys: RoundKeys, round_no: int) -> bool:
    """Whether a later snapshot exists, so that a replica may be deleting this round."""
    return any(keys.parse_snapshot(key) > round_no for key in store.list(keys.snapshots_prefix()))


class Verification:
    """The walk through a run's commits, with the state they lead to.

    Without `compares_means`, published means are used as they are, and the updates they were made of are not read.
    """

    def __init__(
        self, store: Store, run_id: str, report: Report, launch: int = 1, *, compares_means: bool = True
    ) -> None:
        self._store, self._keys, self._report = store, RoundKeys(run_id, launch), report
        self._compares_means = compares_means
        try:
            self.agreement = self._read(self._keys.agreement(), Agreement.open)
        except KeyNotFound as exc:
            if next(iter(store.list(RunKeys(run_id).run_prefix)), None) is None:
                hint = f"`atoll ps --store {store.uri}` lists what is there"
                raise RunNotFound(f"no run `{run_id}` in {store.uri}", hint=hint) from exc
            has_ended = next(iter(store.list(RunKeys(run_id, launch).outcomes_prefix())), None) is not None
            why = "replicas have ended, and none had joined one" if has_ended else "no replica has joined one yet"
            reason = "never_joined" if has_ended else "not_joined_yet"
            raise RoundError(f"run `{run_id}` has no rounds in {store.uri}: {why}", reason=reason) from exc
        outer = self.agreement.settings.get("outer")
        self.rule = None if outer is None else OuterRule.from_json(outer)
        if self.rule is None:
            report.notes.append("the run names no outer step, so states were not recomputed")
        tail = self.agreement.settings.get("averaged_from")
        self._fragments = self.agreement.layouts
        self._tails: list[Any] = tail if isinstance(tail, list) else [tail] * len(self._fragments)
        ends = np.cumsum([layout.size for layout in self._fragments]).tolist()
        self._spans = [slice(end - layout.size, end) for layout, end in zip(self._fragments, ends, strict=True)]

    def run(self, at_least: int = 0) -> None:
        """Every commit from round `at_least` on."""
        listed = (self._keys.parse_commit(key) for key in self._store.list(self._keys.commits_prefix()))
        commits = sorted(round_no for round_no in listed if round_no >= at_least)
        if at_least and not commits:
            return
        snapshots = sorted(self._keys.parse_snapshot(key) for key in self._store.list(self._keys.snapshots_prefix()))
        first = self._report.first_round = commits[0] if commits else 0
        if first:
            gone = "round 0" if first == 1 else f"rounds 0 to {first - 1}"
            self._report.notes.append(f"{gone} {'is' if first == 1 else 'are'} no longer in the store and not checked")
        self.start(first, snapshots)
        for round_no in commits:
            if round_no != first + self._report.rounds:
                raise Difference(f"round {first + self._report.rounds} is missing, but round {round_no} is there")
            self.apply(round_no)
            if round_no + 1 in snapshots:
                self._compare_snapshot(round_no + 1)
        self._check_records()

    def _check_records(self) -> None:
        """Check claims and acknowledgements, on which no arithmetic depends."""
        for prefix, parse in ((self._keys.claims_prefix(), Claim.open), (self._keys.acks_prefix(), Ack.open)):
            for key in self._store.list(prefix):
                self._read(key, parse)
                self._report.records += 1

    def start(self, first: int, snapshots: Sequence[int]) -> None:
        """Load the state before the first round from the initial weights, or from a snapshot."""
        size = sum(layout.size for layout in self._fragments)
        self.values: F32 | None = None
        self._buffer = np.zeros(size, dtype=np.float32)
        self._started = [False] * len(self._fragments)
        self._previous: str | None = None
        if first == 0:
            whole = self._read_blob(self.agreement.initial)
            self.values = initial_values(self.agreement, whole)
            self._previous = self.agreement.digest
        elif first in snapshots:
            self._load_snapshot(first)
        else:
            self._report.notes.append(f"no snapshot of round {first}, so states are checked from the next one on")

    def apply(self, round_no: int) -> None:
        """Check a committed round and apply its mean to the state."""
        commit = self._read(self._keys.commit(round_no), Commit.open)
        if self._previous is not None and commit.previous != self._previous:
            raise Difference(f"round {round_no} does not continue the round before it")
        self._compare_base(commit)
        mean = self._mean(commit)
        self._previous = commit.digest
        self._report.rounds += 1
        for refused in commit.rejected:
            self._report.rejected[refused.rank] = self._report.rejected.get(refused.rank, 0) + 1
        if self.values is None or self.rule is None:
            return
        span = self._spans[commit.fragment]
        values, buffer, is_first = self.values[span], self._buffer[span], not self._started[commit.fragment]
        tail = self._tails[commit.fragment]
        end = values.size if tail is None else int(tail)
        outer_step(self.rule, values[:end], buffer[:end], mean[:end], is_first=is_first)
        if self.rule.kind == "average":
            values[end:] = mean[end:]
        else:
            outer_step(_PLAIN, values[end:], None, mean[end:], is_first=is_first)
        self._started[commit.fragment] = True

    def _compare_base(self, commit: Commit) -> None:
        if self.values is None or self.rule is None or not commit.base:
            return
        if (found := self._digest()) != commit.base:
            raise Difference(
                f"before round {commit.round_no} the state should be {found}, but the replicas had {commit.base}"
            )
        self._report.states += 1

    def _digest(self) -> str:
        assert self.values is not None
        has_buffer = self.rule is not None and self.rule.kind == "nesterov" and self.rule.momentum > 0
        return state_digest(self.values, self._buffer if has_buffer else None)

    def _mean(self, commit: Commit) -> F32:
        """The mean of a round from the updates it names; each chunk is compared with the published one."""
        layout = self._fragments[commit.fragment]
        grid = Grid(layout.size, self.agreement.chunk)
        offers = [self._offer(commit, named, layout, grid) for named in commit.contributions]
        result = np.empty(layout.size, dtype=np.float32)
        for chunk in range(len(grid)):
            start, stop = grid.span(chunk)
            if commit.mode == "whole":
                parts = (self._chunk(offer, grid, chunk) for offer in offers)
                result[start:stop] = weighted_mean(parts, commit.weights)
            else:
                result[start:stop] = self._compared_mean(commit, offers, grid, chunk)
        return result

    def _compared_mean(self, commit: Commit, offers: list[Offer], grid: Grid, chunk: int) -> F32:
        """A published chunk, compared with the mean of its contributions if all of them are in the store."""
        participants, layout = Participants.of_commit(commit), self._fragments[commit.fragment]
        how = codec(self.agreement.mean_codec)
        name = MeanName(
            commit.run_id, commit.round_no, commit.fragment, participants.id, layout.hash, how.name, grid, chunk
        )  # fmt: skip
        found = self._read(self._keys.mean(commit.round_no, participants.id, chunk), name.open)
        theirs = how.decode(found.payload, grid.count(chunk))
        if len(found.parts) != len(offers) or any(
            part not in (None, offer.chunks[chunk]) for part, offer in zip(found.parts, offers, strict=True)
        ):
            raise Difference(f"round {commit.round_no}, chunk {chunk}: the mean names other updates than the commit")
        if not self._compares_means:
            return theirs
        used = [offer for part, offer in zip(found.parts, offers, strict=True) if part is not None]
        self._report.left_out += len(offers) - len(used)
        parts = [self._part(offer, grid, chunk) for offer in used]
        values = [part for part in parts if part is not None]
        if len(values) < len(used):
            self._report.trusted += 1
            return theirs
        mean = weighted_mean(values, [offer.weight for offer in used])
        self._compare_mean(commit, chunk, theirs, how.decode(b"".join(how.encode(mean)), mean.size))
        return theirs

    def _compare_mean(self, commit: Commit, chunk: int, theirs: F32, ours: F32) -> None:
        if theirs.tobytes() != ours.tobytes():
            at = int(np.flatnonzero(theirs.view(np.uint32) != ours.view(np.uint32))[0])
            message = f"round {commit.round_no}, chunk {chunk}: the published mean differs first at value {at}"
            raise Difference(f"{message}: {theirs[at]!r} instead of {ours[at]!r}")
        self._report.means += 1

    def _part(self, offer: Offer, grid: Grid, chunk: int) -> F32 | None:
        """One rank's values; None if the rank did not upload them, or if the store has overwritten them."""
        may_be_missing = offer.is_local_only(chunk) or recycles(self._store)
        try:
            return self._chunk(offer, grid, chunk)
        except KeyNotFound:
            if not may_be_missing:
                raise
            return None

    def _offer(self, commit: Commit, named: Contribution, layout: Layout, grid: Grid) -> Offer:
        identity: dict[str, Any] = {
            "run_id": commit.run_id,
            "round_no": commit.round_no,
            "rank": named.rank,
            "slot": named.slot,
        }
        key = self._keys.offer(commit.round_no, named.rank, named.slot)
        offer = self._read(key, lambda data: Offer.open(data, **identity))
        if (offer.digest, offer.weight, offer.layout) != (named.digest, named.weight, layout.hash):
            raise Difference(f"round {commit.round_no}: the offer of rank {named.rank} is not the committed one")
        if len(offer.chunks) != len(grid):
            raise Difference(f"round {commit.round_no}: the offer of rank {named.rank} has {len(offer.chunks)} chunks")
        self._report.updates += 1
        return offer

    def _chunk(self, offer: Offer, grid: Grid, chunk: int) -> F32:
        if offer.inline is not None:
            return codec(offer.codec).decode(inline_chunk(offer, grid, chunk).payload, grid.count(chunk))
        key = self._keys.update(offer.round_no, offer.rank, offer.incarnation, chunk)
        header = update_header(offer, grid, chunk)
        return self._read(key, lambda data: open_chunk(data, header, wanted=offer.chunks[chunk]))

    def _load_snapshot(self, round_no: int) -> None:
        record, buffers = self._snapshot(round_no)
        self._previous = record.previous
        if "values" not in buffers:
            self._report.notes.append(f"the snapshot of round {round_no} has no section `values`")
            return
        self.values = np.frombuffer(buffers["values"], dtype="<f4").astype(np.float32)
        if "momentum" in buffers:
            self._buffer = np.frombuffer(buffers["momentum"], dtype="<f4").astype(np.float32)
        self._started = [bool(flag) for flag in record.meta.get("started", [True] * len(self._fragments))]

    def _compare_snapshot(self, round_no: int) -> None:
        record, buffers = self._snapshot(round_no)
        if record.previous != self._previous:
            raise Difference(f"the snapshot of round {round_no} belongs to another history")
        if self.values is None:
            self._load_snapshot(round_no)
            return
        if self.rule is None or "values" not in buffers:
            return
        ours = {"values": self.values, "momentum": self._buffer}
        for name, theirs in buffers.items():
            if name in ours and bytes(theirs) != ours[name].astype("<f4").tobytes():
                raise Difference(f"the `{name}` of the snapshot of round {round_no} differ from the recomputed ones")
        self._report.states += 1

    def _snapshot(self, round_no: int) -> tuple[Snapshot, dict[str, memoryview]]:
        record = self._read(self._keys.snapshot(round_no), Snapshot.open)
        whole = self._read_blob(record.blob)
        views = sections(whole, [size for _, size in record.sections])
        return record, {name: view for (name, _), view in zip(record.sections, views, strict=True)}

    def _read(self, key: str, parse: Callable[[Buffer], T]) -> T:
        """Read and check an object; a difference names its key."""
        data = self._store.get(key)
        try:
            return parse(data)
        except CorruptUpdate as exc:
            raise Difference(f"{exc.message} (`{key}`)") from exc

    def _read_blob(self, blob: Blob) -> bytearray:
        whole = bytearray()
        for i, (size, check) in enumerate(blob.pieces):
            key = self._keys.blob(blob.round_no, blob.digest, i)
            piece: Buffer = self._store.get(key)
            if memoryview(piece).nbytes != size or checksum(piece) != check:
                raise Difference(f"piece {i} of the blob of round {blob.round_no} fails its checksum (`{key}`)")
            whole += piece
        return whole


def initial_values(agreement: Agreement, whole: bytearray) -> F32:
    """The initial weights as one flat float32 vector, fragment after fragment."""
    tensors = [tensor for layout in agreement.layouts for tensor in layout.tensors]
    parts = []
    for tensor, view in zip(tensors, sections(whole, [t.size_bytes for t in tensors]), strict=True):
        raw = np.frombuffer(view, dtype=numpy_dtype(tensor.dtype))
        parts.append(from_bf16_bits(raw.astype(np.uint16)) if tensor.dtype == "bfloat16" else raw.astype(np.float32))
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)
