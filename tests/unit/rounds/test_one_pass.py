"""What is done tile by tile in one pass gives the bits of what is done plainly, one thing after the other."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from atoll._time import SYSTEM_CLOCK
from atoll.errors import CorruptUpdate, StoreUnavailable
from atoll.kernels import fused
from atoll.rounds import one_pass
from atoll.rounds.frames import FrameReader, checksum, seal_frame
from atoll.rounds.reduce import Coefficients, weighted_mean
from atoll.stores.fast import BufferBody
from atoll.stores.file.store import FileStore

SIZES = [1, 5, 4095, 4096, 1 << 16, (1 << 16) + 1, 3 * (1 << 16) + 777]


def values_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([size, seed]).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weights", [(1.0,), (2.0, 2.0, 2.0), (1000.0, 1017.0, 3.5)])
def test_a_mean_in_one_pass_has_the_bits_and_checksums_of_the_plain_one(size: int, weights: tuple[float, ...]) -> None:
    parts = [values_of(size, seed) for seed in range(len(weights))]
    out = np.full(size, np.nan, np.float32)
    readers = [one_pass.InMemory(part.data.cast("B")) for part in parts]
    done = one_pass.average_and_check(readers, Coefficients.of(weights), out)
    plain = weighted_mean(parts, weights)
    assert out.tobytes() == plain.tobytes()
    assert done.checks == tuple(checksum(part.data.cast("B")) for part in parts)
    assert done.check == checksum(plain.data.cast("B"))
    assert done.is_finite


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 70_000, 99_999])
def test_one_value_that_is_not_finite_is_seen(bad: float, at: int) -> None:
    values = values_of(100_000)
    values[at] = bad
    out = np.empty_like(values)
    part = one_pass.InMemory(values.data.cast("B"))
    assert not one_pass.average_and_check([part], Coefficients.of([1.0]), out).is_finite
    assert not np.isfinite(one_pass.squares_and_check(values)[0])


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e25])
@pytest.mark.parametrize("size", SIZES)
def test_a_sum_of_squares_keeps_four_digits_at_any_scale(size: int, scale: float) -> None:
    values = values_of(size) * np.float32(scale)
    square, check = one_pass.squares_and_check(values)
    assert square == pytest.approx(float(np.square(values.astype(np.float64)).sum()), rel=1e-4)
    assert check == checksum(values.data.cast("B"))


def test_a_part_whose_checksum_is_known_is_not_hashed_again() -> None:
    values = values_of(1000)
    out = np.empty_like(values)
    done = one_pass.average_and_check([one_pass.InMemory(values.data.cast("B"), "told")], Coefficients.of([1.0]), out)
    assert done.checks == ("told",)


@pytest.mark.parametrize("size", SIZES)
def test_parts_that_are_still_arriving_are_averaged_to_the_same_bits(size: int) -> None:
    parts = [values_of(size, seed) for seed in range(3)]
    frames = [b"".join(seal_frame({"kind": "update", "rank": r}, [p.data.cast("B")])) for r, p in enumerate(parts)]
    arriving = [FrameReader(BufferBody(frame), SYSTEM_CLOCK, kind="update") for frame in frames]
    out = np.full(size, np.nan, np.float32)
    readers = [arriving[0], one_pass.InMemory(parts[1].data.cast("B")), arriving[2]]
    done = one_pass.average_and_check(readers, Coefficients.of([1.0, 1.0, 1.0]), out)
    assert out.tobytes() == weighted_mean(parts, [1.0] * 3).tobytes()
    assert done.checks == tuple(checksum(part.data.cast("B")) for part in parts)
    assert [one.header["rank"] for one in arriving] == [0, 1, 2]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recycle", [False, True])
def test_parts_in_files_are_averaged_and_placed_to_the_same_bits(tmp_path: Path, size: int, recycle: bool) -> None:
    store = FileStore(tmp_path, recycle=recycle)
    parts = [values_of(size, seed) for seed in range(3)]
    for rank, part in enumerate(parts):
        store.put(f"{rank}", seal_frame({"kind": "update"}, [part.data.cast("B")]))
    arriving = [FrameReader(store.open(f"{rank}"), SYSTEM_CLOCK, kind="update") for rank in range(3)]
    out = np.full(size, np.nan, np.float32)
    done = one_pass.average_and_check(arriving, Coefficients.of([1.0] * 3), out)
    assert out.tobytes() == weighted_mean(parts, [1.0] * 3).tobytes()
    assert done.checks == tuple(checksum(part.data.cast("B")) for part in parts)
    again = FrameReader(store.open("1"), SYSTEM_CLOCK, kind="update")
    one_pass.place(again, out)
    assert out.tobytes() == parts[1].tobytes()
    assert again.check == again.header["xxh3"]


@pytest.mark.parametrize("recycle", [False, True])
def test_a_payload_shorter_than_what_is_wanted_is_an_error(tmp_path: Path, recycle: bool) -> None:
    """Compiled code would look behind it."""
    store, values = FileStore(tmp_path, recycle=recycle), values_of(1 << 16)
    store.put("a", seal_frame({"kind": "update"}, [values.data.cast("B")]))
    short = FrameReader(store.open("a"), SYSTEM_CLOCK, kind="update")
    if (passes := fused.current()) is not None:
        short.hashed_by(passes)
        assert short.source(values.size) is not None
    assert short.source(values.size + 1) is None
    with pytest.raises(StoreUnavailable, match="ended early"):
        one_pass.place(short, np.empty(values.size + 1, np.float32))


def test_a_file_that_was_cut_is_an_error_as_it_is_read(tmp_path: Path) -> None:
    store, values = FileStore(tmp_path), values_of(1 << 17)
    store.put("a", seal_frame({"kind": "update"}, [values.data.cast("B")]))
    path = next(path for path in tmp_path.iterdir() if path.name.startswith("a"))
    arriving = [FrameReader(store.open("a"), SYSTEM_CLOCK, kind="update") for _ in range(2)]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StoreUnavailable, match="ended early"):
        one_pass.average_and_check(arriving, Coefficients.of([1.0] * 2), np.empty_like(values))


def test_what_arrives_for_a_codec_is_read_whole_and_hashed() -> None:
    payload = values_of(5000).tobytes()
    frame = b"".join(seal_frame({"kind": "mean"}, [payload]))
    incoming = FrameReader(BufferBody(frame), SYSTEM_CLOCK, kind="mean")
    assert bytes(incoming.whole()) == payload
    assert incoming.check == incoming.header["xxh3"] == checksum(payload)


@pytest.mark.parametrize("at", [0, 5, 20, 26, 40, 60])
def test_a_front_with_a_flipped_bit_is_not_believed(at: int) -> None:
    frame = bytearray(b"".join(seal_frame({"kind": "mean", "round": 7}, [b"x" * 64])))
    frame[at] ^= 1
    with pytest.raises(CorruptUpdate):
        FrameReader(BufferBody(frame), SYSTEM_CLOCK, kind="mean")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_dividing_by_a_power_of_two_is_dividing(count: int) -> None:
    parts = [values_of(4097, seed) * np.float32(10.0 ** (seed * 9 - 38)) for seed in range(count)]  # some are subnormal
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    assert weighted_mean(parts, [2.0] * count).tobytes() == (total / np.float32(count)).tobytes()
