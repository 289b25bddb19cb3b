"""Processes of a run, found in /proc by the label in their environment. Linux only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from atoll.context import LABEL

PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36


def labelled() -> Iterator[tuple[int, str]]:
    """Every running process with an Atoll label, and the label. Zombies and other users' processes are left out."""
    mark = f"{LABEL}=".encode()
    for entry in os.scandir(PROC):
        if not entry.name.isdecimal():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        for variable in environment.split(b"\0"):
            if variable.startswith(mark) and not is_dead(int(entry.name)):
                yield int(entry.name), os.fsdecode(variable[len(mark) :])
                break


def of_label(label: str, *, but: frozenset[int] = frozenset()) -> list[int]:
    """Pids of the running processes with this label."""
    return [pid for pid, found in labelled() if found == label and pid not in but]


def is_dead(pid: int) -> bool:
    """Whether the process is gone, or a zombie."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return True
    return stat.rpartition(b")")[2].split()[0] in (b"Z", b"X", b"x")


def kill_all(label: str, *, but: frozenset[int] = frozenset(), within_s: float = 10.0) -> list[int]:
    """Kill every process with the label, repeatedly. Returns the pids that are left after `within_s`."""
    deadline = time.monotonic() + within_s
    while left := of_label(label, but=but | {os.getpid()}):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return []


def adopt_orphans() -> None:
    """Make each orphaned descendant a child of this process, so `kill_children` finds it even without a label."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children() -> None:
    """Kill all children, adopted ones included, until none is left."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        for pid in (PROC / "self" / "task" / str(os.getpid()) / "children").read_text().split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.002)


def oom_kills() -> int:
    """How many processes of this control group the kernel has killed for lack of memory."""
    for file in _memory_events():
        try:
            text = file.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _memory_events() -> Iterator[Path]:
    try:
        groups = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield Path("/sys/fs/cgroup" + path) / "memory.events"
        elif controllers == "memory":
            yield Path("/sys/fs/cgroup/memory" + path) / "memory.oom_control"
