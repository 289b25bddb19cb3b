"""A chunk that is hashed while it is written is, on every way to a store, the frame that is sealed at once."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import StoreUnavailable
from atoll.kernels import fused
from atoll.rounds.client import RoundClient
from atoll.rounds.frames import Frame, checksum, open_frame
from atoll.rounds.layout import ArrayVector, Layout
from atoll.rounds.publish import FrameWriter, NotFinite
from atoll.stores.base import Buffer, Store
from atoll.stores.fast import size_of
from atoll.stores.file.paths import TEMP_FOLDER
from atoll.stores.file.store import FileStore
from atoll.stores.memory import MemoryStore

HEADER = {"kind": "update", "run": "r", "round": 3}
SIZES = [0, 1, 300, 4096, 70_001, 1 << 19, (1 << 19) + 1, (3 << 19) + 12_345]
"""In values: up to a few huge pages, ending before, at and after their ends."""


def values_of(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal(size, dtype=np.float32)


@pytest.fixture(params=["memory", "plain", "recycled"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Recycled files of a tmpfs are written through a mapping, others by calls."""
    if request.param == "memory":
        yield MemoryStore()
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield FileStore(folder, fsync=False, recycle=request.param == "recycled")


@pytest.fixture(params=["compiled", "pure"], autouse=True)
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pure":
        monkeypatch.setattr(fused, "current", lambda: None)
    elif fused.current() is None:
        pytest.skip("nothing is compiled here")


def opened(store: Store, key: str) -> Frame:
    return open_frame(bytes(store.get(key)), kind="update")


@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_is_read_back_with_its_hash_and_norm(store: Store, size: int) -> None:
    values = values_of(size)
    outgoing = FrameWriter(HEADER, values)
    for _ in range(2):  # the second time into the file of the first
        store.put("a.bin", outgoing)
        assert len(store.get("a.bin")) == size_of(outgoing)
        frame = opened(store, "a.bin")
        assert bytes(frame.payload) == values.tobytes()
        assert (outgoing.seconds > 0) is (size > 0)
        assert frame.header == {**HEADER, "norm": outgoing.norm, "xxh3": outgoing.check}
        store.delete("a.bin")
    assert outgoing.check == checksum(values.tobytes())
    assert outgoing.norm == pytest.approx(float(np.linalg.norm(values.astype(np.float64))), rel=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_a_norm_whose_squares_do_not_fit_is_right(store: Store, scale: float) -> None:
    values = values_of(700_000) * np.float32(scale)
    store.put("a.bin", FrameWriter(HEADER, values))
    norm = float(np.linalg.norm(values.astype(np.float64)))
    assert opened(store, "a.bin").header["norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 99, 600_000, -1])
def test_values_that_are_not_finite_are_not_written(store: Store, bad: float, at: int) -> None:
    values = values_of(700_000)
    values[at] = bad
    with pytest.raises(NotFinite):
        store.put("a.bin", FrameWriter(HEADER, values))
    assert list(store.list()) == []
    if isinstance(store, FileStore):
        assert [path for path in (store.root / TEMP_FOLDER).iterdir() if path.is_file()] == []


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_values_that_were_not_finite_when_they_were_written_do_not_pass_for_others(
    store: Store, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    values, seal = values_of(700_000), FrameWriter.front
    values[99] = bad
    outgoing = FrameWriter(HEADER, values)

    def mended(_: FrameWriter) -> Buffer:
        if isinstance(store, MemoryStore):
            outgoing.hash_and_norm(0, len(outgoing.payload))
        values[99] = 0.0  # by somebody who trains on
        return seal(outgoing)

    monkeypatch.setattr(FrameWriter, "front", mended)
    with pytest.raises(NotFinite):
        store.put("a.bin", outgoing)


def test_the_norm_is_that_of_what_was_written(store: Store) -> None:
    values = np.zeros(700_000, np.float32)
    outgoing = FrameWriter(HEADER, values)
    store.put("a.bin", outgoing)
    values[99] = math.nan
    assert outgoing.norm == 0.0


def test_a_write_that_failed_half_way_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, outgoing = FileStore(tmp_path, fsync=False), FrameWriter(HEADER, values_of(700_000))
    outgoing.hash_and_norm(0, 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(FrameWriter, "front", _full)
        with pytest.raises(StoreUnavailable):
            store.put("a.bin", outgoing)
    store.put("a.bin", outgoing)
    assert bytes(opened(store, "a.bin").payload) == bytes(outgoing.payload)


def _full(_: FrameWriter) -> bytes:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_looking_while_writing_is_told_as_encoding(store: Store) -> None:
    size = 1 << 19
    out = np.empty(size, np.float32)
    client = RoundClient(store, "r", 0, 1, layouts=[Layout.of([("w", [size], "uint8")])], codec_name="fp32")
    client.join([memoryview(bytes(size))])
    done = client.exchange(0, ArrayVector([values_of(size)]), weight=1.0, out=ArrayVector([out]))
    client.close()
    assert done.outcome.counters.seconds["encode"] > 0
    assert out.tobytes() == values_of(size).tobytes()
