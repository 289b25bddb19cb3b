"""Processes of containers: each in a session of its own, and found again by a variable in its environment.

As in a container, only the first process gets a signal, and when it ends, everything that it started is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from services.kubernetes.kubelet.logs import Log, Watcher

MARK = "KUBELET_CONTAINER"
"""The variable: `KUBELET/CONTAINER`, where the first part names the kubelet and the second the container."""
_MOUNTS = Path(__file__).with_name("mounts.py")
_REAPER = """
import sys
from services.kubernetes.kubelet.names import release
from services.kubernetes.kubelet.process import kill_marked
sys.stdin.read()  # until the kubelet has ended, however it ended
kill_marked(sys.argv[1])
if sys.argv[2]:
    release(sys.argv[2])
"""


class CannotStart(Exception):
    """The command cannot be executed."""


class Process:
    """The first process of a container. `on_exit` is called by the watcher's thread with the exit code."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        mark: str,
        log: Log,
        watcher: Watcher,
        on_exit: Callable[[int], None],
        *,
        folder: Path,
        mounts: list[tuple[str, str, bool]],
        hostname: str = "",
    ) -> None:
        """With a `hostname` the process is on a host of that name."""
        self._mark = mark
        self._on_exit = on_exit
        output, inner_output = os.pipe()
        try:
            self._process = _spawn(command, {**env, MARK: mark}, inner_output, folder, mounts, hostname)
        except (CannotStart, OSError) as exc:
            os.close(output)
            log.close()
            raise CannotStart(str(exc)) from exc
        finally:
            os.close(inner_output)
        self.pid = self._process.pid
        watcher.add(output, lambda: _pump(output, log))
        watcher.add(os.pidfd_open(self.pid), self._ended)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _ended(self) -> bool:
        code = self._process.wait()
        kill_marked(self._mark)
        self._on_exit(code if code >= 0 else 128 - code)
        return True


def start_reaper(kubelet: str, addresses: str = "") -> subprocess.Popen[bytes]:
    """A process that kills all containers of this kubelet, and releases its addresses, when the kubelet ends."""
    command = [sys.executable, "-c", _REAPER, f"{kubelet}/", addresses]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def kill_marked(mark: str) -> None:
    """Kill every process whose mark starts so, until there is none: one of them may start another meanwhile."""
    wanted = f"{MARK}={mark}".encode()
    while found := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_mark(pid, wanted)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def can_mount(folder: Path) -> bool:
    """Whether this user may make mounts that only one process sees."""
    source = folder / "try-mount"
    source.mkdir(parents=True, exist_ok=True)
    (source / "file").touch()
    target = "/atoll-kubelet-mount"
    read, write = os.pipe()
    try:
        process = _spawn(
            ["test", "-e", f"{target}/file"], dict(os.environ), write, folder, [(str(source), target, True)]
        )
        return process.wait() == 0
    except CannotStart:
        return False
    finally:
        os.close(read)
        os.close(write)


def _spawn(
    command: list[str],
    env: dict[str, str],
    output: int,
    folder: Path,
    mounts: list[tuple[str, str, bool]],
    hostname: str = "",
) -> subprocess.Popen[bytes]:
    if not mounts:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                cwd=folder, start_new_session=True)  # fmt: skip
    problem, inner_problem = os.pipe()
    spec = {"mounts": mounts, "command": command, "problem": inner_problem, "root": str(folder / "root"),
            "hostname": hostname}  # fmt: skip
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_MOUNTS), json.dumps(spec)],
            env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, start_new_session=True,
            pass_fds=[inner_problem],
        )  # fmt: skip
    finally:
        os.close(inner_problem)
    with open(problem, "rb") as file:
        message = file.read().decode()
    if message:
        process.wait()
        raise CannotStart(message)
    return process


def _pump(descriptor: int, log: Log) -> bool:
    data = os.read(descriptor, 65536)
    if data:
        log.append(data)
    else:
        log.close()
    return not data


def _has_mark(pid: int, wanted: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return environment.startswith(wanted) or b"\0" + wanted in environment
