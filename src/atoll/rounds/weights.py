"""The agreed weights of a run, rebuilt from the objects in the store. Reads only; needs no replica and no torch.

The weights after N rounds are the initial weights or a snapshot of an earlier round, and the committed rounds from
there on. Before each of these rounds the state is compared with the one that the replicas reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import CorruptUpdate, KeyNotFound, RoundError
from atoll.rounds.codecs.base import F32
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Tensor
from atoll.rounds.verify import Difference, Report, Verification
from atoll.stores.base import Store

_TRIES = 3
"""Replicas of a running run delete old rounds meanwhile; the list of rounds is then read again."""


@dataclass(frozen=True)
class AgreedWeights:
    """The weights that all replicas have after `round_no` rounds."""

    run_id: str
    round_no: int
    """The number of finished rounds."""
    tensors: tuple[Tensor, ...]
    values: F32
    """The tensors one after the other."""
    has_frozen: bool
    """Whether the model also has frozen parameters. They are not in the store."""


@dataclass(frozen=True)
class RoundsHeld:
    """The rounds of a run in the store."""

    bases: tuple[int, ...]
    """The rounds before which the whole state is in the store, ascending: 0 and those of the snapshots."""
    commits: frozenset[int]

    @property
    def newest(self) -> int:
        """The number of finished rounds."""
        return max([0, *self.bases, *(number + 1 for number in self.commits)])

    def base_of(self, round_no: int) -> int | None:
        """The nearest whole state from which the state after `round_no` rounds follows; None if there is none."""
        for base in reversed([base for base in self.bases if base <= round_no]):
            if self.commits.issuperset(range(base, round_no)):
                return base
        return None

    def buildable(self) -> list[int]:
        """The numbers of rounds after which the state can be rebuilt, ascending."""
        return [number for number in range(self.newest + 1) if self.base_of(number) is not None]


def agreed_weights(store: Store, run_id: str, round_no: int | None = None, *, launch: int = 1) -> AgreedWeights:
    """The weights after `round_no` rounds; without it, after the last committed round.

    Raises `RoundError`: `no_round` if no round is committed, `gone` if the round cannot be rebuilt, with those that
    can, and `no_outer_step` for a run whose weights do not follow from its rounds.
    """
    for left in reversed(range(_TRIES)):
        replay = Verification(store, run_id, Report(run_id), launch, compares_means=False)
        held = rounds_held(store, RoundKeys(run_id, launch))
        wanted = _wanted(run_id, held, round_no)
        if replay.rule is None:
            what = f"run `{run_id}` names no outer step, so its weights do not follow from its rounds"
            hint = "only `DiLoCo` and `LocalSGD` have agreed weights in the store"
            raise RoundError(what, reason="no_outer_step", hint=hint)
        base = held.base_of(wanted)
        try:
            if base is not None:
                values = _rebuilt(replay, base, wanted)
                tensors = tuple(tensor for layout in replay.agreement.layouts for tensor in layout.tensors)
                frozen = bool(replay.agreement.settings.get("frozen_parameters"))
                return AgreedWeights(run_id, wanted, tensors, values, frozen)
        except KeyNotFound as exc:
            if not left:
                raise _gone(run_id, wanted, held, f": `{exc.key}` is not in the store") from exc
        except Difference as exc:
            raise CorruptUpdate(f"the weights of run `{run_id}` cannot be rebuilt: {exc}") from exc
        if base is None:
            break
    raise _gone(run_id, wanted, held)


def rounds_held(store: Store, keys: RoundKeys) -> RoundsHeld:
    """The rounds in the store; four LISTs."""
    blobs = {keys.parse_blob(key)[0] for key in store.list(keys.blobs_prefix())}
    snapshots = {keys.parse_snapshot(key) for key in store.list(keys.snapshots_prefix())}
    commits = {keys.parse_commit(key) for key in store.list(keys.commits_prefix())}
    starts = keys.rounds_prefix()
    present = {int(key.removeprefix(starts).partition("/")[0]) for key in store.list(starts)}
    return RoundsHeld(tuple(sorted(({0} | snapshots) & blobs)), frozenset(commits & present))


def rounds_text(rounds: Sequence[int]) -> str:
    """Such as `0, 20-24 and 30`."""
    spans: list[list[int]] = []
    for number in rounds:
        if spans and spans[-1][1] + 1 == number:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _wanted(run_id: str, held: RoundsHeld, round_no: int | None) -> int:
    if round_no is not None:
        return round_no
    if held.newest == 0:
        what = f"run `{run_id}` has no agreed weights yet: none of its rounds is finished"
        raise RoundError(what, reason="no_round", hint="round 0 has the initial weights: `--round 0`")
    return held.newest


def _gone(run_id: str, wanted: int, held: RoundsHeld, why: str = "") -> RoundError:
    if wanted > held.newest:
        what = f"run `{run_id}` has finished {held.newest} rounds, not {wanted}"
    else:
        what = f"the weights after {wanted} rounds of run `{run_id}` cannot be rebuilt any more{why}"
    hint = f"the weights after these numbers of rounds can be rebuilt: {rounds_text(held.buildable())}"
    return RoundError(what, round_no=wanted, reason="gone", hint=hint)


def _rebuilt(replay: Verification, base: int, wanted: int) -> F32:
    replay.start(base, [base])
    if replay.values is None:
        raise Difference(f"the snapshot of round {base} has no section `values`")
    for round_no in range(base, wanted):
        replay.apply(round_no)
    return replay.values
