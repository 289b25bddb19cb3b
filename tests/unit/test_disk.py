"""Full disks, as errors, file systems and status texts say it."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from atoll.disk import DiskWatch, folder_of, free_bytes, is_full, problem_of
from atoll.errors import StoreUnavailable


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "no space"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (OSError(errno.EACCES, "denied"), False),
        (caused(StoreUnavailable("x", uri="file:///s"), OSError(errno.ENOSPC, "no space")), True),
        (StoreUnavailable("x", uri="file:///s"), False),
        (None, False),
    ],
)
def test_an_error_says_that_a_disk_is_full_if_it_or_its_cause_does(error, expected):
    assert is_full(error) is expected


@pytest.mark.parametrize(
    ("uri", "folder"),
    [("file:///a%20b/c?fsync=0", "/a b/c"), ("file:///x", "/x"), ("s3://bucket/x", None), ("memory://x", None)],
)
def test_only_a_file_store_has_a_folder(uri, folder):
    assert folder_of(uri) == folder


def disk(monkeypatch: pytest.MonkeyPatch, **given: int) -> None:
    found = {"f_files": 10, "f_ffree": 5, "f_frsize": 1024, "f_flag": 0, "f_bfree": 1000, "f_bavail": 1000, **given}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**found))


def test_blocks_that_are_reserved_for_root_are_free_for_root_only(monkeypatch):
    disk(monkeypatch, f_bfree=500, f_bavail=0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert free_bytes("/x") == 0
    assert problem_of("/x") == "disk full: /x"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert free_bytes("/x") == 500 * 1024
    assert problem_of("/x") == ""


def test_without_inodes_a_disk_is_full_and_a_read_only_one_is_not(monkeypatch, tmp_path):
    disk(monkeypatch, f_ffree=0)
    assert free_bytes("/x") == 0
    disk(monkeypatch, f_bfree=0, f_bavail=0, f_flag=os.ST_RDONLY)
    assert problem_of("/x") == ""
    monkeypatch.undo()
    assert free_bytes(tmp_path / "absent") is None
    assert problem_of(tmp_path / "absent") == ""


def test_a_full_disk_stays_full_until_there_is_clearly_room(monkeypatch):
    watch = DiskWatch("/x", room_bytes=400 << 10)
    steps = []
    for free_kib in (100, 10, 100, 300, 401, 100):
        disk(monkeypatch, f_bfree=free_kib, f_bavail=free_kib)
        steps.append(watch.look())
    assert steps == [False, True, True, True, False, False]
    watch.failed(OSError(errno.EIO, "broken"))
    assert watch.problem == ""
    watch.failed(OSError(errno.ENOSPC, "no space"))
    assert watch.problem == "disk full: /x"
