"""Packing a folder: equal folders give equal bytes, and whatever cannot travel is named."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from workspace_trees import nobodys_folder, plant

from atoll.bundle import Bundle, build, fetch_and_unpack, upload
from atoll.bundle.pack import read_entries, write_archive
from atoll.errors import ConfigError
from atoll.stores.file.store import FileStore
from atoll.stores.memory import MemoryStore
from repository import DOCS

MIB = 1024**2


def members(bundle: Bundle) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(bundle.data), mode="r:gz") as tar:
        return {member.name: member for member in tar}


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    bundle = build(plant(tmp_path, {"a.py": "print(1)\n"}))
    assert bundle.digest == bundle.manifest.digest == hashlib.sha256(bundle.data).hexdigest()
    assert bundle.key == f"bundles/{bundle.digest}.tar.gz"


@pytest.mark.parametrize("in_git", [pytest.param(True, marks=pytest.mark.process), False])
def test_folders_that_change_with_every_run_are_left_out(tmp_path: Path, in_git: bool) -> None:
    root = plant(tmp_path / "code", {"a.py": "a", "runs/x.json": "{}", "runs2/y.py": "y"})
    if in_git:
        subprocess.run(["git", "init", "-q", root], check=True)
    (tmp_path / "link").symlink_to(root / "runs")
    assert set(members(build(root, without=[tmp_path / "link", tmp_path / "other", root]))) == {"a.py", "runs2/y.py"}


@pytest.mark.parametrize("in_git", [pytest.param(True, marks=pytest.mark.process), False])
def test_a_store_of_other_runs_is_left_out_and_named(tmp_path: Path, in_git: bool) -> None:
    root = plant(tmp_path / "code", {"a.py": "a", "out/notes.txt": "n"})
    if in_git:
        subprocess.run(["git", "init", "-q", root], check=True)
    bundle = build(root)
    FileStore(root).put("a.json", b"{}")  # the workspace itself is sent, also if it is a store
    FileStore(root / "out" / "runs").put("runs/one/run.json", b"{}")
    now = build(root)
    assert set(members(now)) == {*members(bundle), "a.json"}
    assert now.manifest.notes == ("`out/runs` is a store of runs, and is not sent",)


def test_equal_folders_give_equal_bytes_whatever_else_differs(tmp_path: Path) -> None:
    tree = {"b/c.py": "c", "a.py": "a", "run.sh": "#!/bin/sh\n", "é.txt": "é", "long/" * 30 + "name": "x"}
    one = plant(tmp_path / "one", tree)
    old_mask = os.umask(0o077)
    try:
        two = plant(tmp_path / "two", dict(reversed(tree.items())))
    finally:
        os.umask(old_mask)
    for root in (one, two):
        (root / "link").symlink_to("a.py")
    (one / "run.sh").chmod(0o775)
    (two / "run.sh").chmod(0o700)
    (two / "empty folder").mkdir()
    os.utime(two / "a.py", (1, 1))
    if os.geteuid() == 0:
        os.chown(two / "a.py", 1234, 1234)
    assert bytes(build(one).data) == bytes(build(two).data)


@pytest.mark.parametrize("change", ["content", "name", "mode", "target"])
def test_any_difference_that_matters_changes_the_digest(tmp_path: Path, change: str) -> None:
    root = plant(tmp_path, {"a": "1", "b": "2"})
    (root / "link").symlink_to("a")
    before = build(root).digest
    if change == "content":
        (root / "a").write_text("3")
    elif change == "name":
        (root / "b").rename(root / "c")
    elif change == "mode":
        (root / "a").chmod(0o755)
    else:
        (root / "link").unlink()
        (root / "link").symlink_to("b")
    assert build(root).digest != before


def test_members_carry_no_trace_of_this_machine(tmp_path: Path) -> None:
    root = plant(tmp_path, {"z": "", "a/b": "x" * 3, "run": ""})
    (root / "link").symlink_to("z")
    (root / "run").chmod(0o4711)
    (root / "a" / "b").chmod(0o600)
    bundle = build(root)
    found = members(bundle)
    assert list(found) == ["a/b", "link", "run", "z"]
    assert {name: member.mode for name, member in found.items() if member.isreg()} == {
        "a/b": 0o644,
        "run": 0o755,
        "z": 0o644,
    }
    for member in found.values():
        assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
    assert bytes(bundle.data[3:8]) == bytes(5)  # no flags, so no file name, and no time
    assert gzip.decompress(bundle.data).endswith(bytes(1024))


def test_a_bundle_comes_back_as_it_went(tmp_path: Path) -> None:
    tree = {"train.py": "x = 1\n", "empty": "", "big": os.urandom(3 * MIB), "pkg/sub/é ü.txt": "ü", "a\nb": "newline"}
    root = plant(tmp_path / "from", tree)
    (root / "train.py").chmod(0o755)
    (root / "pkg" / "up").symlink_to("../train.py")
    (root / "here").symlink_to(".")
    store = MemoryStore()
    bundle = build(root)
    upload(bundle, store)
    out = fetch_and_unpack(store, bundle.digest, tmp_path / "to")
    found = {os.path.relpath(os.path.join(folder, n), out) for folder, _, names in os.walk(out) for n in names}
    assert found == {*tree, "pkg/up"}
    for path, content in tree.items():
        assert (out / path).read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert os.readlink(out / "pkg" / "up") == "../train.py"
    assert os.readlink(out / "here") == "."
    assert os.access(out / "train.py", os.X_OK)
    assert not (out / "empty").stat().st_mode & 0o111
    assert build(out).digest == bundle.digest


def test_uploading_twice_is_quiet_and_sends_once(tmp_path: Path) -> None:
    bundle = build(plant(tmp_path, {"a": ""}))
    store = MemoryStore()
    assert upload(bundle, store) == upload(bundle, store) == bundle.key
    assert list(store.list()) == [bundle.key]


def test_another_launcher_may_win_the_upload(tmp_path: Path) -> None:
    class Racing(MemoryStore):
        def create(self, key: str, data: object) -> None:
            super().create(key, bundle.data)  # somebody else, between our look and our write
            super().create(key, bundle.data)

    bundle = build(plant(tmp_path, {"a": ""}))
    store = Racing()
    assert upload(bundle, store) == bundle.key
    assert bytes(store.get(bundle.key)) == bytes(bundle.data)


def test_nothing_to_send_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        build(tmp_path)
    plant(tmp_path, {"a": "", ".gitignore": "*\n"})
    with pytest.raises(ConfigError, match="all of them are ignored"):
        build(tmp_path)


@pytest.mark.parametrize("name", ["absent", "file"])
def test_what_is_not_a_folder_is_an_error(tmp_path: Path, name: str) -> None:
    plant(tmp_path, {"file": ""})
    with pytest.raises(ConfigError, match=f"{name}` is not a folder"):
        build(tmp_path / name)


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    plant(tmp_path / "real", {"a": "1"})
    (tmp_path / "link").symlink_to("real")
    assert build(tmp_path / "link").digest == build(tmp_path / "real").digest


def test_python_caches_are_sent_with_a_word_of_advice(tmp_path: Path) -> None:
    root = plant(tmp_path, {"a.py": "", "d/__pycache__/a.pyc": ""})
    assert "`__pycache__` is sent too" in build(root).manifest.notes[0]
    plant(root, {".gitignore": "__pycache__/\n"})
    assert build(root).manifest.notes == ()


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_special_files_are_left_out_with_a_note(tmp_path: Path, kind: str) -> None:
    root = plant(tmp_path, {"a": ""})
    if kind == "fifo":
        os.mkfifo(root / "odd")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(root / "odd"))
    manifest = build(root).manifest
    assert manifest.count == 1
    assert "`odd` is a" in manifest.notes[0]
    assert "note: `odd` is a" in manifest.text()


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    plant(tmp_path, {"a": ""})
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")).write_text("")
    with pytest.raises(ConfigError, match=r"b'caf\\xe9' is not UTF-8"):
        build(tmp_path)
    (tmp_path / ".atollignore").write_text("caf?\n")
    assert build(tmp_path).manifest.count == 2


def test_a_path_that_is_too_deep_is_refused_when_packing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="deeper than 100 folders"):
        build(plant(tmp_path, {"d/" * 101 + "a": ""}))


def test_a_file_that_cannot_be_read_is_named() -> None:
    with nobodys_folder() as root:
        plant(root, {"a": "", "d/secret.key": "x"})
        (root / "d" / "secret.key").chmod(0)
        with pytest.raises(ConfigError, match=r"cannot read `d/secret\.key`: Permission denied"):
            build(root)


@pytest.mark.parametrize(
    "change", ["grows", "shrinks", "rewritten", "replaced", "gone", "becomes a link", "becomes a folder"]
)
def test_a_file_that_changes_between_look_and_read_is_named(tmp_path: Path, change: str) -> None:
    file = plant(tmp_path, {"log": "0123456789", "other": "0123456789"}) / "log"
    entries = read_entries(os.fsencode(tmp_path), [b"log"])
    if change == "grows":
        file.write_text("0123456789+")
    elif change == "shrinks":
        file.write_text("0")
    elif change == "rewritten":
        os.utime(file, ns=(1, 1))
    elif change == "replaced":
        times = file.stat()
        (tmp_path / "other").replace(file)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    else:
        file.unlink()
    if change == "becomes a link":
        file.symlink_to("other")
    elif change == "becomes a folder":
        file.mkdir()
    with pytest.raises(ConfigError, match="`log` changed while it was being read"):
        write_archive(os.fsencode(tmp_path), entries, io.BytesIO())


class Meddling(io.BytesIO):
    """A place to write to that lets something happen to the file while it is being read."""

    def __init__(self, file: Path, size: int) -> None:
        super().__init__()
        self.file, self.size = file, size

    def write(self, data: object) -> int:
        if self.tell() > MIB:
            with open(self.file, "r+b") as opened:
                opened.truncate(self.size)
        return super().write(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [5 * MIB, 4 * MIB - 1, 0])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path, size: int) -> None:
    file = plant(tmp_path, {"a log": os.urandom(4 * MIB)}) / "a log"
    entries = read_entries(os.fsencode(tmp_path), [b"a log"])
    with pytest.raises(ConfigError, match="`a log` changed while it was being read"):
        write_archive(os.fsencode(tmp_path), entries, Meddling(file, size))


def test_the_name_of_the_file_written_to_is_not_in_the_bytes(tmp_path: Path) -> None:
    entries = read_entries(os.fsencode(plant(tmp_path / "w", {"a": "1"})), [b"a"])
    unnamed, named = io.BytesIO(), tmp_path / "name.tar"
    write_archive(os.fsencode(tmp_path / "w"), entries, unnamed)
    with open(named, "wb") as sink:
        write_archive(os.fsencode(tmp_path / "w"), entries, sink)
    assert named.read_bytes() == unnamed.getvalue()


@pytest.mark.process
def test_importing_the_module_loads_nothing_heavy() -> None:
    heavy = ["pathspec", "tarfile", "subprocess", "gzip", "tempfile", "shutil", "mmap"]
    code = f"import sys, atoll.bundle; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_file_handle_is_left_open(tmp_path: Path) -> None:
    root = plant(tmp_path, {"a": "1", "d/b": "2"})
    before = len(os.listdir("/proc/self/fd"))
    bundle = build(root)
    del bundle
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.process
def test_the_page_about_it_runs(tmp_path: Path) -> None:
    page = (DOCS / "workspace.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    plant(tmp_path, {"my-project/train.py": "", "my-project/.gitignore": "out/\n", "my-project/out/x": ""})
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "my-project", capture_output=True, text=True, check=True
    )
    assert "2 files, 5 B" in done.stdout
    assert done.stdout.endswith("['.gitignore', 'train.py']\n")
