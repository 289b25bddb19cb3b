"""Which files are sent: our own reading of ignore files against git itself, and what git alone knows."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.workspace.git import tracked_and_untracked
from atoll.workspace.ignore import Ignore
from atoll.workspace.listing import OWN_IGNORE_FILE, Listing, list_files, walk

FILES = [
    "a",
    "b.py",
    "c.log",
    "keep",
    "build/a",
    "build/keep",
    "d/a",
    "d/b.py",
    "d/e/a",
    "d/e/keep",
    "d/e/f/a",
    "d/build/x",
    "é/b.py",
]


@pytest.fixture(autouse=True)
def _plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the person who runs the tests, and none of a hook they run in."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    git(root, "init", "-q")
    return root


def git(root: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    return subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True, text=True).stdout


def plant(root: Path, tree: Mapping[str, str | bytes]) -> None:
    for path, content in tree.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)


def clear(root: Path) -> None:
    for entry in root.iterdir():
        if entry.name == ".git":
            continue
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def by_git(root: Path) -> set[str]:
    place = os.fsencode(root)
    paths, _ = tracked_and_untracked("git", place, Ignore(place, OWN_IGNORE_FILE, like_git=False))
    return {os.fsdecode(path) for path in paths}


def by_walk(root: Path) -> set[str]:
    place = os.fsencode(root)
    return {os.fsdecode(path) for path in walk(place, place, Ignore(place, OWN_IGNORE_FILE, like_git=False))}


def listed(root: Path) -> Listing:
    return list_files(os.fsencode(os.path.realpath(root)), at_most=10_000)


def names(root: Path) -> set[str]:
    return {os.fsdecode(path) for path in listed(root).paths}


AGREEMENT = {
    "a name anywhere": {".gitignore": "a\n"},
    "a name at the top": {".gitignore": "/a\n"},
    "a name below a folder is anchored": {".gitignore": "d/a\n"},
    "only folders": {".gitignore": "build/\n"},
    "only folders, anchored": {".gitignore": "/build/\n"},
    "a file is no folder": {".gitignore": "a/\nkeep/\n"},
    "a suffix": {".gitignore": "*.log\n*.py\n"},
    "a suffix taken back": {".gitignore": "*.py\n!d/b.py\n"},
    "taken back in a folder": {".gitignore": "*.py\n", "d/.gitignore": "!b.py\n"},
    "ignored again below": {".gitignore": "!a\n", "d/.gitignore": "a\n"},
    "nothing returns from an ignored folder": {".gitignore": "build\n!build/keep\n!keep\n"},
    "but from an ignored content it does": {".gitignore": "build/*\n!build/keep\n"},
    "and from a deep content": {".gitignore": "d/**\n!d/e/\n!d/e/keep\n"},
    "a nested file cannot free its own folder": {".gitignore": "d/\n", "d/.gitignore": "!*\n"},
    "everything but python": {".gitignore": "*\n!*/\n!*.py\n"},
    "everything at the top but one": {".gitignore": "/*\n!/d\n"},
    "everything but the folders": {".gitignore": "/*\n!*/\n"},
    "leading stars": {".gitignore": "**/e\n"},
    "inner stars": {".gitignore": "d/**/a\n"},
    "trailing stars": {".gitignore": "d/**\n"},
    "stars inside a name": {".gitignore": "d**/a\n"},
    "stars glued to a name": {".gitignore": "b**d/a\n"},
    "one star stays in its folder": {".gitignore": "d/*/a\nd/*a\n"},
    "a question mark is one byte": {".gitignore": "?/b.py\n"},
    "two bytes of unicode": {".gitignore": "??/b.py\n"},
    "sets": {".gitignore": "[ab]\n[!a-c]eep\n"},
    "set with a bracket first": {".gitignore": "[]a]\n"},
    "a set never matches a slash": {".gitignore": "/d[!x]a\n/d[^x]b.py\n"},
    "an escaped slash after stars": {".gitignore": "d/**\\/a\n"},
    "named sets": {".gitignore": "[[:alpha:]]\n[[:nope:]]eep\n"},
    "an open set matches nothing": {".gitignore": "[a\n"},
    "escapes": {".gitignore": "\\a\nkee\\p\n\\*.py\n"},
    "escape at the end matches nothing": {".gitignore": "a\\\n"},
    "comments and blank lines": {".gitignore": "#a\n\n   \n\\#a\n!\n/\n//\n"},
    "spaces at the end": {".gitignore": "a  \nb.py\\ \n"},
    "a tab at the end counts": {".gitignore": "a\t\n"},
    "windows lines": {".gitignore": "a\r\nbuild/\r\n"},
    "no newline at the end": {".gitignore": "a"},
    "a byte order mark": {".gitignore": b"\xef\xbb\xbfa\n"},
    "a nul byte": {".gitignore": b"a\0b\nkeep\n"},
    "case counts": {".gitignore": "KEEP\nBuild/\n"},
    "the ignore file itself": {".gitignore": ".gitignore\na\n"},
    "odd names": {".gitignore": "\\!x\n\\ y\n", "!x": "", " y": "", "z ": "", "#h": "", "a\nb": ""},
    "the last line wins": {".gitignore": "a\n!a\na\n!a\n"},
    "our own file as well": {".gitignore": "a\n", ".atollignore": "build/\n!a\n*.log\n"},
    "our own file in a folder": {"d/.atollignore": "/e\n!b.py\n", ".atollignore": "*.py\n"},
}


@pytest.mark.parametrize("rules", AGREEMENT.values(), ids=AGREEMENT.keys())
def test_walking_agrees_with_git(repository: Path, rules: Mapping[str, str | bytes]) -> None:
    clear(repository)
    plant(repository, dict.fromkeys(FILES, "") | dict(rules))
    assert by_walk(repository) == by_git(repository)


_NAMES = st.sampled_from(
    ["a", "b", "ab", "a.b", "foo", "bar", "a b", "a ", "#a", "!a", "[a]", "a\\b", "é", "A", "-", "]", "*"]
)
_SHAPES = """
a b foo bar * ** ? [ab] [!a] [^b] [a-c] [[:alpha:]] []] []-] [a \\a \\* / / / **/ /** . [[:x:]] [a-] [\\]] - é [é] ***
[[:] A [--a] [!]a] ! # \\ [a-\\c]
"""
_USUAL = """
* !*/ !*.b foo foo/ !foo !foo/ /foo foo/* foo/** !foo/bar **/foo a/**/b *.b bar/ a* /* !/foo !a a**/b ** !**/
"""
_PIECES = st.sampled_from([*_SHAPES.split(), " ", "\\ "])
_COMMON = st.sampled_from(_USUAL.split())
_LINES = st.tuples(
    st.sampled_from(["", "", "", "!", "/"]),
    st.lists(_PIECES, min_size=1, max_size=5),
    st.sampled_from(["", "", "/", " ", "\r"]),
).map(lambda parts: parts[0] + "".join(parts[1]) + parts[2])
_RULES = st.lists(_COMMON | _LINES, min_size=1, max_size=5).map("\n".join)
_PATHS = st.lists(_NAMES, min_size=1, max_size=4).map("/".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    paths=st.lists(_PATHS, min_size=3, max_size=14),
    rules=st.lists(st.tuples(st.integers(0, 99), _RULES), min_size=1, max_size=3),
)
def test_walking_agrees_with_git_on_any_tree(repository: Path, paths: list[str], rules: list[tuple[int, str]]) -> None:
    clear(repository)
    for path in paths:
        try:
            plant(repository, {path: ""})
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue  # the same name as a file and as a folder
    folders = sorted(folder for folder, *_ in os.walk(repository) if "/.git" not in folder)
    for number, text in rules:
        Path(folders[number % len(folders)], ".gitignore").write_text(text, newline="")
    assert by_walk(repository) == by_git(repository)


def test_the_agreement_table_has_rules_that_bite(repository: Path) -> None:
    clear(repository)
    plant(repository, dict.fromkeys(FILES, "") | {".gitignore": "*\n!*/\n!*.py\n"})
    assert by_git(repository) == {"b.py", "d/b.py", "é/b.py"}


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


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Root reads everything, so give up being root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("is_repository", [False, True])
def test_a_folder_that_cannot_be_read_is_named(open_tmp: Path, is_repository: bool, as_nobody: None) -> None:
    plant(open_tmp, {"locked/a": "", "b": ""})
    if is_repository:
        git(open_tmp, "init", "-q")
    (open_tmp / "locked").chmod(0)
    try:
        with pytest.raises(ConfigError, match="locked"):
            listed(open_tmp)
    finally:
        (open_tmp / "locked").chmod(0o755)


def test_an_ignore_file_that_cannot_be_read_is_an_error(open_tmp: Path, as_nobody: None) -> None:
    plant(open_tmp, {".gitignore": "secret\n", "secret": ""})
    (open_tmp / ".gitignore").chmod(0)
    with pytest.raises(ConfigError, match=r"cannot read the ignore file .*\.gitignore"):
        listed(open_tmp)


@pytest.fixture
def open_tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that another user may write to; pytest's own are closed to others."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        if os.geteuid() == 0:
            os.chown(folder, 65534, -1)  # git works only in folders of its own user
        yield Path(os.path.realpath(folder))
