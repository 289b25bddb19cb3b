"""Which files are sent: our own reading of ignore files against git itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workspace_trees import by_git, by_walk, clear, forget_git_settings, git, plant

pytestmark = pytest.mark.process

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
    forget_git_settings(monkeypatch)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    git(root, "init", "-q")
    return root


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
