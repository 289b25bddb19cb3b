"""File stores: names on disk, what the operating system says, and what a crash leaves."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.errors import BadKey, ConfigError, KeyNotFound, StoreError, StoreRefused, StoreUnavailable
from atoll.registry import open_store
from atoll.stores.base import check_key
from atoll.stores.file.io import file_system, is_local
from atoll.stores.file.paths import TEMP_FOLDER, key_of_file, key_of_folder, path_of
from atoll.stores.file.store import FileStore

names = st.text(st.sampled_from("ab.~fd-é "), min_size=1, max_size=8) | st.text(min_size=1, max_size=20)


def test_usual_keys_keep_their_names(tmp_path: Path) -> None:
    FileStore(tmp_path).put("exp/rounds/000001/commit.json", b"{}")
    assert (tmp_path / "exp/rounds/000001/commit.json").read_bytes() == b"{}"


@given(names)
def test_a_name_on_disk_leads_back_to_its_key(part: str) -> None:
    assume(_is_key(part))
    file = path_of("/r", part, is_folder=False).removeprefix("/r/")
    folder = path_of("/r", part, is_folder=True).removeprefix("/r/")
    assert key_of_file(file) == part
    assert key_of_folder(folder) == part
    assert len({file, folder, TEMP_FOLDER}) == 3


@given(names, names)
def test_different_parts_have_different_names(one: str, other: str) -> None:
    assume(_is_key(one) and _is_key(other) and one != other)
    spellings = [path_of("/r", part, is_folder=kind) for part in (one, other) for kind in (True, False)]
    assert len(set(spellings)) == 4


def _is_key(part: str) -> bool:
    try:
        check_key(part)
    except BadKey:
        return False
    return "/" not in part


def test_unfinished_and_foreign_files_are_not_listed(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a.json", b"x")
    (tmp_path / TEMP_FOLDER / "left-over.bin").write_bytes(b"half")
    (tmp_path / "LICENSE").write_bytes(b"a name without a dot is a folder's")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    (tmp_path / "back\\slash.txt").write_bytes(b"x")
    assert list(store.list()) == ["a.json"]


def test_a_missing_folder_is_an_empty_store(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "not" / "yet")
    assert list(store.list()) == []
    with pytest.raises(KeyNotFound):
        store.get("a.json")
    store.delete("a.json")
    assert not store.root.exists()


def test_nothing_is_left_of_a_finished_write(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a.json", b"1")
    store.create("b.json", b"2")
    with pytest.raises(FileExistsError):
        store.create("b.json", b"3")
    assert list((tmp_path / TEMP_FOLDER).iterdir()) == []


def test_old_leftovers_are_swept_and_young_ones_are_not(tmp_path: Path) -> None:
    temp = tmp_path / TEMP_FOLDER
    temp.mkdir()
    for name in ("old", "young"):
        (temp / name).write_bytes(b"half")
    os.utime(temp / "old", (0, 0))
    FileStore(tmp_path).put("a.json", b"x")
    assert [path.name for path in temp.iterdir()] == ["young"]


@pytest.mark.process
def test_a_writer_killed_in_the_middle_leaves_the_old_object(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a.bin", b"old")
    die = (
        "import os, sys; from atoll.stores.file.store import FileStore; os.fsync = lambda fd: os.kill(os.getpid(), 9);"
    )
    for verb, key in (("put", "a.bin"), ("create", "b.bin")):
        code = f"{die} FileStore(sys.argv[1]).{verb}('{key}', b'new' * 1000)"
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert list(store.list()) == ["a.bin"]
    assert store.get("a.bin") == b"old"
    store.create("b.bin", b"free")


@pytest.mark.parametrize(
    ("code", "error", "hint"),
    [
        (errno.ENOSPC, StoreUnavailable, "free space"),
        (errno.EDQUOT, StoreUnavailable, "free space"),
        (errno.EIO, StoreUnavailable, ""),
        (errno.EACCES, StoreRefused, "check the owner"),
        (errno.EROFS, StoreRefused, "check the owner"),
        (errno.ENAMETOOLONG, BadKey, ""),
        (errno.ENOTDIR, StoreError, "check the path"),
        (errno.ELOOP, StoreError, ""),
    ],
)
def test_what_the_system_says_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[StoreError], hint: str
) -> None:
    store = FileStore(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "writev", fail)
    with pytest.raises(error) as caught:
        store.put("a.json", b"x")
    assert type(caught.value) is error
    assert (caught.value.hint or "").startswith(hint)
    assert isinstance(caught.value.__cause__, OSError)
    assert list(store.list()) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def link(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code), source, None, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreRefused) as caught:
        FileStore(tmp_path).create("a.json", b"x")
    assert caught.value.reason == "hard_links"


def test_a_disk_that_is_full_half_way_keeps_the_old_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.put("a.bin", b"old")
    write, room = os.write, [7]

    def short_write(fd: int, parts: list[memoryview]) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, parts[0][: room.pop()])

    monkeypatch.setattr(os, "writev", short_write)
    with pytest.raises(StoreUnavailable, match="No space left"):
        store.put("a.bin", b"new and longer")
    assert store.get("a.bin") == b"old"
    assert list((tmp_path / TEMP_FOLDER).iterdir()) == []


def test_short_reads_and_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pread = os.write, os.pread
    monkeypatch.setattr(os, "writev", lambda fd, parts: write(fd, parts[0][:3]))
    monkeypatch.setattr(os, "pread", lambda fd, count, at: pread(fd, min(count, 4), at))
    store = FileStore(tmp_path)
    store.put("a.bin", [b"hello", b" ", b"world"])
    assert store.get("a.bin") == b"hello world"
    assert store.get("a.bin", start=2, length=7) == b"llo wor"


def test_large_objects_are_written_in_slices_whatever_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev, ends = os.writev, [0]

    def watched(fd: int, parts: list[memoryview]) -> int:
        ends.append(ends[-1] + writev(fd, parts))
        return ends[-1] - ends[-2]

    monkeypatch.setattr(os, "writev", watched)
    parts = [b"head", os.urandom((5 << 20) - 7), b"", *(bytes([i % 251]) * 700 for i in range(4000))]
    store = FileStore(tmp_path, fsync=False)
    store.put("a.bin", parts)
    assert store.get("a.bin") == b"".join(parts)
    slices = {end >> 18 for end in ends if not end % (1 << 18)}
    assert slices == set(
        range((sum(map(len, parts)) >> 18) + 1)
    )  # no write goes over a boundary, so that a page of that size can hold what it writes


def test_every_write_is_forced_to_disk_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    FileStore(tmp_path, fsync=False).put("quick.json", b"x")
    assert synced == []
    FileStore(tmp_path).create("deep/er/a.json", b"x")
    assert synced[0].startswith(str(tmp_path / TEMP_FOLDER))
    assert synced[1:] == [str(tmp_path), str(tmp_path / "deep"), str(tmp_path / "deep/er")]


@pytest.mark.parametrize("uri", ["file:///tmp/a%20b%3Fc", "file://localhost/tmp/a%20b%3Fc", "/tmp/a b?c"])
def test_addresses_of_one_folder_agree(uri: str) -> None:
    store = FileStore.from_uri(uri)
    assert store.root == Path("/tmp/a b?c")
    assert store.uri == "file:///tmp/a%20b%3Fc"


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert FileStore.from_uri("runs").root == tmp_path / "runs"


@pytest.mark.parametrize("uri", ["file://runs/a", "s3://bucket", "file://"])
def test_what_is_not_a_folder_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        FileStore.from_uri(uri)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="region"):
        FileStore.from_uri("/tmp/a", region="x")


@pytest.mark.process
def test_a_forked_child_has_unfinished_files_of_its_own(tmp_path: Path) -> None:
    store = FileStore(tmp_path, recycle=True)
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(theirs, store._new_temp().encode())
        finally:
            os._exit(0)  # whatever happened: a child that goes on would run the other tests too
    os.waitpid(pid, 0)
    os.set_blocking(ours, False)
    assert os.read(ours, 1000).decode() != store._new_temp()
    os.close(ours)
    os.close(theirs)


def test_a_large_object_stays_as_it_was_read_when_it_is_replaced_or_deleted(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", b"x" * (2 << 20))
    seen = store.get("a")
    store.put("a", b"y" * (2 << 20))
    store.delete("a")
    assert bytes(seen) == b"x" * (2 << 20)


def test_files_are_read_where_they_lie_on_this_machines_own_file_systems_only(tmp_path: Path, monkeypatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:5 / /net rw,relatime shared:1 - nfs4 host:/x rw\n"
        "3 2 0:6 / /net/fast\\040disk rw - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr("atoll.stores.file.io._MOUNTS", mounts)
    found = {
        path: is_local(file_system(Path(path))) for path in ("/a", "/net", "/net/b", "/network", "/net/fast disk/c")
    }
    assert found == {"/a": True, "/net": False, "/net/b": False, "/network": True, "/net/fast disk/c": True}


def test_the_options_of_a_file_store_are_part_of_its_address(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "a?b", fsync=False, recycle=True)
    assert store.uri.endswith("/a%3Fb?fsync=0&recycle=1")
    again = open_store(store.uri)
    assert (again.uri, again.root, again.recycles) == (store.uri, store.root, True)
    assert not open_store(f"file://{tmp_path}?recycle=false").recycles
    for wrong, word in (("recycle=perhaps", "recycle .*'perhaps'"), ("recycled=1", r"`recycled`.*`recycle`\?")):
        with pytest.raises(ConfigError, match=word):
            open_store(f"file://{tmp_path}?{wrong}")


def test_a_folder_that_somebody_put_in_the_way_is_a_typed_error_and_leaks_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    (tmp_path / "a.json").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for read in (store.get, store.open):
        with pytest.raises(StoreError, match=r"a\.json"):
            read("a.json")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_shrinks_while_it_is_read_is_unavailable(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a.bin", bytes(100_000))
    body = store.open("a.bin")
    body.readinto(memoryview(bytearray(10)))
    os.truncate(tmp_path / "a.bin", 50_000)
    with pytest.raises(StoreUnavailable) as caught:
        body.readinto(memoryview(bytearray(99_990)))
    assert (caught.value.key, caught.value.reason) == ("a.bin", "cut")
    body.close()


def test_bodies_that_are_dropped_leave_no_file_open(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a.bin", bytes(1000))
    before = len(os.listdir("/proc/self/fd"))
    for count in range(100):
        store.open("a.bin").readinto(memoryview(bytearray(count)))
    assert len(os.listdir("/proc/self/fd")) == before
