"""The files of a folder that belong in a bundle: listed by git in a repository, else found by a walk.

Git's list and the walk give the same files: `Ignore` reads `.gitignore` files and matches paths byte for byte as git
does (`docs/decisions/0007-ignore-patterns.md` compares git, `pathspec` and this module; tests compare it with git).
`.atollignore` has the same syntax and applies to both.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

from atoll.disk import is_store
from atoll.errors import ConfigError

OWN_IGNORE_FILE = b".atollignore"
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
_TIMEOUT_S = 300.0
# Set inside git hooks and by some tools: git would list another repository.
_MISLEADING = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_NAMESPACE"}
_MISLEADING |= {"GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CEILING_DIRECTORIES"}
_SPECIAL = re.compile(rb"[*?\[\\]")
_ASCII = [chr(code) for code in range(128)]
_CLASSES = {
    b"alnum": {c for c in _ASCII if c.isalnum()},
    b"alpha": {c for c in _ASCII if c.isalpha()},
    b"blank": {" ", "\t"},
    b"cntrl": {c for c in _ASCII if not c.isprintable()},
    b"digit": {c for c in _ASCII if c.isdigit()},
    b"graph": {c for c in _ASCII if c.isprintable() and c != " "},
    b"lower": {c for c in _ASCII if c.islower()},
    b"print": {c for c in _ASCII if c.isprintable()},
    b"punct": {c for c in _ASCII if c.isprintable() and c != " " and not c.isalnum()},
    b"space": {" ", "\t", "\n", "\r"},
    b"upper": {c for c in _ASCII if c.isupper()},
    b"xdigit": set("0123456789abcdefABCDEF"),
}


@dataclass(frozen=True)
class Listing:
    """Sorted paths relative to the folder; `notes` are for the user."""

    paths: tuple[bytes, ...]
    source: str
    """`git` or `walk`."""
    notes: tuple[str, ...] = ()


def list_files(root: bytes, *, at_most: int, without: Collection[bytes] = ()) -> Listing:
    """Every file and link under `root` (absolute, real) that no ignore rule excludes; a walk stops after `at_most`.

    `without` are folders under `root`, as relative paths, that are left out with all that they contain, and so are
    folders with a store of runs.
    """
    from shutil import which

    left_out = _LeftOut(root, without)
    own = Ignore(root, OWN_IGNORE_FILE, like_git=False)
    top = work_tree_of(root)
    if top is not None and (git := which("git")):
        paths, notes = tracked_and_untracked(git, root, own)
        listed = sorted(path for path in paths if path not in left_out)
        return Listing(tuple(listed), "git", (*notes, *left_out.notes()))
    missing = "git is not on PATH, so tracked files that .gitignore names are left out"
    found = sorted(islice((path for path in walk(root, top or root, own) if path not in left_out), at_most))
    return Listing(tuple(found), "walk", (*((missing,) if top else ()), *left_out.notes()))


class _LeftOut:
    """The paths in some folders under `root`, and in stores there, whose content changes with every run."""

    def __init__(self, root: bytes, folders: Collection[bytes]) -> None:
        self._root, self._hidden = root, tuple(folder + b"/" for folder in folders)
        self._is_store: dict[bytes, bool] = {}

    def __contains__(self, path: bytes) -> bool:
        if path.startswith(self._hidden):
            return True
        above = accumulate(path.split(b"/")[:-1], lambda outer, name: outer + b"/" + name)
        return any(self._has_mark(folder) for folder in above)

    def _has_mark(self, folder: bytes) -> bool:
        if folder not in self._is_store:
            self._is_store[folder] = is_store(os.fsdecode(os.path.join(self._root, folder)))
        return self._is_store[folder]

    def notes(self) -> list[str]:
        found = sorted(os.fsdecode(folder) for folder, is_one in self._is_store.items() if is_one)
        return [f"`{folder}` is a store of runs, and is not sent" for folder in found]


def walk(root: bytes, top: bytes, own: Ignore) -> Iterator[bytes]:
    """Every file and link under `root` that neither `own` nor a .gitignore file from `top` down excludes."""
    rules = Ignore(top, b".gitignore", like_git=True)
    prefix = b"" if root == top else os.path.relpath(root, top) + b"/"
    folders = [b""]
    while folders:
        folder = folders.pop()
        for entry in _entries(os.path.join(root, folder)):
            path = os.path.join(folder, entry.name)
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name == b".git" or rules.excludes(prefix + path, is_folder=is_folder):
                continue
            if own.excludes(path, is_folder=is_folder):
                continue
            if is_folder:
                folders.append(path)
            else:
                yield path


def _entries(folder: bytes) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []  # removed since its parent was read
    except OSError as exc:
        raise ConfigError(
            f"cannot read the folder `{os.fsdecode(folder)}`: {exc.strerror}",
            hint="make it readable, or name it in .gitignore or .atollignore",
        ) from exc


def is_repository(folder: bytes) -> bool:
    """True if `folder` is the top of a git work tree: a clone, a linked work tree or a checked-out submodule."""
    return git_folder(folder) is not None


def git_folder(folder: bytes) -> bytes | None:
    """The git folder (`.git`) of the work tree at `folder`, or None."""
    place = os.path.join(folder, b".git")
    if os.path.isfile(place):
        place = os.path.join(folder, _pointed_to(place))
    has_objects = os.path.isdir(os.path.join(place, b"objects")) and os.path.isdir(os.path.join(place, b"refs"))
    is_linked = os.path.isfile(os.path.join(place, b"commondir"))
    return place if os.path.lexists(os.path.join(place, b"HEAD")) and (has_objects or is_linked) else None


def work_tree_of(folder: bytes) -> bytes | None:
    """The nearest work tree that contains `folder` (an absolute path), or None."""
    while not is_repository(folder):
        parent = os.path.dirname(folder)
        if parent == folder:
            return None
        folder = parent
    return folder


def _pointed_to(file: bytes) -> bytes:
    try:
        with open(file, "rb") as opened:
            text = opened.read(8192)
    except OSError:
        return b"."
    return text.removeprefix(b"gitdir:").strip() if text.startswith(b"gitdir:") else b"."


def tracked_and_untracked(git: str, root: bytes, own: Ignore) -> tuple[set[bytes], list[str]]:
    """The existing paths that git lists and `own` does not exclude, also in submodules and nested repositories."""
    paths: set[bytes] = set()
    notes: list[str] = []
    real_folders: dict[bytes, bool] = {}
    repositories = [b""]
    while repositories:
        prefix = repositories.pop()
        listed, said = _ls_files(git, os.path.join(root, prefix), "--cached", "--others", "--exclude-standard")
        notes += said
        odd = []
        for path in {prefix + name.rstrip(b"/") for name in listed}:
            mode = _mode(root, path, real_folders)
            if mode is None or own.excludes(path, is_folder=stat.S_ISDIR(mode)):
                continue
            if not stat.S_ISDIR(mode):
                paths.add(path)
            elif is_repository(os.path.join(root, path)):
                repositories.append(path + b"/")
            else:
                odd.append(path)
        notes += _without_repository(git, root, prefix, odd)
    return paths, notes


def _mode(root: bytes, path: bytes, real_folders: dict[bytes, bool]) -> int | None:
    """The mode of the file at `path`; None if it does not exist or is reached through a link."""
    parent = os.path.dirname(os.path.join(root, path))
    if parent not in real_folders:
        real_folders[parent] = os.path.realpath(parent) == parent
    if not real_folders[parent]:
        return None
    try:
        return os.lstat(os.path.join(root, path)).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise ConfigError(f"cannot read `{os.fsdecode(path)}`: {exc.strerror}") from exc


def _without_repository(git: str, root: bytes, prefix: bytes, folders: list[bytes]) -> list[str]:
    """Notes about folders that git lists as one entry: submodules without repository, files replaced by a folder."""
    if not folders:
        return []
    staged, _ = _ls_files(git, os.path.join(root, prefix), "--stage")
    submodules = {prefix + line.partition(b"\t")[2] for line in staged if line.startswith(b"160000 ")}
    notes = []
    for folder in sorted(submodules.intersection(folders)):
        name = os.fsdecode(folder)
        if os.listdir(os.path.join(root, folder)):
            raise ConfigError(
                f"`{name}` is a git submodule without its own repository, so git cannot list its files",
                hint=f"git submodule update --init {name}, or name it in .atollignore",
            )
        notes.append(f"`{name}` is a git submodule that is not checked out: nothing of it is sent")
    return notes


def _ls_files(git: str, folder: bytes, *options: str) -> tuple[list[bytes], list[str]]:
    """The output of `git ls-files` in `folder`, and its warnings."""
    import subprocess

    # fsmonitor is a command that the repository chooses; listing files must not run it
    command = [git, "-c", "core.fsmonitor=false", "ls-files", "-z", *options]
    environment = {name: value for name, value in os.environ.items() if name not in _MISLEADING} | {"LC_ALL": "C"}
    shown = os.fsdecode(folder.rstrip(b"/"))
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigError(f"cannot run git in `{shown}`: {exc}") from exc
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode or "could not open directory" in said:
        raise ConfigError(f"git cannot list the files of `{shown}`: {said or f'exit code {done.returncode}'}")
    return done.stdout.split(b"\0")[:-1], [f"git: {line}" for line in said.splitlines()]


@dataclass(frozen=True)
class _Layer:
    """The patterns of one ignore file, last line first, and the length of the path of its folder."""

    above: int
    patterns: tuple[Pattern, ...]


class Ignore:
    """The rules of every file called `filename` in the folder `top` and below.

    `like_git` reads them as git does: not through links, with `info/exclude`, and without outer rules in a nested
    repository.
    """

    def __init__(self, top: bytes, filename: bytes, *, like_git: bool) -> None:
        self._top, self._filename, self._like_git = top, filename, like_git
        self._folders: dict[bytes, tuple[_Layer, ...] | None] = {}

    def excludes(self, path: bytes, *, is_folder: bool) -> bool:
        """True if a rule excludes `path` (relative to the top) or a folder above it."""
        layers = self._layers(path.rpartition(b"/")[0])
        return layers is None or _is_excluded(layers, path, is_folder)

    def _layers(self, folder: bytes) -> tuple[_Layer, ...] | None:
        """The rules inside `folder`; None if the folder is excluded, because then no rule can include a path in it."""
        if folder not in self._folders:
            self._folders[folder] = self._read_layers(folder)
        return self._folders[folder]

    def _read_layers(self, folder: bytes) -> tuple[_Layer, ...] | None:
        outer = self._layers(folder.rpartition(b"/")[0]) if folder else ()
        if outer is None or (folder and _is_excluded(outer, folder, True)):
            return None
        place = os.path.join(self._top, folder)
        sources = [os.path.join(place, self._filename)]
        if self._like_git and (inside := git_folder(place)):
            outer, sources = (), [os.path.join(inside, b"info", b"exclude"), *sources]
        above = len(folder) + 1 if folder else 0
        read = (parse(_content(source, follow=not self._like_git)) for source in sources)
        return outer + tuple(_Layer(above, tuple(reversed(patterns))) for patterns in read if patterns)


def _is_excluded(layers: tuple[_Layer, ...], path: bytes, is_folder: bool) -> bool:
    name = path.rpartition(b"/")[2]
    for layer in reversed(layers):
        below = path[layer.above :]
        for pattern in layer.patterns:
            if pattern.folders_only and not is_folder:
                continue
            if pattern.matches(name if pattern.by_name else below):
                return not pattern.is_negated
    return False


def _content(file: bytes, *, follow: bool) -> bytes:
    """The bytes of an ignore file; empty if it is not a regular file."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
        with os.fdopen(handle, "rb") as opened:
            return opened.read() if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    except OSError as exc:
        if exc.errno in (*_NO_FILE, errno.EISDIR):
            return b""
        raise ConfigError(f"cannot read the ignore file `{os.fsdecode(file)}`: {exc.strerror}") from exc


class _NeverMatches(Exception):
    """The pattern is malformed; in git it matches nothing."""


@dataclass(frozen=True)
class Pattern:
    """One line. The last pattern that matches a path decides."""

    is_negated: bool
    """The line began with `!`: paths that match it are not ignored."""
    folders_only: bool
    by_name: bool
    """`matches` takes the last part of the path; otherwise the path relative to the folder of the ignore file."""
    matches: Callable[[bytes], object]


def parse(text: bytes) -> list[Pattern]:
    """The patterns of an ignore file, in order, without lines that match nothing."""
    patterns = []
    for line in text.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if line.startswith(b"#"):
            continue
        line = _without_trailing_spaces(line.removesuffix(b"\r").partition(b"\0")[0])
        try:
            patterns.append(_pattern(line))
        except _NeverMatches:
            continue
    return patterns


def _without_trailing_spaces(line: bytes) -> bytes:
    at = keep = 0
    while at < len(line):
        width = 2 if line[at : at + 1] == b"\\" else 1
        if line[at : at + 1] != b" ":
            keep = at + width
        at += width
    return line[:keep]


def _pattern(line: bytes) -> Pattern:
    body = line.removeprefix(b"!")
    path = body.removesuffix(b"/")
    glob = path.removeprefix(b"/")
    if not glob:
        raise _NeverMatches
    by_name = b"/" not in path
    return Pattern(line.startswith(b"!"), body.endswith(b"/"), by_name, _matcher(glob, by_name))


def _matcher(glob: bytes, by_name: bool) -> Callable[[bytes], object]:
    special = _SPECIAL.search(glob)
    if special is None:
        return lambda path: path == glob
    if by_name and glob.startswith(b"*") and not _SPECIAL.search(glob, 1):
        tail = glob[1:]
        return lambda name: name.endswith(tail)
    # git compares the plain beginning first and globs only the rest, so `**` right after it is a leading `**`
    plain, rest = glob[: special.start()], glob[special.start() :]
    return re.compile(re.escape(plain) + _regex(rest), re.DOTALL).fullmatch


def _regex(glob: bytes) -> bytes:
    out, at = [], 0
    while at < len(glob):
        char = glob[at : at + 1]
        if char == b"*":
            piece, at = _stars(glob, at)
        elif char == b"[":
            piece, at = _bracket(glob, at + 1)
        elif char == b"?":
            piece, at = b"[^/]", at + 1
        else:
            at += char == b"\\"
            if at == len(glob):
                raise _NeverMatches
            piece, at = re.escape(glob[at : at + 1]), at + 1
        out.append(piece)
    return b"".join(out)


def _stars(glob: bytes, start: int) -> tuple[bytes, int]:
    end = start
    while glob[end : end + 1] == b"*":
        end += 1
    after = glob[end : end + 2]
    starts_part = start == 0 or glob[start - 1 : start] == b"/"
    ends_part = after[:1] in (b"", b"/") or after == b"\\/"
    if end - start < 2 or not (starts_part and ends_part):
        return b"[^/]*", end
    return (rb"(?:.*/)?", end + 1) if after[:1] == b"/" else (b".*", end)


def _bracket(glob: bytes, at: int) -> tuple[bytes, int]:
    """The regex for the set that starts at `at`, and where it ends."""
    is_negated = glob[at : at + 1] in (b"!", b"^")
    at += is_negated
    members: set[int] = set()
    previous: int | None = None
    first = at
    while (char := glob[at : at + 1]) != b"]" or at == first:
        if char == b"\\":
            at += 1
        elif char == b"-" and previous is not None and glob[at + 1 : at + 2] not in (b"", b"]"):
            at += 2 if glob[at + 1 : at + 2] == b"\\" else 1
            members.update(range(previous, _byte(glob, at) + 1))
            previous, at = None, at + 1
            continue
        elif glob[at : at + 2] == b"[:" and (named := _named_class(glob, at + 2)) is not None:
            members |= named
            previous, at = None, glob.index(b"]", at) + 1
            continue
        previous = _byte(glob, at)
        members.add(previous)
        at += 1
    allowed = (set(range(256)) - members if is_negated else members) - {ord("/")}
    listed = b"".join(rb"\x%02x" % code for code in sorted(allowed))
    return (b"[" + listed + b"]" if listed else b"(?!)"), at + 1


def _byte(glob: bytes, at: int) -> int:
    if at >= len(glob):
        raise _NeverMatches
    return glob[at]


def _named_class(glob: bytes, at: int) -> set[int] | None:
    """The members of `[:name:]`, or None when this is a plain `[` followed by `:`."""
    name, close, _ = glob[at:].partition(b"]")
    if not close:
        raise _NeverMatches
    if not name.endswith(b":"):
        return None
    if (members := _CLASSES.get(name[:-1])) is None:
        raise _NeverMatches
    return {ord(c) for c in members}
