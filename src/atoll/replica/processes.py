"""Processes of a run, found in /proc by the label in their environment. Linux only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from atoll.context import LABEL, SPOOL

PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1
_PF_EXITING = 0x4


def labelled(variable: str = LABEL) -> Iterator[tuple[int, str]]:
    """Every running process with an Atoll label, and the label. Zombies and other users' processes are left out.

    Another variable is searched in the same way. A process has it only if it was executed with it, not only forked.
    """
    mark = f"{variable}=".encode()
    for entry in os.scandir(PROC):
        if not entry.name.isdecimal():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        for pair in environment.split(b"\0"):
            if pair.startswith(mark) and not is_dead(int(entry.name)):
                yield int(entry.name), os.fsdecode(pair[len(mark) :])
                break


def of_label(label: str, *, but: frozenset[int] = frozenset()) -> list[int]:
    """Pids of the running processes with this label."""
    return [pid for pid, found in labelled() if found == label and pid not in but]


def is_dead(pid: int) -> bool:
    """Whether the process is gone, or a zombie."""
    stat = _stat(pid)
    return not stat or stat[0] in (b"Z", b"X", b"x")


def is_exiting(pid: int) -> bool:
    """Whether the kernel is ending the process: it has no environment any more, but may still hold files and ports."""
    stat = _stat(pid)
    return not is_dead(pid) and bool(stat) and bool(int(stat[6]) & _PF_EXITING)


def _stat(pid: int) -> list[bytes]:
    """The words of /proc/PID/stat after the name; none if the process is gone."""
    try:
        return (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def below(folders: Collection[Path]) -> list[int]:
    """Pids of the running processes that replicas have executed whose attempts are in these folders."""
    return [pid for pid, found in labelled(SPOOL) if Path(found).parent in folders]


def kill_all(label: str, *, but: frozenset[int] = frozenset()) -> list[int]:
    """Kill every process with the label, repeatedly. Returns the pids that are left after some seconds."""
    return kill_found(lambda: of_label(label, but=but | {os.getpid()}))


def kill_found(find: Callable[[], list[int]], *, within_s: float = 10.0) -> list[int]:
    """Kill every process that `find` returns, until all are dead. Returns those that are left after `within_s`."""
    deadline = time.monotonic() + within_s
    seen: set[int] = set()
    while left := sorted({*find(), *filter(is_exiting, seen)}):
        seen.update(left)
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


def stop_with_parent(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when its parent dies, or exit if it is dead already."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the process that joined the run has ended")


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
