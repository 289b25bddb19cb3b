"""One pass over memory gives what numpy and xxhash give one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import xxhash

from atoll import _passes
from atoll._compiled import NotUsable, address_of
from atoll._passes import BLOCK, Hash, Mixture, Passes
from atoll.rounds.kernels import aligned
from atoll.rounds.reduce import Coefficients, weighted_mean


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
