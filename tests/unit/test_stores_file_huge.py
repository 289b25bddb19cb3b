"""Files that are written over and over on a tmpfs: in huge pages if there are any, the same bytes in any case."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.stores import _file_huge
from atoll.stores._file_huge import HUGE, overwrite
from atoll.stores._file_reading import file_system
from atoll.stores.file import FileStore
from atoll.testing.store_contract_bodies import pattern

SHM = Path("/dev/shm")


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder of a tmpfs."""
    if file_system(SHM) != "tmpfs" or not os.access(SHM, os.W_OK):
        pytest.skip("there is no tmpfs at /dev/shm")
    folder = Path(tempfile.mkdtemp(dir=SHM))
    yield folder
    shutil.rmtree(folder)


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def is_huge(path: Path) -> bool:
    return bool(path.stat().st_mode & stat.S_ISVTX)


def rewritten(path: Path, size: int, parts: list[memoryview]) -> bool:
    path.write_bytes(b"\xab" * size)
    fd = os.open(path, os.O_RDWR)
    try:
        return overwrite(fd, parts)
    finally:
        os.close(fd)


@pytest.fixture
def has_huge_pages(shm: Path) -> None:
    if not rewritten(shm / "probe", HUGE, views(bytes(HUGE))):
        pytest.skip("this kernel has no huge pages for us")


@pytest.mark.usefixtures("has_huge_pages")
@pytest.mark.parametrize("size", [HUGE, HUGE + 1, 3 * HUGE - 1, 4 * HUGE, 4 * HUGE + 4096, 9 * HUGE + 777])
@pytest.mark.parametrize("front", [0, 1, 448, HUGE + 3])
def test_all_bytes_arrive_whatever_the_parts(shm: Path, size: int, front: int) -> None:
    data = pattern(size)
    front = min(front, size)
    parts = views(data[:front], b"", data[front : size - 5], data[max(front, size - 5) :])
    assert rewritten(shm / "file", size, parts)
    assert (shm / "file").read_bytes() == data
    assert is_huge(shm / "file")


def test_a_file_of_another_size_or_with_a_hole_is_left_alone(shm: Path) -> None:
    assert not rewritten(shm / "file", HUGE + 1, views(bytes(HUGE)))
    with open(shm / "file", "wb") as file:
        file.write(b"x" * 4096)  # of nothing at all the kernel would make no huge page
        file.truncate(2 * HUGE)
        file.seek(HUGE)
        file.write(b"x" * 4096)
    fd = os.open(shm / "file", os.O_RDWR)
    assert not overwrite(fd, views(bytes(2 * HUGE)))
    os.close(fd)
    assert (shm / "file").stat().st_blocks * 512 == 2 * 4096


@pytest.mark.usefixtures("has_huge_pages")
def test_a_store_writes_its_spares_so_and_keeps_the_bytes(shm: Path) -> None:
    store = FileStore(shm, recycle=True)
    for turn in range(4):
        data = pattern(2 * HUGE + 100 + turn)[turn:]
        store.put("a", [data[:100], data[100:]])
        assert store.get("a") == data
        path = next(path for path in shm.iterdir() if path.name.startswith("a"))
        assert is_huge(path) == (turn > 0)
        store.delete("a")
    assert list(store.list()) == []


def test_where_there_are_no_huge_pages_it_is_tried_once(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was half done is done again."""
    asked = []

    def half(fd: int, parts: list[memoryview]) -> bool:
        asked.append(fd)
        os.pwrite(fd, b"\xff" * 4096, 0)
        return False

    monkeypatch.setattr("atoll.stores.file.overwrite", half)
    store, data = FileStore(shm, recycle=True), pattern(HUGE)
    for _ in range(4):
        store.put("a", data)
        assert store.get("a") == data
        store.delete("a")
    assert len(asked) == 1


@pytest.mark.usefixtures("has_huge_pages")
def test_a_kernel_that_refuses_is_no_error(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(_file_huge, "_collapse", refuse)
    assert not rewritten(shm / "file", HUGE, views(bytes(HUGE)))
    assert not is_huge(shm / "file")
    monkeypatch.setattr(_file_huge, "_libc", lambda: None)
    assert not rewritten(shm / "file", HUGE, views(bytes(HUGE)))


def test_on_a_disk_nothing_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if file_system(tmp_path) == "tmpfs":
        pytest.skip("this is no disk")
    monkeypatch.setattr("atoll.stores.file.overwrite", lambda *_: pytest.fail("mapped"))
    store = FileStore(tmp_path, recycle=True)
    for _ in range(2):
        store.put("a", bytes(HUGE))
        store.delete("a")
