"""Names to adapters, ours and other people's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from atoll import registry
from atoll.errors import ConfigError, InvalidSpec, UnknownName
from atoll.stores.file.store import FileStore


def test_a_wrong_name_says_what_may_be_meant():
    with pytest.raises(UnknownName, match=r"`locla`.*`local`\?"):
        registry.executor("locla")
    with pytest.raises(UnknownName, match=r"`fil`.*`file`\?"):
        registry.open_store("fil:///x")


def test_a_wrong_setting_is_named():
    for name, setting, meant in (
        ("local", "nope", "`root`"),
        ("local", "rot", "`root`?"),
        ("local", "name", "`root`"),
        ("local", "self", "`root`"),
        ("sagemaker", "instance_typ", "`instance_type`?"),
    ):
        with pytest.raises(InvalidSpec) as caught:
            registry.executor(name, **{setting: "x"})
        assert caught.value.fields == (setting,)
        assert meant in caught.value.problems[0]
        assert f"[executors.{name}]" in (caught.value.hint or "")


def test_a_path_is_a_folder_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert registry.open_store("./a b").uri == registry.open_store(str(tmp_path / "a b")).uri
    assert registry.store_uri("x").startswith("file:///")
    with pytest.raises(ConfigError):
        registry.open_store("")


def test_a_path_object_is_the_folder_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (Path("a b"), tmp_path / "a b", PurePosixPath("./a b")):
        assert registry.store_uri(path) == f"file://{tmp_path}/a%20b"
        assert registry.open_store(path).uri == registry.open_store(str(path)).uri


def test_an_address_in_a_path_object_is_refused_and_written_as_it_was_meant():
    with pytest.raises(ConfigError, match="`s3:/bucket/runs`") as caught:
        registry.open_store(Path("s3://bucket/runs"))
    assert "'s3://bucket/runs'" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("s3:/bucket/runs", "s3://bucket/runs"),
        ("s3//bucket/runs", "s3://bucket/runs"),
        ("memory//x", "memory://x"),
        ("file//tmp/runs", "file:///tmp/runs"),
        ("gs:bucket", "gs://bucket"),
        ("memory:x", "memory://x"),
        ("file:/tmp/runs", "file:///tmp/runs"),
    ],
)
def test_an_address_that_lacks_a_slash_is_not_taken_for_a_folder(tmp_path, monkeypatch, given, meant):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"`{given}`")) as caught:
        registry.open_store(given)
    assert f"'{meant}'" in (caught.value.hint or "")
    (tmp_path / "s3:runs").mkdir()
    assert registry.store_uri("s3:runs") == f"file://{tmp_path}/s3%3Aruns"
    (tmp_path / "s3" / "runs").mkdir(parents=True)
    assert registry.store_uri("s3//runs") == f"file://{tmp_path}/s3/runs"


@pytest.mark.parametrize(("given", "said"), [(None, "None"), ("", "''"), (7, "7"), (b"runs", r"bytes\(…\)")])
def test_what_is_no_address_is_named(given, said):
    with pytest.raises(ConfigError, match=f"{said}$") as caught:
        registry.open_store(given)
    assert caught.value.hint is None


def test_a_path_that_begins_in_a_deleted_folder_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ConfigError, match="the working folder, in which this path begins, was deleted"):
        registry.open_store("runs")
    assert registry.store_uri(f"{tmp_path}/runs") == f"file://{tmp_path}/runs"


def test_options_behind_a_path_are_refused_with_the_uri_that_takes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape("`a b?recycle=1&fsync=0`")) as caught:
        registry.open_store("a b?recycle=1&fsync=0")
    assert f"'file://{tmp_path}/a%20b?recycle=1&fsync=0'" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []
    opened = registry.open_store(caught.value.hint.partition("'")[2].rstrip("'"))
    assert isinstance(opened, FileStore)
    assert opened.recycles


def test_a_misspelt_option_of_a_file_store_says_which_one_may_be_meant():
    with pytest.raises(ConfigError, match=r"`recyle`.*`recycle`\?") as caught:
        registry.open_store("file:///x?recyle=1")
    assert "fsync, recycle" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["really?", "a?b=1/c", "a?b"])
def test_a_question_mark_alone_makes_no_options(tmp_path, name):
    opened = registry.open_store(str(tmp_path / name))
    assert isinstance(opened, FileStore)
    assert opened.root == tmp_path / name


def test_a_folder_that_is_called_so_is_that_folder(tmp_path):
    (tmp_path / "a?recycle=1").mkdir()
    opened = registry.open_store(str(tmp_path / "a?recycle=1"))
    assert isinstance(opened, FileStore)
    assert (opened.root, opened.recycles) == (tmp_path / "a?recycle=1", False)


@pytest.mark.process
def test_third_parties_add_adapters_by_entry_point_and_a_broken_one_harms_nobody(tmp_path: Path):
    (tmp_path / "theirs.py").write_text(
        "class Theirs:\n    name = 'theirs'\n"
        "class TheirStore:\n    @classmethod\n    def from_uri(cls, uri): return f'opened {uri}'\n"
    )
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[atoll.executors]\ntheirs = theirs:Theirs\nbroken = not_there:X\n[atoll.stores]\ntheirs = theirs:TheirStore\n"
    )
    code = (
        "from atoll import registry\n"
        "print(registry.executor('theirs').name, registry.open_store('theirs://x'))\n"
        "registry.executor('local')\n"
        "try: registry.executor('broken')\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("theirs opened theirs://x\nConfigError ")
    assert "`broken` (not_there:X)" in done.stdout
