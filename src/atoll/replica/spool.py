"""The spool: a folder through which shepherd, scribe, replicas and the local executor tell each other things.

    plan.json     what to run; written once, before anything starts
    lock          held by the living shepherd; the kernel lets go when it dies, so no pid is ever trusted
    status.json   the shepherd's table of ranks
    cancel        there as soon as somebody asked the run to stop
    diary.log     what shepherd and scribe have to say
    ballast       thrown away when the disk is full, so that the end of the run can still be written
    00003/000/    one attempt of one rank: log, progress.json, outcome.json, result.json

This module is the only one that knows these names.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from pathlib import Path
from typing import Any

_FLOCK = "hhqqi4x"  # struct flock on 64-bit Linux: type, whence, start, length, pid


class Spool:
    """The folder of one run on one machine."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.plan = self.root / "plan.json"
        self.status = self.root / "status.json"
        self.cancel = self.root / "cancel"
        self.diary = self.root / "diary.log"
        self.ballast = self.root / "ballast"
        self._lock = self.root / "lock"

    def attempt(self, rank: int, attempt: int) -> Attempt:
        return Attempt(self.root / f"{rank:05d}" / f"{attempt:03d}")

    def attempts(self, rank: int) -> list[int]:
        """Attempts of a rank that have begun, oldest first."""
        folder = self.root / f"{rank:05d}"
        return sorted(int(entry.name) for entry in folder.iterdir()) if folder.is_dir() else []

    def hold(self) -> bool:
        """Become the shepherd of this run, for as long as this process lives. False if another one is."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        return True  # the descriptor stays open: closing any of them would let the lock go

    def holder(self) -> int | None:
        """The pid of the living shepherd, from the kernel, or None."""
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
        finally:
            os.close(descriptor)
        return None if kind == fcntl.F_UNLCK else int(pid)


class Attempt:
    """The folder of one attempt of one rank."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spool = root.parents[1]
        self.log = root / "log"
        self.progress = root / "progress.json"
        self.outcome = root / "outcome.json"
        self.result = root / "result.json"


def write_at_any_price(spool: Spool, path: Path, value: Any) -> None:
    """As `write_json`; when the disk is full, throw away the ballast and try once more."""
    try:
        write_json(path, value)
    except OSError:
        spool.ballast.unlink(missing_ok=True)
        write_json(path, value)


def write_json(path: Path, value: Any) -> None:
    """Replace the file in one step, so that a reader sees the old or the new text."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open(fresh, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, separators=(",", ":"))
    os.replace(fresh, path)


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file that user code can reach; an empty one if it is absent, torn or something else."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_json(path: Path) -> Any:
    """The file's value, or None if there is no file."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
