"""Which files of the user belong to an entry point, and how they differ between two launches."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import atoll
from atoll import journal
from atoll.bundle import build, upload
from atoll.bundle.compare import bundle_differences
from atoll.entry import Entry
from atoll.errors import Conflict
from atoll.journal import changed_files
from atoll.registry import open_store
from atoll.runs.code_files import code_differences, files_of, with_files
from atoll.spec import Code, Task

TREE = {
    "train.py": "import os, json, numpy\nimport helper\nfrom package import part\nfrom package.deep.leaf import f\n",
    "helper.py": "def late():\n    import lazy\n",
    "lazy.py": "",
    "unused.py": "",
    "package/__init__.py": "",
    "package/part.py": "from . import sibling\nfrom .deep import leaf\nfrom .. import nothing\n",
    "package/sibling.py": "import helper\n",
    "package/deep/__init__.py": "from ..sibling import x\n",
    "package/deep/leaf.py": "this is no Python",
    "package/other.py": "",
    "scripts/run.py": "import beside\n",
    "scripts/beside.py": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


class SwitchesThreads:
    """In a cycle, so that the garbage collector ends it, wherever the running thread is."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        time.sleep(0.0001)


def test_threads_may_read_source_at_the_same_time(root):
    (root / "train.py").write_text("x = [(1, 2), (3, 4)]\n" * 300)

    def files(_):
        for _ in range(20):
            SwitchesThreads()
        return set(files_of(Entry(script="train.py"), str(root), None))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(files, range(40))) == [{"train.py"}] * 40


STORE = open_store("memory://code-files")
USED = {"train.py", "helper.py", "lazy.py"} | {
    f"package/{name}" for name in ("__init__.py", "part.py", "sibling.py", "deep/__init__.py", "deep/leaf.py")
}


@pytest.mark.parametrize(
    "entry", [Entry(module="train", function="f"), Entry(script="train.py"), Entry(dotted="train.f")]
)
def test_the_files_are_those_that_the_entry_point_imports_from_its_folder(root, entry):
    assert set(files_of(entry, str(root), None)) == USED


def test_a_script_finds_what_is_beside_it(root):
    assert set(files_of(Entry(script="scripts/run.py"), str(root), None)) == {"scripts/run.py", "scripts/beside.py"}


def test_a_module_of_another_folder_is_found_there(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert set(files_of(Entry(module="train", function="f"), str(elsewhere), str(root))) == USED


def test_changed_new_and_unused_files_are_told_apart():
    lines = changed_files({"a.py": "1", "b.py": "2", "c.py": "3"}, {"a.py": "1", "b.py": "9", "d.py": "4"})
    assert [line.split("`")[1] for line in lines] == ["b.py", "d.py", "c.py"]
    assert changed_files({"a.py": "1"}, {"a.py": "1"}) == []


def test_code_in_place_and_the_same_files_as_a_bundle_are_equal(root):
    task = Task("train:f", code=Code.in_place(str(root)))
    before = replace(task, code=with_files(task, task.code))
    assert before.code.files is not None
    sent = replace(task, code=Code.bundle("ab" * 32))
    assert code_differences(before, sent, str(root), STORE) == []
    (root / "lazy.py").write_text("x = 1\n")
    assert len(code_differences(before, sent, str(root), STORE)) == 1
    assert code_differences(before, replace(task, code=with_files(task, task.code)), None, STORE) == [
        "code: `lazy.py` has changed"
    ]
    assert code_differences(sent, sent, None, STORE) == []
    older = task  # the record of a version that did not write the files
    assert code_differences(older, before, None, STORE) == []


def test_the_record_of_a_task_has_files_only_if_they_are_known(root):
    task = Task("train:f", code=Code.in_place(str(root)))
    assert "files" not in task.to_json()["code"]
    known = replace(task, code=with_files(task, task.code))
    assert Task.from_json(known.to_json()) == known


def test_the_files_that_differ_between_two_bundles_are_named(root):
    first = build(root)
    upload(first, STORE)
    (root / "lazy.py").write_text("x = 2\n")
    (root / "unused.py").unlink()
    second = build(root)
    found = bundle_differences(STORE, first.digest, second)
    assert [line.split("`")[1] for line in found] == ["lazy.py", "unused.py"]
    assert bundle_differences(STORE, second.digest, second) == []
    assert len(bundle_differences(STORE, "ab" * 32, second)) == 1, "a bundle that is not in the store"


def test_a_used_run_id_with_another_bundle_is_a_conflict_that_names_the_files(root, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(root)
    (root / "train.py").write_text("def f(ctx): pass\n")
    store = open_store(str(tmp_path_factory.mktemp("store")))
    options = {"store": store.uri, "workspace": str(root), "run_id": "r"}
    first = atoll.prepare("train:f", **options)
    first.upload()
    journal.record_run(store, first.spec, executor="local")
    (root / "helper.py").write_text("y = 1\n")
    with pytest.raises(Conflict) as caught:
        atoll.prepare("train:f", **options).submit()
    assert caught.value.differences == ("code: `helper.py` has changed",)
