"""Programs that a fixture starts: on free ports, with a log file, killed by the kernel when their parent ends."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CHOSEN = Path(tempfile.gettempdir()) / f"atoll-test-ports-{os.getuid()}"
_CHOSEN_S = 600
"""How long a port stays chosen: a cluster uses some of its ports only a minute after it has chosen them."""


def free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to clients, so that no connection takes one before the server does.

    Other processes of the tests do not get the same ones, also before a server uses them.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if _choose(port):
                ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"fewer than {count} free ports")


def _choose(port: int) -> bool:
    """Whether no other process has chosen this port lately. Only one can listen on it, and so call this, at a time."""
    _CHOSEN.mkdir(exist_ok=True)
    mark = _CHOSEN / str(port)
    is_free = not mark.exists() or time.time() - mark.stat().st_mtime > _CHOSEN_S
    if is_free:
        mark.touch()
    return is_free


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


_DIE_WITH_PARENT = """
import ctypes, os, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""


@contextmanager
def running(command: list[str], *, log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the block ends. The kernel kills it if this process ends first."""
    command = [sys.executable, "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent, env=env
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_until(
    is_ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, timeout_s: float = 60
) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{process.args!r} did not come up:\n{tail}")
        time.sleep(0.1)
