"""Which files are sent: what git alone knows, and what happens without it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from workspace_trees import by_git, by_walk, forget_git_settings, git, listed, names, nobodys_folder, plant

from atoll.bundle.files import list_files
from atoll.errors import ConfigError

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def _plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_git_settings(monkeypatch)


def test_without_a_repository_the_folder_is_walked(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {".gitignore": "out/\n", "train.py": "", "out/x": "", "lib/.gitignore": "*.so\n", "lib/a.so": "", "lib/b": ""},
    )
    assert listed(tmp_path).source == "walk"
    assert names(tmp_path) == {".gitignore", "train.py", "lib/.gitignore", "lib/b"}


def test_in_a_repository_git_is_asked(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(
        tmp_path, {".gitignore": "*.bin\n", "kept.bin": "", "lost.bin": "", "new.py": "", "old.py": "", "gone.py": ""}
    )
    git(tmp_path, "add", "-f", "kept.bin", "old.py", "gone.py")
    (tmp_path / "gone.py").unlink()
    assert listed(tmp_path).source == "git"
    assert names(tmp_path) == {".gitignore", "kept.bin", "old.py", "new.py"}


def test_only_the_asked_folder_is_listed_and_rules_above_it_count(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {".gitignore": "*.log\n/sub/tmp\n", "top.py": "", "sub/a.py": "", "sub/a.log": "", "sub/tmp/x": ""})
    assert names(tmp_path / "sub") == {"a.py"}


def test_without_git_on_path_rules_above_the_folder_still_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    plant(
        tmp_path,
        {".gitignore": "*.log\n/sub/tmp\n", "sub/a.py": "", "sub/a.log": "", "sub/tmp/x": "", "sub/secret": ""},
    )
    plant(tmp_path, {".git/info/exclude": "secret\n"})
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    found = listed(tmp_path / "sub")
    assert (found.source, found.paths) == ("walk", (b"a.py",))
    assert "git is not on PATH" in found.notes[0]


@pytest.mark.parametrize("path", [None, "nowhere"])
def test_a_folder_that_is_itself_ignored_has_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {".gitignore": "build/\n", "build/x/a": ""})
    if path:
        monkeypatch.setenv("PATH", path)
    assert names(tmp_path / "build" / "x") == set()


def test_info_exclude_counts_in_both_ways(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {".git/info/exclude": "a\nb\n", ".gitignore": "!b\n", "a": "", "b": "", "c": ""})
    assert by_walk(tmp_path) == by_git(tmp_path) == {".gitignore", "b", "c"}


def test_a_nested_repository_has_its_own_rules(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(
        tmp_path,
        {".gitignore": "*.log\nhidden/\n", "inner/a.log": "", "inner/b": "", "inner/.gitignore": "b\n", "hidden/x": ""},
    )
    git(tmp_path / "inner", "init", "-q")
    git(tmp_path / "hidden", "init", "-q")
    assert by_walk(tmp_path) == by_git(tmp_path) == {".gitignore", "inner/.gitignore", "inner/a.log"}


def test_a_folder_called_dot_git_that_is_no_repository_is_still_left_out(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {"d/.git/x": "", "d/a": "", "e/.git": "not a pointer", "e/b": ""})
    assert by_walk(tmp_path) == by_git(tmp_path) == {"d/a", "e/b"}


def test_links_are_listed_and_never_entered(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {"d/a": "", ".gitignore": "out/\n"})
    (tmp_path / "out").symlink_to("d")
    assert by_walk(tmp_path) == by_git(tmp_path) == {".gitignore", "d/a", "out"}


def test_an_ignore_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {"rules": "a\n", "a": ""})
    (tmp_path / ".gitignore").symlink_to("rules")
    assert by_walk(tmp_path) == by_git(tmp_path) == {".gitignore", "a", "rules"}


def test_our_own_ignore_file_may_be_a_link(tmp_path: Path) -> None:
    plant(tmp_path, {"rules": "a\n", "a": ""})
    (tmp_path / ".atollignore").symlink_to("rules")
    assert names(tmp_path) == {".atollignore", "rules"}


def test_an_ignore_file_that_is_a_folder_has_no_rules(tmp_path: Path) -> None:
    plant(tmp_path, {".gitignore/x": "", ".atollignore/y": "", "a": ""})
    assert names(tmp_path) == {".gitignore/x", ".atollignore/y", "a"}


def test_our_own_ignore_file_also_leaves_out_what_git_tracks(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {"data/big": "", "data/keep": "", "a": "", ".atollignore": "data/*\n!data/keep\n"})
    git(tmp_path, "add", ".")
    assert names(tmp_path) == {".atollignore", "a", "data/keep"}


def test_submodules_are_part_of_the_tree(tmp_path: Path) -> None:
    library, project = tmp_path / "library", tmp_path / "project"
    plant(library, {"lib.py": "", ".gitignore": "*.o\n"})
    plant(project, {"main.py": ""})
    for root in (library, project):
        git(root, "init", "-q")
    git(library, "add", ".")
    git(library, "commit", "-qm", "first")
    git(project, "submodule", "--quiet", "add", str(library), "vendor/library")
    plant(project, {"vendor/library/new.py": "", "vendor/library/x.o": ""})
    inside = {f"vendor/library/{name}" for name in (".gitignore", "lib.py", "new.py")}
    assert names(project) == {".gitmodules", "main.py", *inside}
    assert by_walk(project) == by_git(project)


def test_a_submodule_that_is_not_checked_out_is_noted(tmp_path: Path) -> None:
    project = _project_with_gitlink(tmp_path)
    (project / "sub").mkdir()
    found = listed(project)
    assert found.paths == (b"main.py",)
    assert "`sub` is a git submodule that is not checked out" in found.notes[0]


def test_a_submodule_without_its_repository_is_refused(tmp_path: Path) -> None:
    project = _project_with_gitlink(tmp_path)
    plant(project, {"sub/lib.py": ""})
    with pytest.raises(ConfigError, match="`sub` is a git submodule without its own repository"):
        listed(project)
    plant(project, {".atollignore": "/sub\n"})
    assert names(project) == {".atollignore", "main.py"}


def _project_with_gitlink(root: Path) -> Path:
    git(root, "init", "-q")
    plant(root, {"main.py": ""})
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    commit = git(root, "rev-parse", "HEAD").strip()
    git(root, "update-index", "--add", "--cacheinfo", f"160000,{commit},sub")
    return root


def test_a_tracked_file_that_became_a_folder_is_gone_and_the_folder_counts(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {"thing": "", ".gitignore": "*.log\n"})
    git(tmp_path, "add", ".")
    (tmp_path / "thing").unlink()
    plant(tmp_path, {"thing/a": "", "thing/b.log": ""})
    assert names(tmp_path) == {".gitignore", "thing/a"}


def test_a_tracked_folder_that_became_a_link_is_only_the_link(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {"d/a": "", "e/a": ""})
    git(tmp_path, "add", ".")
    shutil.rmtree(tmp_path / "d")
    (tmp_path / "d").symlink_to("e")
    assert names(tmp_path) == {"d", "e/a"}


def test_a_conflict_in_the_index_lists_the_file_once(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {"a": "1"})
    blob = git(tmp_path, "hash-object", "-w", "a").strip()
    stages = "".join(f"100644 {blob} {stage}\ta\n" for stage in (1, 2, 3))
    subprocess.run(["git", "update-index", "--index-info"], cwd=tmp_path, input=stages, text=True, check=True)
    assert listed(tmp_path).paths == (b"a",)


def test_variables_of_a_git_hook_do_not_mislead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, mine = tmp_path / "other", tmp_path / "mine"
    for root, name in ((other, "theirs"), (mine, "ours")):
        plant(root, {name: ""})
        git(root, "init", "-q")
        git(root, "add", ".")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert names(mine) == {"ours"}


def test_listing_runs_no_command_of_the_repository(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {"a": "", "hook": "#!/bin/sh\ntouch ran\n"})
    (tmp_path / "hook").chmod(0o755)
    git(tmp_path, "add", ".")
    git(tmp_path, "config", "core.fsmonitor", str(tmp_path / "hook"))
    assert names(tmp_path) == {"a", "hook"}
    assert not (tmp_path / "ran").exists()


def test_a_linked_work_tree_is_a_repository(tmp_path: Path) -> None:
    main = tmp_path / "main"
    plant(main, {"a": "", ".gitignore": "*.log\n"})
    git(main, "init", "-q")
    git(main, "add", ".")
    git(main, "commit", "-qm", "first")
    git(main, "worktree", "add", "-q", str(tmp_path / "linked"))
    plant(tmp_path / "linked", {"x.log": ""})
    assert listed(tmp_path / "linked").source == "git"
    assert names(tmp_path / "linked") == {".gitignore", "a"}


def test_a_broken_repository_is_an_error_in_the_words_of_git(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    plant(tmp_path, {"a": "", ".git/index": "not an index"})
    with pytest.raises(ConfigError, match=r"git cannot list the files .*index"):
        listed(tmp_path)


def test_names_with_newlines_and_quotes_survive_git(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    odd = {'a"b', "new\nline", "tab\t", "é", "back\\slash", "-dash", " space "}
    plant(tmp_path, dict.fromkeys(odd, ""))
    assert names(tmp_path) == odd


def test_walking_stops_when_there_is_far_too_much(tmp_path: Path) -> None:
    plant(tmp_path, {f"{number}": "" for number in range(30)})
    assert len(list_files(os.fsencode(tmp_path), at_most=10).paths) == 10


@pytest.mark.parametrize("is_repository", [False, True])
def test_a_folder_that_cannot_be_read_is_named(is_repository: bool) -> None:
    with nobodys_folder() as root:
        plant(root, {"locked/a": "", "b": ""})
        if is_repository:
            git(root, "init", "-q")
        (root / "locked").chmod(0)
        with pytest.raises(ConfigError, match="locked"):
            listed(root)
        (root / "locked").chmod(0o755)


def test_an_ignore_file_that_cannot_be_read_is_an_error() -> None:
    with nobodys_folder() as root:
        plant(root, {".gitignore": "secret\n", "secret": ""})
        (root / ".gitignore").chmod(0)
        with pytest.raises(ConfigError, match=r"cannot read the ignore file .*\.gitignore"):
            listed(root)
