"""Files of deleted objects that are written again: whose they may be, and what becomes of them."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.errors import KeyExists, KeyNotFound, StoreUnavailable
from atoll.stores.file.paths import TEMP_FOLDER
from atoll.stores.file.store import FileStore

BIG = 1 << 17


def test_a_deleted_file_is_written_again_by_the_next_object_of_its_size(tmp_path: Path) -> None:
    store = FileStore(tmp_path, recycle=True)
    store.put("first", b"a" * BIG)
    number = next(tmp_path.glob("first*")).stat().st_ino
    store.delete("first")
    store.put("other", b"b" * (BIG + 1))
    FileStore(tmp_path, recycle=True).put("second", [b"c" * 10, b"d" * (BIG - 10)])
    assert next(tmp_path.glob("second*")).stat().st_ino == number
    assert bytes(store.get("second")) == b"c" * 10 + b"d" * (BIG - 10)
    assert list(store.list()) == ["other", "second"]
    with pytest.raises(KeyNotFound):
        store.get("first")


def test_two_processes_never_write_into_the_same_spare(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path, recycle=True) for _ in range(2)]
    for i in range(8):
        stores[0].put(f"old-{i}", bytes([i]) * BIG)
    for i in range(8):
        stores[i % 2].delete(f"old-{i}")

    def write(number: int) -> None:
        stores[number % 2].create(f"new-{number}", bytes([100 + number]) * BIG)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(24)))
    for i in range(24):
        assert bytes(stores[0].get(f"new-{i}")) == bytes([100 + i]) * BIG


def test_a_file_with_a_second_name_is_not_written_again(tmp_path: Path) -> None:
    """Left by a writer that died after it gave an object its name. `create` tells by names whose file stands."""
    store = FileStore(tmp_path, recycle=True)
    store.put("taken", b"t" * BIG)
    store.create("made", b"m" * BIG)
    leftover = tmp_path / TEMP_FOLDER / "of-a-dead-writer"
    leftover.hardlink_to(next(tmp_path.glob("made*")))
    store.delete("made")
    with pytest.raises(KeyExists):
        store.create("taken", b"x" * BIG)
    assert bytes(store.get("taken")) == b"t" * BIG
    assert leftover.read_bytes() == b"m" * BIG


def test_a_file_that_was_replaced_while_it_was_deleted_leaves_nothing_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger object came between the look at the size and the rename, so its file is a spare of the wrong size."""
    store, other = FileStore(tmp_path, recycle=True), FileStore(tmp_path)
    store.put("a", b"a" * BIG)
    is_there = os.path.isdir

    def replace(path: str) -> bool:
        monkeypatch.undo()
        other.put("a", b"b" * (2 * BIG))
        return is_there(path)

    monkeypatch.setattr(os.path, "isdir", replace)
    store.delete("a")
    assert list(store.list()) == []
    store.put("c", b"c" * BIG)
    assert bytes(store.get("c")) == b"c" * BIG


@pytest.mark.parametrize("refused", ["utime", "rename"])
def test_a_spare_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """Who may write new files to a folder may not always touch those of others."""
    store = FileStore(tmp_path, recycle=True)
    store.put("a", b"a" * BIG)
    store.delete("a")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(os, refused, refuse)
    store.create("b", b"b" * BIG)
    assert bytes(store.get("b")) == b"b" * BIG
    assert len(list((tmp_path / TEMP_FOLDER / "spare").glob("*/*"))) == 1


def test_a_file_that_may_not_be_written_is_not_written_again(tmp_path: Path) -> None:
    """An object that was protected by its owner, who may delete it all the same."""
    store = FileStore(tmp_path, recycle=True)
    store.put("a", b"a" * BIG)
    file = next(tmp_path.glob("a*"))
    number = file.stat().st_ino
    file.chmod(0o444)
    with open(file, "rb") as seen:  # so that its number stays its own
        store.delete("a")
        store.put("b", b"b" * BIG)
        found = next(tmp_path.glob("b*")).stat()
        assert found.st_ino != number
        assert found.st_mode & 0o200
        assert seen.read() == b"a" * BIG


def test_spares_nobody_used_for_a_day_are_swept(tmp_path: Path) -> None:
    store = FileStore(tmp_path, recycle=True)
    for key in ("old", "young"):
        store.put(key, b"a" * BIG)
    for key in ("old", "young"):
        store.delete(key)
    first, second = sorted((tmp_path / TEMP_FOLDER / "spare").glob("*/*"))
    os.utime(first, (1.0, 1.0))
    FileStore(tmp_path).put("other", b"x")
    assert list((tmp_path / TEMP_FOLDER / "spare").glob("*/*")) == [second]


def test_a_full_disk_gives_the_space_of_spares_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, recycle=True)
    store.put("a", b"a" * BIG)
    store.delete("a")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StoreUnavailable):
        store.put("b", b"b" * (BIG + 1))
    assert not list((tmp_path / TEMP_FOLDER / "spare").glob("*/*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_file_is_not_written_again(tmp_path: Path) -> None:
    """It would keep its owner, and who may read it."""
    store = FileStore(tmp_path, recycle=True)
    store.put("a", b"a" * BIG)
    os.chown(next(tmp_path.glob("a*")), 1001, 1001)
    store.delete("a")
    store.put("b", b"b" * BIG)
    assert next(tmp_path.glob("b*")).stat().st_uid == 0
    assert bytes(store.get("b")) == b"b" * BIG
