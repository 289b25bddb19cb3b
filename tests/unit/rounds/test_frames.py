from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from atoll.errors import CorruptUpdate, InternalError
from atoll.rounds.chunks import MeanName, open_chunk, seal_chunk, update_header
from atoll.rounds.frames import ALIGNMENT, MAX_HEADER_BYTES, checksum, open_frame, open_record, seal_frame, seal_record
from atoll.rounds.layout import Layout
from atoll.rounds.records import Ack, Agreement, Blob, Claim, Commit, Contribution, Offer, Rejection, Snapshot
from atoll.rounds.tuning import Grid

LAYOUT = Layout.of([("w", [2000], "float32")])
GRID = Grid(2000, 1024)
VALUES = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
OFFER = Offer("run", 3, 0, 2, 1, 0, "token", LAYOUT.hash, "fp32", "base", 640.0, 1.5, ("0" * 16, "1" * 16))
COMMIT = Commit(
    "run", 3, 0, "before", "base", "scatter",
    (Contribution(0, 0, 0, 0, "ab", 1.0, 2.0), Contribution(2, 1, 0, 0, "cd", 3.0, 4.0)),
    (Rejection(1, "finite", "why"),), (0, 1, 2), 0,
)  # fmt: skip
BLOB = Blob(0, "ab" * 16, 5, ((3, "x"), (2, "y")))


def joined(parts: list[memoryview]) -> bytes:
    return b"".join(parts)


def samples() -> dict[str, tuple[bytes, Callable[[bytes], object]]]:
    """One sealed object of every kind, and how it is opened."""
    header = update_header(OFFER, GRID, 0)
    mean = MeanName("run", 3, 0, "ab" * 8, LAYOUT.hash, "fp32", GRID, 1)
    agreement = Agreement("run", 3, (LAYOUT,), 1024, "fp32", "fp32", {"lr": 0.7}, BLOB)
    return {
        "update": (joined(seal_chunk(header, [VALUES.data.cast("B")])), lambda data: open_chunk(data, header)),
        "mean": (joined(mean.seal(("0" * 16, None), [VALUES[:976].data.cast("B")])), mean.open),
        "offer": (joined(OFFER.seal()), lambda data: Offer.open(data, run_id="run", round_no=3, rank=2, slot=0)),
        "commit": (COMMIT.seal(), Commit.open),
        "agreement": (agreement.seal(), Agreement.open),
        "claim": (Claim(1, 2, 3, "t").seal(), Claim.open),
        "ack": (Ack(1, 2, 3, 4).seal(), Ack.open),
        "snapshot": (Snapshot("run", 4, "p", (("values", 5),), BLOB, {"a": 1}).seal(), Snapshot.open),
    }


@pytest.mark.parametrize("kind", list(samples()))
def test_every_kind_comes_back_as_it_was(kind: str) -> None:
    sealed, opened = samples()[kind]
    first, second = opened(sealed), opened(bytearray(sealed))
    if isinstance(first, np.ndarray):
        assert first.tobytes() == second.tobytes() == VALUES[: first.size].tobytes()
    else:
        assert first == second
        assert (
            not hasattr(first, "seal")
            or b"".join([first.seal()] if isinstance(first.seal(), bytes) else first.seal()) == sealed
        )


@pytest.mark.parametrize("kind", list(samples()))
def test_no_mutation_is_accepted(kind: str) -> None:
    """Flips, cuts, growth, swaps, splices and overwritten runs; over all kinds more than ten thousand."""
    sealed, opened = samples()[kind]
    rng = random.Random(kind)
    accepted = 0
    for mutated in {_mutated(sealed, rng) for _ in range(1500)} - {sealed}:
        try:
            opened(mutated)
        except CorruptUpdate:
            continue
        accepted += 1
    assert accepted == 0


def test_one_kind_is_never_taken_for_another() -> None:
    for kind, (_, opened) in samples().items():
        for other, (sealed, _) in samples().items():
            if kind != other:
                with pytest.raises(CorruptUpdate):
                    opened(sealed)


def _mutated(data: bytes, rng: random.Random) -> bytes:
    spoiled = bytearray(data)
    at = rng.randrange(len(data))
    match rng.randrange(6):
        case 0:
            spoiled[at] ^= 1 << rng.randrange(8)
        case 1:
            del spoiled[at:]
        case 2:
            spoiled[at:at] = rng.randbytes(rng.randrange(1, 9))
        case 3:
            other = rng.randrange(len(data))
            spoiled[at], spoiled[other] = spoiled[other], spoiled[at]
        case 4:
            del spoiled[at : at + rng.randrange(1, 9)]
        case 5:
            run = rng.randrange(1, 65)
            spoiled[at : at + run] = bytes(min(run, len(data) - at))
    return bytes(spoiled)


def test_payloads_are_aligned_and_not_copied() -> None:
    payload = bytearray(range(256))
    parts = seal_frame({"kind": "x", "n": 1}, [payload])
    assert len(parts[0]) % ALIGNMENT == 0
    payload[0] = 77
    assert parts[1][0] == 77


def test_headers_have_a_limit_both_ways() -> None:
    with pytest.raises(InternalError):
        seal_frame({"kind": "x", "long": "y" * MAX_HEADER_BYTES})
    huge = bytearray(joined(seal_frame({"kind": "x"})))
    huge[8:12] = (MAX_HEADER_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(CorruptUpdate) as caught:
        open_frame(bytes(huge), kind="x")
    assert caught.value.check == "preamble"


def test_records_are_plain_json_with_a_checksum_at_the_end() -> None:
    import json

    sealed = seal_record({"kind": "x", "b": 2, "a": [1.5, None, "é"]})
    assert json.loads(sealed)["b"] == 2
    assert sealed.endswith(b'"}')
    assert open_record(sealed, kind="x") == {"kind": "x", "b": 2, "a": [1.5, None, "é"]}


@pytest.mark.parametrize(
    "bad", [{"rank": -1}, {"weight": 0.0}, {"weight": "1"}, {"norm": float("1e999")}, {"digest": 5}]
)
def test_a_contribution_with_a_senseless_member_is_refused(bad: dict[str, object]) -> None:
    good = {"rank": 0, "incarnation": 0, "attempt": 0, "slot": 0, "digest": "ab", "weight": 1.0, "norm": 1.0}
    Contribution.from_json(good)
    with pytest.raises(CorruptUpdate):
        Contribution.from_json({**good, **bad})
    for name in good:
        with pytest.raises(CorruptUpdate):
            Contribution.from_json({k: v for k, v in good.items() if k != name})


def test_a_commit_that_names_a_rank_twice_or_out_of_order_is_refused() -> None:
    one, two = COMMIT.contributions
    for contributions in ((), (one, one), (two, one)):
        with pytest.raises(CorruptUpdate):
            Commit("run", 0, 0, "p", "", "whole", contributions)


def test_a_sound_chunk_that_is_not_the_announced_one_is_refused() -> None:
    header = update_header(OFFER, GRID, 0)
    sealed = joined(seal_chunk(header, [VALUES.data.cast("B")]))
    open_chunk(sealed, header, wanted=checksum(VALUES.data.cast("B")))
    with pytest.raises(CorruptUpdate) as caught:
        open_chunk(sealed, header, wanted="0" * 16)
    assert (caught.value.rank, caught.value.check) == (2, "digest")
