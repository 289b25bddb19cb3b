"""Files of a tmpfs that are kept: in huge pages if there are any, the same bytes in any case."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from atoll.stores.file import io
from atoll.stores.file.io import HUGE, file_system, is_huge, write_huge
from atoll.stores.file.store import FileStore
from atoll.testing.store_contract import pattern

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


def rewritten(path: Path, size: int, parts: list[memoryview]) -> bool:
    path.write_bytes(b"\xab" * size)
    fd = os.open(path, os.O_RDWR)
    try:
        return write_huge(fd, parts)
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
    assert is_huge((shm / "file").stat())


def test_a_file_of_another_size_is_left_alone(shm: Path) -> None:
    assert not rewritten(shm / "file", HUGE + 1, views(bytes(HUGE)))
    assert (shm / "file").read_bytes() == b"\xab" * (HUGE + 1)


@pytest.mark.usefixtures("has_huge_pages")
@pytest.mark.parametrize("size", [HUGE, 3 * HUGE + 5])
def test_what_a_file_lacks_is_added(shm: Path, size: int) -> None:
    """New ones lack everything."""
    data = pattern(size)
    for holes in (size, 4096, 0):
        (shm / "file").unlink(missing_ok=True)
        with open(shm / "file", "wb") as file:
            file.write(b"x" * (size - holes))
            file.truncate(size if holes < size else 0)
        fd = os.open(shm / "file", os.O_RDWR)
        assert write_huge(fd, views(data))
        os.close(fd)
        assert (shm / "file").read_bytes() == data
        assert (shm / "file").stat().st_blocks * 512 >= size


@pytest.mark.parametrize("size", [2 * HUGE, 2 * HUGE + 100_000])
def test_a_file_with_a_hole_that_says_it_is_huge_is_left_alone(shm: Path, size: int) -> None:
    with open(shm / "file", "wb") as file:
        file.seek(1 << 16)
        file.write(b"x" * (size - (1 << 16)))
    os.chmod(shm / "file", 0o1600)
    before = (shm / "file").stat().st_blocks
    fd = os.open(shm / "file", os.O_RDWR)
    assert not write_huge(fd, views(bytes(size)))
    os.close(fd)
    assert not is_huge((shm / "file").stat())
    assert (shm / "file").stat().st_blocks == before


def test_only_what_is_on_a_tmpfs_is_looked_at_where_it_lies(shm: Path, tmp_path: Path) -> None:
    """Copies keep the mark, and elsewhere another machine may shorten a file."""
    for folder in (shm, tmp_path):
        store = FileStore(folder, recycle=True)
        store.put("a", bytes(HUGE))
        next(path for path in folder.iterdir() if path.name.startswith("a")).chmod(0o1600)
        with closing(store.open("a")) as body:
            assert body.descriptor().is_huge == (file_system(folder) == "tmpfs")


@pytest.mark.usefixtures("has_huge_pages")
def test_a_store_that_keeps_its_files_writes_them_so_and_keeps_the_bytes(shm: Path) -> None:
    store = FileStore(shm, recycle=True)
    for turn in range(4):
        data = pattern(2 * HUGE + 100 + turn)[turn:]
        store.put("a", [data[:100], data[100:]])
        assert store.get("a") == data
        path = next(path for path in shm.iterdir() if path.name.startswith("a"))
        assert is_huge(path.stat())
        store.delete("a")
    assert list(store.list()) == []


@pytest.mark.usefixtures("has_huge_pages")
def test_a_store_that_keeps_no_files_takes_small_pages(shm: Path) -> None:
    store = FileStore(shm)
    store.put("a", bytes(HUGE))
    assert not is_huge(next(path for path in shm.iterdir() if path.name.startswith("a")).stat())


def test_where_there_are_no_huge_pages_none_are_looked_for_for_a_while(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was half done is done again."""
    asked = []

    def half(fd: int, parts: list[memoryview]) -> bool:
        asked.append(fd)
        os.pwrite(fd, b"\xff" * 4096, 0)
        return False

    monkeypatch.setattr(io, "write", half)
    store, data = FileStore(shm, recycle=True), pattern(HUGE)
    for _ in range(4):
        store.put("a", data)
        assert store.get("a") == data
        store.delete("a")
    assert len(asked) == 1
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    store.put("a", data)
    assert len(asked) == 2


@pytest.mark.usefixtures("has_huge_pages")
def test_a_kernel_that_refuses_is_no_error(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(io, "_make", refuse)
    assert not rewritten(shm / "file", HUGE, views(bytes(HUGE)))
    assert not is_huge((shm / "file").stat())
    monkeypatch.setattr(io, "_libc", lambda: None)
    assert not rewritten(shm / "file", HUGE, views(bytes(HUGE)))


def test_on_a_disk_nothing_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if file_system(tmp_path) == "tmpfs":
        pytest.skip("this is no disk")
    monkeypatch.setattr(io, "write", lambda *_: pytest.fail("mapped"))
    store = FileStore(tmp_path, recycle=True)
    for _ in range(2):
        store.put("a", bytes(HUGE))
        store.delete("a")
