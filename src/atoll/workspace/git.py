"""Asking git which files of a folder count: what it tracks, and what it neither tracks nor ignores."""

from __future__ import annotations

import os
import stat

from atoll.errors import ConfigError
from atoll.workspace.ignore import Ignore
from atoll.workspace.repository import is_repository

_TIMEOUT_S = 300.0
# Set inside git hooks and by some tools: they would make git answer for another repository than the folder's own.
_MISLEADING = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_NAMESPACE"}
_MISLEADING |= {"GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CEILING_DIRECTORIES"}


def tracked_and_untracked(git: str, root: bytes, own: Ignore) -> tuple[set[bytes], list[str]]:
    """The paths git lists that exist and `own` does not exclude, with those of submodules and nested repositories."""
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
    """The mode of what is really at `path`; None if it is gone, or only seems there through a link above it."""
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
        raise ConfigError(f"cannot look at `{os.fsdecode(path)}`: {exc.strerror}") from exc


def _without_repository(git: str, root: bytes, prefix: bytes, folders: list[bytes]) -> list[str]:
    """Folders that git lists as one entry: submodules without a repository, or files that a folder has replaced."""
    if not folders:
        return []
    staged, _ = _ls_files(git, os.path.join(root, prefix), "--stage")
    submodules = {prefix + line.partition(b"\t")[2] for line in staged if line.startswith(b"160000 ")}
    notes = []
    for folder in sorted(submodules.intersection(folders)):
        name = os.fsdecode(folder)
        if os.listdir(os.path.join(root, folder)):
            raise ConfigError(
                f"`{name}` is a git submodule without its own repository, so git cannot say which of its files count",
                hint=f"git submodule update --init {name}, or name it in .atollignore",
            )
        notes.append(f"`{name}` is a git submodule that is not checked out: nothing of it is sent")
    return notes


def _ls_files(git: str, folder: bytes, *options: str) -> tuple[list[bytes], list[str]]:
    """What `git ls-files` prints about `folder`, and the warnings it gives."""
    import subprocess

    # fsmonitor is a command of the repository's choice; listing files should not run one
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
        raise ConfigError(f"cannot ask git about `{shown}`: {exc}") from exc
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode or "could not open directory" in said:
        raise ConfigError(f"git cannot list the files of `{shown}`: {said or f'exit code {done.returncode}'}")
    return done.stdout.split(b"\0")[:-1], [f"git: {line}" for line in said.splitlines()]
