"""A terminal for tests: a command on a pty, what it drew, and keys."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from termios import TIOCSWINSZ
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli_process import Cli

_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])")


class Terminal:
    """The far end of the pty of a running command."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.drawn = ""

    def until(self, text: str, within_s: float = 30.0) -> str:
        """Read until `text` was drawn; returns all that was drawn, without escapes."""
        deadline = time.monotonic() + within_s
        while text not in self.plain:
            assert time.monotonic() < deadline, f"{text!r} was not drawn, only …{self.plain[-1500:]!r}"
            if not self._read() and self.process.poll() is not None and not self._read():
                assert text in self.plain, f"{text!r} was not drawn, only …{self.plain[-1500:]!r}"
        return self.plain

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """What the terminal does on Ctrl-C: SIGINT to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, within_s: float = 30.0) -> int:
        """The exit code, and everything that was drawn until then."""
        deadline = time.monotonic() + within_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still going, and drew …{self.plain[-1500:]!r}"
            self._read()
        while self._read():
            continue
        return self.process.returncode

    @property
    def plain(self) -> str:
        return _ESCAPES.sub("", self.drawn)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 0.05)
        if not ready:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.drawn += data.decode("utf-8", "replace")
        return bool(data)


@contextmanager
def terminal(cli: Cli, *args: object, rows: int = 30, columns: int = 110) -> Iterator[Terminal]:
    """`atoll ARGS` on a terminal of this size."""
    master, slave = pty.openpty()
    ioctl(slave, TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {name: value for name, value in cli.env.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [cli.program, *map(str, args)],
        cwd=cli.folder,
        env={**env, "TERM": "xterm-256color"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(master)
