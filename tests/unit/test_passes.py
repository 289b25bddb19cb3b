"""One pass over memory gives what numpy and xxhash give one after the other."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import xxhash

from atoll import _passes
from atoll._compiled import NotUsable, address_of
from atoll._passes import BLOCK, TILE_BYTES, Hash, Mixture, Passes, Source
from atoll.rounds.kernels import aligned
from atoll.rounds.reduce import Coefficients, weighted_mean
from atoll.stores import _file_huge


@pytest.fixture(scope="session")
def library(library_of: Callable[[Path], Path]) -> Path:
    return library_of(_passes.SOURCE)


@pytest.fixture(scope="session")
def passes(library: Path) -> Passes:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATOLL_PURE", raising=False)
        try:
            return _passes.load(library)
        except NotUsable as exc:
            pytest.skip(str(exc))


def normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def place(values: np.ndarray, hashed: Hash | None = None) -> tuple[int, Hash | None]:
    return address_of(values, np.float32), hashed


SIZES = [61, 255, 256, 257, 271, 272, 273, 511, 512, 513, 1024, 5 * BLOCK + 1, 5 * BLOCK + 16, 100_000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [BLOCK, 2 * BLOCK, 1 << 20])
def test_the_hash_is_xxh3_however_the_values_come(passes: Passes, size: int, piece: int) -> None:
    values, hashed = normal(size), Hash(passes)
    squares = sum(passes.look(values[at : at + piece], hashed) for at in range(0, size, piece))
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(values)
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(values), "asking does not change it"
    assert squares == pytest.approx(float(np.square(values, dtype=np.float64).sum()), rel=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 8])
def test_a_mixture_is_rounded_as_numpy_rounds_it(passes: Passes, size: int, shift: int, divisor: int) -> None:
    a, b, out = normal(size), normal(size, 1), aligned(size + shift)[shift:]
    a[:6] = np.array([np.inf, -0.0, 1e-42, 3e38, -np.inf, np.nan], np.float32)
    for is_done in (False, True):
        hashes = [Hash(passes) for _ in range(3)]
        how = Mixture.of(0.3, -1.7, divisor)
        passes.mix(how, place(a, hashes[0]), place(b, hashes[1]), place(out, hashes[2]), size, is_done=is_done)
        with np.errstate(all="ignore"):
            expected = (a * np.float32(0.3) + b * np.float32(-1.7)) / np.float32(divisor)
        assert np.array_equal(out, expected, equal_nan=True)
        assert [h.hexdigest() for h in hashes] == [
            xxhash.xxh3_64_hexdigest(np.ascontiguousarray(v)) for v in (a, b, out)
        ]


@pytest.mark.parametrize("is_done", [False, True])
def test_a_sum_may_stay_where_it_is(passes: Passes, is_done: bool) -> None:
    total, values, hashed = normal(10_001), normal(10_001, 1), Hash(passes)
    expected = total + values
    passes.mix(Mixture.of(), place(total), place(values), place(total, hashed), total.size, is_done=is_done)
    assert np.array_equal(total, expected)
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(expected)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 0.5], [1.0] * 8])
def test_steps_add_up_to_the_mean_of_reduce(passes: Passes, weights: list[float]) -> None:
    from atoll.rounds.mixed import _steps

    parts = [normal(3000, seed) for seed in range(len(weights))]
    total = parts[0].copy()
    for part, step in zip(parts[1:], _steps(Coefficients.of(weights)), strict=True):
        passes.mix(step, place(total), place(part), place(total), total.size, is_done=False)
    assert np.array_equal(total, weighted_mean(parts, weights))


@pytest.mark.parametrize("size", [0, 1, 31, 1023, 1024, 1025, 5000, 70_001])
@pytest.mark.parametrize("shift", [0, 1, 31])
def test_a_copy_is_one_wherever_it_begins(passes: Passes, size: int, shift: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, size + 7, dtype=np.uint8)[7:]
    room = np.full(size + shift + 64, 171, np.uint8)
    passes.copy(data, room[shift : shift + size])
    assert np.array_equal(room[shift : shift + size], data)
    assert (room[:shift] == 171).all()
    assert (room[shift + size :] == 171).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_what_is_placed_is_hashed(passes: Passes, size: int, shift: int) -> None:
    values, room, hashed = normal(size), np.full(size + shift + 8, 7.0, np.float32), Hash(passes)
    for at in range(0, size, 2 * BLOCK):
        piece = values[at : at + 2 * BLOCK]
        passes.place(place(piece)[0], room[shift + at : shift + at + piece.size], hashed)
    assert np.array_equal(room[shift : shift + size], values)
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(values)
    assert (room[shift + size :] == 7.0).all()


FROM_SIZES = [61, 300, 1 << 15, (1 << 15) + 1, 3 * (1 << 15), 1_200_003]
"""Of one tile that compiled code reads at a time, of several, and of more than it maps at a time."""


def opened(path: Path, front: int) -> int:
    fd = os.open(path, os.O_RDWR)
    os.lseek(fd, front, os.SEEK_SET)
    return fd


def written(folder: Path, values: np.ndarray, front: int, *, is_huge: bool) -> tuple[int, bool]:
    """A file with the values after so many other bytes, read up to them; and whether it is to be mapped."""
    path = folder / f"{len(list(folder.iterdir()))}"
    path.touch()
    fd = opened(path, front)
    parts = [memoryview(bytes(front)), values.data.cast("B")]
    if not (is_huge and _file_huge.write(fd, parts)):
        os.pwritev(fd, parts, 0)
    return fd, is_huge


@pytest.mark.parametrize("size", FROM_SIZES)
@pytest.mark.parametrize("is_huge", [False, True])
def test_what_a_file_has_is_placed_and_hashed(passes: Passes, tmp_path: Path, size: int, is_huge: bool) -> None:
    values, hashed, out = normal(size), Hash(passes), np.full(size + 8, 7.0, np.float32)
    fd, is_mapped = written(tmp_path, values, 449, is_huge=is_huge)
    source = Source(file=fd, hashed=hashed.address, is_mapped=is_mapped)
    room = np.empty(TILE_BYTES, np.uint8)
    assert passes.place_from(source, out[:size], address_of(room, np.uint8))
    os.close(fd)
    assert np.array_equal(out[:size], values)
    assert (out[size:] == 7.0).all()
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(values)


@pytest.mark.parametrize("size", FROM_SIZES)
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 2.0, 0.5], [1.0] * 5])
def test_files_and_memory_are_mixed_to_the_mean_of_reduce(
    passes: Passes, tmp_path: Path, size: int, weights: list[float]
) -> None:
    from atoll.rounds.mixed import _steps

    parts = [normal(size, seed) for seed in range(len(weights))]
    hashes = [Hash(passes) for _ in parts]
    sources = (Source * len(parts))()
    for i, (part, hashed) in enumerate(zip(parts, hashes, strict=True)):
        if i == 1:
            sources[i] = Source(values=address_of(part, np.float32), hashed=hashed.address)
        else:
            fd, is_mapped = written(tmp_path, part, 64 * i, is_huge=i % 2 == 0)
            sources[i] = Source(file=fd, hashed=hashed.address, is_mapped=is_mapped)
    steps = _steps(Coefficients.of(weights))
    out, of_out, rooms = np.empty(size, np.float32), Hash(passes), np.empty(3 * TILE_BYTES, np.uint8)
    given = (Mixture * len(steps))(*steps)
    assert passes.mix_from(sources, given, out, of_out, address_of(rooms, np.uint8)) is None
    for i, source in enumerate(sources):
        if i != 1:
            os.close(source.file)
    expected = weighted_mean(parts, weights)
    assert np.array_equal(out, expected)
    assert of_out.hexdigest() == xxhash.xxh3_64_hexdigest(expected)
    assert [h.hexdigest() for h in hashes] == [xxhash.xxh3_64_hexdigest(part) for part in parts]


def test_a_file_that_ends_early_is_told(passes: Passes, tmp_path: Path) -> None:
    values, rooms = normal(100_000), np.empty(3 * TILE_BYTES, np.uint8)
    whole, _ = written(tmp_path, values, 0, is_huge=False)
    short, _ = written(tmp_path, values[:-1], 0, is_huge=False)
    out, hashes, at = np.empty_like(values), [Hash(passes) for _ in range(2)], address_of(rooms, np.uint8)
    assert not passes.place_from(Source(file=short, hashed=hashes[0].address), out, at)
    os.lseek(short, 0, os.SEEK_SET)
    sources = (Source * 2)(Source(file=whole, hashed=hashes[0].address), Source(file=short, hashed=hashes[1].address))
    assert passes.mix_from(sources, (Mixture * 1)(Mixture.of()), out, None, at) == 1
    os.close(whole)
    os.close(short)


def test_what_was_hashed_is_what_was_placed_though_the_file_changes(passes: Passes, tmp_path: Path) -> None:
    """A recycled file may be written again while somebody is late."""
    size = 1 << 18
    values = [normal(size), normal(size, 1)]
    fd, _ = written(tmp_path, values[0], 0, is_huge=False)
    room, is_over = np.empty(TILE_BYTES, np.uint8), threading.Event()
    other = os.dup(fd)

    def rewrite() -> None:
        for turn in itertools.count():
            os.pwrite(other, values[turn % 2].data.cast("B"), 0)
            if is_over.is_set():
                return

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        torn = 0
        for _ in range(200):
            hashed, out = Hash(passes), np.empty(size, np.float32)
            source = Source(file=fd, hashed=hashed.address, is_mapped=True)
            os.lseek(fd, 0, os.SEEK_SET)
            assert passes.place_from(source, out, address_of(room, np.uint8))
            assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(out)
            torn += not any(np.array_equal(out, v) for v in values)
    finally:
        is_over.set()
        writer.join()
    if not torn:
        pytest.skip("nobody was late, so nothing was tried")


@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("+ b * m->of_b", "- b * m->of_b", "mix"),
        ("0x165667919E3779F9", "0x165667919E3779FB", "hash"),
        ("memcpy(out + at, data + at, (size_t)(bytes - at));", "", "copy"),
    ],
)
def test_a_library_that_computes_otherwise_is_not_used(
    build_hook: ModuleType, passes: Passes, tmp_path: Path, right: str, wrong: str, what: str
) -> None:
    source, library = tmp_path / "_passes_native.c", tmp_path / "_passes_native.so"
    text = _passes.SOURCE.read_text()
    assert right in text
    source.write_text(text.replace(right, wrong))
    build_hook.compile_library(source, library)
    with pytest.raises(NotUsable, match=f"does not compute what numpy and xxhash compute: {what}"):
        _passes.load(library, source)


def test_it_can_be_switched_off_and_is_never_another_version(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    newer = tmp_path / "_passes_native.c"
    newer.write_bytes(_passes.SOURCE.read_bytes() + b"\n")
    with pytest.raises(NotUsable, match="built from another"):
        _passes.load(library, newer)
    monkeypatch.setenv("ATOLL_PURE", "1")
    with pytest.raises(NotUsable, match="ATOLL_PURE"):
        _passes.load(library)
    _passes.current.cache_clear()
    try:
        assert _passes.current() is None
    finally:
        monkeypatch.undo()
        _passes.current.cache_clear()
