"""The compiled kernels give numpy's bits for whatever they are given, and nothing else is loaded in their place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.kernels import NUMPY, native, quiet
from atoll.kernels.native import NativeKernels, NotUsable
from atoll.rounds.codecs.base import codec
from atoll.rounds.codecs.blocks import BlockCodec, PlainBlocks, agrees_with_numpy
from tiers import allowing

BLOCKS = ["int8", "int4"]
FACTORS = [None, np.float32(0.3), np.float32(-2.5e-7)]
HARD = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3F808000, 0x3F818000,
     0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFC00, 0x7F7FFC01, 0x7F7F8001, 0x04800000, 0x047FFFFF,
     0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32,
).view(np.float32)  # fmt: skip


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_PURE", raising=False)


def numbers(seed: int, size: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(size, dtype=np.float32)
    with quiet():
        match kind:
            case "bits":
                return rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
            case "ties":
                return np.round(normal * 64) * np.float32(0.5)
            case "tiny":
                return normal * np.float32(2.0 ** rng.integers(-149, -105))
            case "huge":
                return np.clip(normal * np.float32(2.0**126.5), -3.4e38, 3.4e38).astype(np.float32)
            case "spoilt":
                places = rng.integers(0, size, min(size, 3))
                normal[places] = rng.choice(HARD, places.size)
    return normal


kinds = st.sampled_from(["normal", "bits", "ties", "tiny", "huge", "spoilt"])
sizes = st.one_of(st.integers(0, 300), st.integers(0, 5000), st.sampled_from([2047, 2048, 2049, 4095, 4097]))
cases = given(seed=st.integers(0, 10**6), size=sizes, kind=kinds)


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """The same bits; of two NaN added up, either may be what comes out."""
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all(), f"{ours[~same][:3]} instead of {theirs[~same][:3]}"


def block_codec(name: str) -> BlockCodec:
    how = codec(name)
    assert isinstance(how, BlockCodec)
    return how


@pytest.fixture(scope="module", params=["for this processor", "for any"])
def compiled(
    request: pytest.FixtureRequest, build_hook: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> NativeKernels:
    if request.param == "for this processor":
        return request.getfixturevalue("native_kernels")
    request.getfixturevalue("native_library")  # skips without a compiler
    library = tmp_path_factory.mktemp("baseline") / "_native.so"
    with pytest.MonkeyPatch.context() as patch, allowing("process"):
        patch.delenv("ATOLL_PURE", raising=False)
        patch.setattr(build_hook, "FLAGS", (*build_hook.FLAGS, "-DATOLL_BASELINE"))
        build_hook.compile_library(native.SOURCE, library)
        return native.load(library)


@cases
@example(seed=0, size=HARD.size, kind="hard")
def test_bf16_has_the_same_bits(compiled: NativeKernels, seed: int, size: int, kind: str) -> None:
    values = HARD.copy() if kind == "hard" else numbers(seed, size, kind)
    bits, back = np.zeros((2, size), np.uint16), np.zeros((2, size), np.float32)
    for one, kernel in enumerate((compiled, NUMPY)):
        kernel.to_bf16(values, bits[one])
        kernel.from_bf16(bits[one], back[one])
    assert bits[0].tobytes() == bits[1].tobytes()
    assert back[0].tobytes() == back[1].tobytes()
    for factor in FACTORS:
        sums = [numbers(seed + 1, size, "normal") for _ in range(2)]
        compiled.add_bf16(bits[0], sums[0], factor)
        NUMPY.add_bf16(bits[1], sums[1], factor)
        assert_same(*sums)


def test_every_pattern_of_bf16_and_every_tie_is_rounded_as_numpy_does(compiled: NativeKernels) -> None:
    every = np.arange(1 << 16, dtype=np.uint32) << 16
    values = np.concatenate([every | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)
    bits = np.zeros((2, values.size), np.uint16)
    compiled.to_bf16(values, bits[0])
    NUMPY.to_bf16(values, bits[1])
    assert np.array_equal(*bits)


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=200)
@cases
def test_blocks_have_the_same_bits(compiled: NativeKernels, name: str, seed: int, size: int, kind: str) -> None:
    how, values = block_codec(name), numbers(seed, size, kind)
    scales, codes = np.zeros((2, how.blocks(size)), np.uint16), np.full((2, how.code_bytes(size)), 0x55, np.uint8)
    if size:
        with quiet():
            PlainBlocks(how, scales[1], codes[1]).write(0, values)
        compiled.blocks(name, scales[0], codes[0]).write(0, values)
    assert scales[0].tobytes() == scales[1].tobytes()
    assert codes[0].tobytes() == codes[1].tobytes()
    assert_reads_alike(compiled, how, scales[0], codes[0], size)


@pytest.mark.parametrize("name", BLOCKS)
def test_what_nobody_writes_is_read_alike_too(compiled: NativeKernels, name: str) -> None:
    """Any scale, and codes beyond the last level."""
    how, rng = block_codec(name), np.random.default_rng(0)
    for start in range(0, 1 << 16, 512):
        size = 512 * how.block - 5
        codes = rng.integers(0, 256, how.code_bytes(size)).astype(np.uint8)
        assert_reads_alike(compiled, how, np.arange(start, start + 512).astype(np.uint16), codes, size)


def assert_reads_alike(
    compiled: NativeKernels, how: BlockCodec, scales: np.ndarray, codes: np.ndarray, size: int
) -> None:
    fast, plain = compiled.blocks(how.name, scales, codes), PlainBlocks(how, scales, codes)
    back = np.full((2, size), np.nan, np.float32)
    with quiet():
        fast.read(0, back[0])
        plain.read(0, back[1])
    assert_same(*back)
    for factor in FACTORS:
        sums = [numbers(size, size, "normal") for _ in range(2)]
        fast.add(0, sums[0], factor)
        plain.add(0, sums[1], factor)
        assert_same(*sums)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_not_finite_is_seen_in_every_place(compiled: NativeKernels, name: str, bad: float) -> None:
    how = block_codec(name)
    size = how.block + 37
    for place in range(size):
        values = numbers(place, size, "normal")
        values[place] = bad
        scales, codes = np.zeros((2, 2), np.uint16), np.zeros((2, how.code_bytes(size)), np.uint8)
        compiled.blocks(name, scales[0], codes[0]).write(0, values)
        with quiet():
            PlainBlocks(how, scales[1], codes[1]).write(0, values)
        assert scales[0].tobytes() == scales[1].tobytes()
        assert codes[0].tobytes() == codes[1].tobytes()
        assert scales[0, place // how.block] == 0x7FC0


@pytest.mark.parametrize("name", ["bf16", *BLOCKS])
@pytest.mark.parametrize("shift", [1, 2, 3, 7])
def test_memory_may_begin_anywhere_and_be_read_only(compiled: NativeKernels, name: str, shift: int) -> None:
    from atoll import kernels

    how, size = codec(name), 5003
    aligned = numbers(shift, size, "normal")
    values = np.frombuffer(bytes(shift) + aligned.tobytes(), np.float32, offset=shift)
    assert not values.flags.writeable
    before, seen = kernels.current(), []
    try:
        for kernel in (compiled, NUMPY):
            kernels.use(kernel)
            room = bytearray(shift + how.encoded_bytes(size) + 8)
            how.encode_into(values, memoryview(room)[shift:-8])
            assert room[-8:] == bytes(8)
            payload = memoryview(bytes(room))[shift:-8]
            total = np.frombuffer(bytearray(shift) + aligned.tobytes(), np.float32, offset=shift)
            how.add_into(payload, total)
            how.add_into(payload, total, np.float32(0.7))
            seen.append((bytes(payload), how.decode(payload, size).tobytes(), total.tobytes()))
    finally:
        kernels.use(before)
    assert seen[0] == seen[1]


def test_what_c_would_not_ask_is_asked_before(native_kernels: NativeKernels) -> None:
    values, bits = np.zeros(8, np.float32), np.zeros(8, np.uint16)
    frozen = bits.copy()
    frozen.flags.writeable = False
    for given_values, out in ((values, bits[:4]), (values, frozen), (values.astype(float), bits), (values, values)):
        with pytest.raises(AssertionError):
            native_kernels.to_bf16(given_values, out)
    with pytest.raises(AssertionError):
        native_kernels.to_bf16(values[::2], bits[:4])
    laid = native_kernels.blocks("int8", bits[:1], np.zeros(7, np.uint8))
    for start in (0, 1, 2048):
        with pytest.raises(AssertionError):
            laid.read(start, values)
    with pytest.raises(AssertionError):
        native_kernels.blocks("int8", frozen[:1], np.zeros(8, np.uint8)).write(0, values)


def test_a_codec_that_c_does_not_know_is_numpys(native_kernels: NativeKernels) -> None:
    assert native_kernels.blocks("int5", np.zeros(1, np.uint16), np.zeros(8, np.uint8)) is None


def test_a_library_of_another_source_is_not_used(native_library: Path, tmp_path: Path) -> None:
    newer = tmp_path / "_native.c"
    newer.write_bytes(native.SOURCE.read_bytes() + b"\n")
    with pytest.raises(NotUsable, match="built from another"):
        native.load(native_library, newer)


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path) -> None:
    library = tmp_path / "_native.so"
    with pytest.raises(NotUsable, match=r"_native\.so"):
        native.load(library)
    library.write_bytes(b"\x7fELF and then nothing")
    with pytest.raises(NotUsable, match=r"_native\.so"):
        native.load(library)


@pytest.mark.process
@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("+ 0x7FFF + ((bits >> 16) & 1)", "+ 0x8000", "bf16"),
        ("256, 127.0f", "256, 126.0f", "int8"),
        ("(codes[half + j] << 4)", "(codes[j] << 4)", "int4"),
        ("__builtin_fmaf(a[i], b, c[i])", "a[i] * b + c[i]", "fma"),
    ],
)
def test_a_library_that_computes_otherwise_is_not_used(
    build_hook: ModuleType, native_kernels: NativeKernels, tmp_path: Path, right: str, wrong: str, what: str
) -> None:
    text = native.SOURCE.read_text()
    assert right in text
    if what == "fma" and not native_kernels._has_fma:
        pytest.skip("this processor has no such instruction, and numpy's is used")
    source, library = tmp_path / "_native.c", tmp_path / "_native.so"
    source.write_text(text.replace(right, wrong))
    build_hook.compile_library(source, library)
    if what in BLOCKS:
        assert not agrees_with_numpy(native.load(library, source), block_codec(what))
        return
    with pytest.raises(NotUsable, match=f": {what}"):
        native.load(library, source)


def test_it_can_be_switched_off(native_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_PURE", "1")
    with pytest.raises(NotUsable, match="ATOLL_PURE"):
        native.load(native_library)
    monkeypatch.setenv("ATOLL_PURE", "0")
    assert native.load(native_library).name == "native"


LAZY = """
import ctypes, sys
import atoll, atoll.cli.main, atoll.kernels, atoll.rounds.codecs.base, atoll.rounds.codecs.int8
assert atoll.kernels._current is None
atoll.rounds.codecs.base.codec("int8").encode(__import__("numpy").ones(5, "float32"))
assert atoll.kernels._current is not None
print(atoll.kernels.current().name)
"""


@pytest.mark.process
@pytest.mark.parametrize("is_pure", [True, False])
def test_nothing_is_loaded_before_it_is_needed(is_pure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_PURE", str(int(is_pure)))
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert not done.stderr
    assert done.stdout.strip() in ({"numpy"} if is_pure else {"numpy", "native"})
