"""One pass over memory gives what numpy and xxhash give one after the other."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xxhash

from atoll.kernels import aligned, fused
from atoll.kernels.fused import BLOCK, FROM_FILE, FROM_HUGE_PAGES, FROM_SOCKET, FusedKernels, Hash, Mixture, Source
from atoll.kernels.native import NotBuilt, NotUsable, address_of
from atoll.rounds.reduce import Coefficients, weighted_mean
from atoll.stores.file import io


@pytest.fixture(scope="session")
def library(library_of: Callable[[Path], Path]) -> Path:
    return library_of(fused.SOURCE)


@pytest.fixture(scope="session")
def passes(library: Path) -> FusedKernels:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATOLL_PURE", raising=False)
        try:
            return fused.load(library)
        except NotUsable as exc:
            pytest.skip(str(exc))


def normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def place(values: np.ndarray, hashed: Hash | None = None) -> tuple[int, Hash | None]:
    return address_of(values, np.float32), hashed


SIZES = [61, 255, 256, 257, 271, 272, 273, 511, 512, 513, 1024, 5 * BLOCK + 1, 5 * BLOCK + 16, 100_000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [BLOCK, 2 * BLOCK, 1 << 20])
def test_the_hash_is_xxh3_however_the_values_come(passes: FusedKernels, size: int, piece: int) -> None:
    values, hashed = normal(size), Hash(passes)
    squares = sum(passes.look(values[at : at + piece], hashed) for at in range(0, size, piece))
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(values)
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(values), "asking does not change it"
    assert squares == pytest.approx(float(np.square(values, dtype=np.float64).sum()), rel=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 32])
def test_a_copy_is_made_while_looking(passes: FusedKernels, size: int, shift: int) -> None:
    values, hashed, copy = normal(size), Hash(passes), np.full(4 * size + shift + 8, 0xAB, np.uint8)
    passes.look(values, hashed, copy[shift : shift + 4 * size])
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(values)
    assert copy[shift : shift + 4 * size].tobytes() == values.tobytes()
    assert set(copy[:shift]) | set(copy[shift + 4 * size :]) == {0xAB}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("at", "step"), [(1024, 1 << 18), (0, 2048), (3072, 4096)])
def test_values_are_looked_at_and_written_to_their_place(
    passes: FusedKernels, size: int, at: int, step: int, tmp_path: Path
) -> None:
    values, hashed = normal(size), Hash(passes)
    (tmp_path / "file").write_bytes(b"x" * at)
    with open(tmp_path / "file", "r+b") as file:
        squares, seconds = passes.pour(values, hashed, file.fileno(), at, step)
    assert seconds > 0
    assert (tmp_path / "file").read_bytes() == b"x" * at + values.tobytes()
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(values)
    assert squares == pytest.approx(float(np.square(values, dtype=np.float64).sum()), rel=1e-4)


def test_what_cannot_be_written_is_an_error_of_the_system(passes: FusedKernels, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with open(tmp_path / "file", "rb") as file, pytest.raises(OSError, match="descriptor") as caught:
        passes.pour(normal(1000), Hash(passes), file.fileno(), 0, 1 << 18)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 8])
def test_a_mixture_is_rounded_as_numpy_rounds_it(passes: FusedKernels, size: int, shift: int, divisor: int) -> None:
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
def test_a_sum_may_stay_where_it_is(passes: FusedKernels, is_done: bool) -> None:
    total, values, hashed = normal(10_001), normal(10_001, 1), Hash(passes)
    expected = total + values
    passes.mix(Mixture.of(), place(total), place(values), place(total, hashed), total.size, is_done=is_done)
    assert np.array_equal(total, expected)
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(expected)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 0.5], [1.0] * 8])
def test_steps_add_up_to_the_mean_of_reduce(passes: FusedKernels, weights: list[float]) -> None:
    from atoll.rounds.one_pass import _steps

    parts = [normal(3000, seed) for seed in range(len(weights))]
    total = parts[0].copy()
    for part, step in zip(parts[1:], _steps(Coefficients.of(weights)), strict=True):
        passes.mix(step, place(total), place(part), place(total), total.size, is_done=False)
    assert np.array_equal(total, weighted_mean(parts, weights))


@pytest.mark.parametrize("size", [0, 1, 31, 1023, 1024, 1025, 5000, 70_001])
@pytest.mark.parametrize("shift", [0, 1, 31])
def test_a_copy_is_one_wherever_it_begins(passes: FusedKernels, size: int, shift: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, size + 7, dtype=np.uint8)[7:]
    room = np.full(size + shift + 64, 171, np.uint8)
    passes.copy(data, room[shift : shift + size])
    assert np.array_equal(room[shift : shift + size], data)
    assert (room[:shift] == 171).all()
    assert (room[shift + size :] == 171).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_what_is_placed_is_hashed(passes: FusedKernels, size: int, shift: int) -> None:
    values, room, hashed = normal(size), np.full(size + shift + 8, 7.0, np.float32), Hash(passes)
    for at in range(0, size, 2 * BLOCK):
        piece = values[at : at + 2 * BLOCK]
        passes.place(place(piece)[0], room[shift + at : shift + at + piece.size], hashed)
    assert np.array_equal(room[shift : shift + size], values)
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(values)
    assert (room[shift + size :] == 7.0).all()


TILE = 1 << 12
"""Values that are read at a time here."""
FROM_SIZES = [61, 300, TILE, TILE + 1, 3 * TILE, 1_200_003]
"""Of one tile, of several, and of more than is mapped at a time."""
NOTHING = memoryview(b"")


class Shelf:
    """Open files, pipes and sockets with values in them; closed in the end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open, self._threads = folder, ExitStack(), ExitStack()

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._threads.close()

    def source(self, kind: int, values: np.ndarray, hashed: Hash, *, front: int = 0, ready: int = 0) -> Source:
        """These values after so many other bytes that have been read, and with so many that are ready."""
        data = values.data.cast("B")
        fd = self._socket(data[ready:]) if kind == FROM_SOCKET else self._file(kind, data, front, ready)
        return Source.from_open(fd, data[:ready], kind, hashed)

    def _file(self, kind: int, data: memoryview, front: int, ready: int) -> int:
        path = self._folder / f"{len(list(self._folder.iterdir()))}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self._open.callback(os.close, fd)
        parts = [memoryview(bytes(front)), data]
        if not (kind == FROM_HUGE_PAGES and io.write_huge(fd, parts)):
            os.pwritev(fd, parts, 0)
        os.lseek(fd, front + ready, os.SEEK_SET)
        return fd

    def _socket(self, data: memoryview) -> int:
        ours, theirs = socket.socketpair()

        def send() -> None:
            with theirs, suppress(BrokenPipeError):
                theirs.sendall(data)

        thread = threading.Thread(target=send)
        thread.start()
        self._threads.callback(thread.join)
        self._open.callback(ours.close)
        return ours.fileno()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path) as shelf:
        yield shelf


def read(passes: FusedKernels, sources: list[Source], out: np.ndarray, **more: Any) -> tuple[int, int] | None:
    given = (Source * len(sources))(*sources)
    return passes.read(given, more.get("steps", []), out, more.get("hashed"), aligned(3 * TILE))


@pytest.mark.parametrize("size", FROM_SIZES)
@pytest.mark.parametrize(
    ("kind", "ready"), [(FROM_FILE, 0), (FROM_FILE, 77), (FROM_HUGE_PAGES, 0), (FROM_SOCKET, 0), (FROM_SOCKET, 200)]
)
def test_what_is_read_is_placed_and_hashed(
    passes: FusedKernels, shelf: Shelf, size: int, kind: int, ready: int
) -> None:
    values, hashed, out = normal(size), Hash(passes), np.full(size + 8, 7.0, np.float32)
    assert read(passes, [shelf.source(kind, values, hashed, front=449, ready=ready)], out[:size]) is None
    assert np.array_equal(out[:size], values)
    assert (out[size:] == 7.0).all()
    assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(values)


@pytest.mark.parametrize("size", FROM_SIZES)
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 2.0, 0.5], [1.0] * 7])
@pytest.mark.parametrize("first", range(4))
def test_what_is_read_is_mixed_to_the_mean_of_reduce(
    passes: FusedKernels, shelf: Shelf, size: int, weights: list[float], first: int
) -> None:
    from atoll.rounds.one_pass import _steps

    parts = [normal(size, seed) for seed in range(len(weights))]
    hashes = [Hash(passes) for _ in parts]
    sources = [
        shelf.source(kind, part, hashed, front=64 * i)
        if (kind := (first + i) % 4)
        else Source.in_memory(address_of(part, np.float32), hashed)
        for i, (part, hashed) in enumerate(zip(parts, hashes, strict=True))
    ]
    out, of_out = np.empty(size, np.float32), Hash(passes)
    assert read(passes, sources, out, steps=_steps(Coefficients.of(weights)), hashed=of_out) is None
    expected = weighted_mean(parts, weights)
    assert np.array_equal(out, expected)
    assert of_out.hexdigest() == xxhash.xxh3_64_hexdigest(expected)
    assert [h.hexdigest() for h in hashes] == [xxhash.xxh3_64_hexdigest(part) for part in parts]


@pytest.mark.parametrize("kind", [FROM_FILE, FROM_SOCKET])
def test_what_ends_early_is_told(passes: FusedKernels, shelf: Shelf, kind: int) -> None:
    values, out = normal(100_000), np.empty(100_000, np.float32)
    hashes = [Hash(passes) for _ in range(3)]
    assert read(passes, [shelf.source(kind, values[:-1], hashes[0])], out) == (0, 0)
    sources = [shelf.source(kind, values[: values.size - i], hashes[i + 1]) for i in range(2)]
    assert read(passes, sources, out, steps=[Mixture.of()]) == (1, 0)


def test_what_cannot_be_read_says_why(passes: FusedKernels, shelf: Shelf) -> None:
    values, hashed = normal(1000), Hash(passes)
    fd = os.open(os.devnull, os.O_WRONLY)
    try:
        assert read(passes, [Source.from_open(fd, NOTHING, FROM_FILE, hashed)], values) == (0, errno.EBADF)
    finally:
        os.close(fd)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
        assert read(passes, [Source.from_open(ours.fileno(), NOTHING, FROM_SOCKET, hashed)], values) == (
            0,
            errno.EAGAIN,
        )


def _unread(end: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(end.fileno(), termios.FIONREAD, bytes(4)), "little")


def test_after_a_signal_it_goes_on_where_it_was(passes: FusedKernels) -> None:
    """Pieces come only after a signal each, so it has to wait in the middle of tiles, and of sources."""
    parts = [normal(5 * TILE + 7, seed) for seed in range(2)]
    hashes, out, of_out = [Hash(passes) for _ in parts], np.empty_like(parts[0]), Hash(passes)
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    pairs = [socket.socketpair() for _ in parts]
    me = threading.get_ident()

    def interrupt_waiting(end: socket.socket) -> None:
        """Once all that was sent has been taken, so that it is waited for more."""
        heard = len(seen)
        while len(seen) == heard and _unread(end) == 0:
            signal.pthread_kill(me, signal.SIGUSR1)
            time.sleep(0.001)

    def send() -> None:
        for at in range(0, 4 * parts[0].size, 10_001):
            for part, (ours, theirs) in zip(parts, pairs, strict=True):
                interrupt_waiting(ours)
                theirs.sendall(part.data.cast("B")[at : at + 10_001])

    sender = threading.Thread(target=send)
    try:
        sender.start()
        kind = FROM_SOCKET
        sources = [Source.from_open(o.fileno(), NOTHING, kind, h) for (o, _), h in zip(pairs, hashes, strict=True)]
        assert read(passes, sources, out, steps=[Mixture.of(divisor=2)], hashed=of_out) is None
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
        for pair in pairs:
            for end in pair:
                end.close()
    assert seen
    assert np.array_equal(out, weighted_mean(parts, [1.0, 1.0]))
    assert of_out.hexdigest() == xxhash.xxh3_64_hexdigest(out)
    assert [h.hexdigest() for h in hashes] == [xxhash.xxh3_64_hexdigest(part) for part in parts]


def test_whoever_is_interrupted_while_nothing_comes_stops(passes: FusedKernels) -> None:
    ours, theirs = socket.socketpair()
    told: list[int] = []

    def stop(*_: object) -> None:
        if not told:  # more may come before the timer is off
            told.append(1)
            raise KeyboardInterrupt

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)  # again and again: the first one may come too early
        read(passes, [Source.from_open(ours.fileno(), NOTHING, FROM_SOCKET, Hash(passes))], normal(1000))

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with ours, theirs, pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_was_hashed_is_what_was_placed_though_the_file_changes(passes: FusedKernels, shelf: Shelf) -> None:
    """A recycled file may be written again while somebody is late."""
    size = 1 << 18
    values = [normal(size), normal(size, 1)]
    fd = shelf.source(FROM_FILE, values[0], Hash(passes)).file
    is_over = threading.Event()

    def rewrite() -> None:
        for turn in itertools.count():
            os.pwrite(fd, values[turn % 2].data.cast("B"), 0)
            if is_over.is_set():
                return

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        torn = 0
        for _ in range(200):
            hashed, out = Hash(passes), np.empty(size, np.float32)
            assert read(passes, [Source.from_open(fd, NOTHING, FROM_HUGE_PAGES, hashed)], out) is None
            assert hashed.hexdigest() == xxhash.xxh3_64_hexdigest(out)
            torn += not any(np.array_equal(out, v) for v in values)
    finally:
        is_over.set()
        writer.join()
    if not torn:
        pytest.skip("nobody was late, so nothing was tried")


@pytest.mark.process
@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ("+ b * m->of_b", "- b * m->of_b", "mix"),
        ("0x165667919E3779F9", "0x165667919E3779FB", "hash"),
        ("memcpy(out + at, data + at, (size_t)(bytes - at));", "", "copy"),
    ],
)
def test_a_library_that_computes_otherwise_is_not_used(
    build_hook: ModuleType, passes: FusedKernels, tmp_path: Path, right: str, wrong: str, what: str
) -> None:
    source, library = tmp_path / "_fused.c", tmp_path / "_fused.so"
    text = fused.SOURCE.read_text()
    assert right in text
    source.write_text(text.replace(right, wrong))
    build_hook.compile_library(source, library)
    with pytest.raises(NotUsable, match=f": .*{what}") as caught:
        fused.load(library, source)
    assert not isinstance(caught.value, NotBuilt), "it was built, and computes something else"


def test_it_can_be_switched_off_and_is_never_another_version(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    newer = tmp_path / "_fused.c"
    newer.write_bytes(fused.SOURCE.read_bytes() + b"\n")
    with pytest.raises(NotBuilt, match=re.escape(library.name)):
        fused.load(library, newer)
    monkeypatch.setenv("ATOLL_PURE", "1")
    with pytest.raises(NotUsable, match="ATOLL_PURE"):
        fused.load(library)
    fused.current.cache_clear()
    try:
        assert fused.current() is None
    finally:
        monkeypatch.undo()
        fused.current.cache_clear()
