"""The spool: the folder of one run on one machine. Supervisor, uploader, replicas and local executor share it.

    plan.json     the supervisor's input; written once, before any process starts
    lock          locked by the running supervisor; the kernel unlocks it when the supervisor dies
    started.json  the first process of each rank and when it started; written once
    status.json   the supervisor's table of ranks
    cancel        exists as soon as the cancellation of the run was requested
    cancel-00003  the same for one rank
    diary.log     output of supervisor and uploader
    ballast       deleted when the disk is full, so that the end of the run can still be written
    00003/000/    one attempt of one rank: log, called (the entry point), progress.json, outcome.json, result.json

This module is the only one that knows these names.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.disk import MARGIN_BYTES, DiskWatch

_RESERVE_BYTES = 256 << 10
_FLOCK = "hhqqi4x"  # struct flock on 64-bit Linux: type, whence, start, length, pid


class Spool:
    """The paths of one run, and the lock of its supervisor."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.plan = self.root / "plan.json"
        self.started = self.root / "started.json"
        self.status = self.root / "status.json"
        self.cancel = self.root / "cancel"
        self.log = self.root / "diary.log"
        self.reserve = self.root / "ballast"
        self._lock = self.root / "lock"

    def cancel_rank(self, rank: int) -> Path:
        """Exists as soon as the cancellation of this rank was requested."""
        return self.root / f"cancel-{rank:05d}"

    def is_cancelled(self, rank: int) -> bool:
        """Whether the cancellation of this rank, or of the run, was requested."""
        return self.cancel.exists() or self.cancel_rank(rank).exists()

    def attempts_folder(self, rank: int) -> Path:
        """The folder of all attempts of a rank."""
        return self.root / f"{rank:05d}"

    def attempt(self, rank: int, attempt: int) -> Attempt:
        return Attempt(self, self.attempts_folder(rank) / f"{attempt:03d}")

    def attempts(self, rank: int) -> list[int]:
        """Attempts of a rank that have started, oldest first."""
        folder = self.attempts_folder(rank)
        return sorted(int(entry.name) for entry in folder.iterdir()) if folder.is_dir() else []

    def lock(self) -> bool:
        """Lock the spool for as long as this process lives. False if another supervisor has locked it."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        return True  # the descriptor stays open: closing any descriptor of the file would release the lock

    def supervisor_pid(self) -> int | None:
        """The pid of the running supervisor as the kernel reports it, or None."""
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

    def write_json(self, path: Path, value: Any) -> OSError | None:
        """Write a file as `write_json` does; if that fails, as on a full disk, delete the reserve and retry once.

        Returns the error of the first try, if there was one.
        """
        try:
            write_json(path, value)
        except OSError as exc:
            self.reserve.unlink(missing_ok=True)
            write_json(path, value)
            return exc
        return None

    def write_reserve(self) -> OSError | None:
        """Write the reserve; returns the error if it does not fit."""
        try:
            self.reserve.write_bytes(b"\0" * _RESERVE_BYTES)
        except OSError as exc:
            with suppress(OSError):
                self.reserve.unlink(missing_ok=True)
            return exc
        return None

    @property
    def lacks_reserve(self) -> bool:
        """Whether a process deleted the reserve because the disk was full; the supervisor writes it again."""
        return self.root.is_dir() and not self.reserve.exists()

    def disk_watch(self) -> DiskWatch:
        """Watches the disk of the spool; a full disk has room again when the reserve fits."""
        return DiskWatch(self.root, room_bytes=_RESERVE_BYTES + 2 * MARGIN_BYTES)


class Attempt:
    """The paths of one attempt of one rank."""

    def __init__(self, spool: Spool, root: Path) -> None:
        self.spool = spool
        self.root = root
        self.log = root / "log"
        self.called = root / "called"
        self.progress = root / "progress.json"
        self.outcome = root / "outcome.json"
        self.result = root / "result.json"


def write_json(path: Path, value: Any) -> None:
    """Replace the file atomically: a reader sees the old or the new text."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(fresh, "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False, separators=(",", ":"))
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """The file's value, or None if there is no file."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object in a file that user code can overwrite; empty if the file is absent, broken or something else."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def with_warning(outcome: dict[str, Any], warning: str) -> dict[str, Any]:
    """The record of an outcome with one more warning. User code can have overwritten it."""
    before = outcome.get("warnings")
    return {**outcome, "warnings": [*(before if isinstance(before, list) else []), warning]}
