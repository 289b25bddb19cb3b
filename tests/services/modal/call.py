"""One call of a function: its container is a process group of this machine and whatever that starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from atoll.testing.bench import processes_with
from modal._serialization import deserialize
from repository import TESTS

_TICK_S = 0.01
_MARK = "PEER_CONTAINER"
KILL_AFTER_S = 30.0
"""Modal kills a container so long after it has interrupted it."""


@dataclass(frozen=True)
class Entry:
    """One entry of a log."""

    at: float
    source: int
    """1 is stdout, 2 is stderr."""
    text: str


class Zygote:
    """The process that forks containers. Started with the first call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, request: Path, descriptors: list[int]) -> int:
        """The pid of the new container, which reads this file."""
        with self._lock:
            if self._link is None:
                self._start()
            assert self._link is not None
            socket.send_fds(self._link, [str(request).encode()], descriptors)
            return int(self._link.recv(32))

    def close(self) -> None:
        with self._lock:
            if self._link is not None and self._process is not None:
                self._link.close()
                self._process.wait()
            self._link = None

    def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="peer-")
        path = f"{folder}/zygote"
        clean = _own_variables()
        search = os.pathsep.join([str(TESTS), clean.get("PYTHONPATH", "")])
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(1)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.modal.zygote", path],
                env={**clean, "PYTHONPATH": search},
                start_new_session=True,
            )
            self._link, _ = listener.accept()
        shutil.rmtree(folder)


@dataclass
class Call:
    """PENDING, then the status of its result. `life` is the body of a thread."""

    call_id: str
    function: Any
    """The function with its bound options, as the engine has it."""
    data: bytes
    data_format: int
    variables: Mapping[str, str]
    """What the secrets of the function contain."""
    zygote: Zygote
    created_at: float = field(default_factory=time.time)
    status: str = "PENDING"
    value: Any = None
    exception: BaseException | None = None
    message: str = ""
    is_expired: bool = False
    containers: int = 0
    pid: int | None = None
    log: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.input_id = self.call_id.replace("fc-", "in-")
        self.task_id = self.call_id.replace("fc-", "ta-")
        self._wish = ""
        self._wished, self._ended = Event(), Event()
        self._killed = Event()
        self._crash_status = "FAILURE"

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()

    def cancel(self, *, terminate: bool) -> None:
        """End the call: cancel its input, or interrupt its whole container."""
        self._ask("terminate" if terminate else "cancel")

    def preempt(self, *, moves: bool = True) -> None:
        """Take its machine away; Modal moves the call to another one, or has none."""
        self._ask("move" if moves else "preempt")

    def fail_to_start(self, why: str) -> None:
        """End a call whose container Modal cannot start."""
        self.message = why
        self._ask("init_failure")

    def kill(self) -> None:
        """End it now, with the peer."""
        self._killed.set()
        self._ask("terminate")
        self._kill()

    def crash(self, status: str = "FAILURE") -> None:
        """The container is gone without a last word; Modal calls that a failure, or knows why."""
        self._crash_status = status
        self._kill()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def _ask(self, wish: str) -> None:
        self._wish = self._wish or wish
        self._wished.set()

    def life(self, admits: Event) -> None:
        while not admits.wait(_TICK_S):
            if self._wished.is_set():
                break
        self._run()
        self._ended.set()

    def _run(self) -> None:
        limit_at = time.monotonic() + self.function.timeout_s
        while True:
            if self._wish in ("cancel", "terminate", "preempt"):
                self.status, self.message = "TERMINATED", "Input was cancelled or its container was terminated"
                return
            if self._wish == "init_failure":
                self.status = "INIT_FAILURE"
                return
            self._wish = ""
            self._wished.clear()
            kind, value = self._contain(limit_at)
            if self._wish == "move":
                continue
            if self._wish == "timeout":
                self.status, self.message = "TIMEOUT", f"Task's current input hit its timeout of {limit_at}"
            elif self._wish or kind in ("cancelled", "interrupted"):
                self.status, self.message = "TERMINATED", "Input was cancelled or its container was terminated"
            elif kind == "returned":
                self.status, self.value = "SUCCESS", value
            elif kind == "raised":
                self.status, self.exception, self.message = "FAILURE", value, repr(value)
            else:
                self.status, self.message = self._crash_status, "Runner failed with exit code -9"
            return

    def _contain(self, limit_at: float) -> tuple[str, Any]:
        """Run a container: what the function did, or `crashed`."""
        self.containers += 1
        mark, scratch = uuid.uuid4().hex, tempfile.mkdtemp(prefix="peer-")
        argument = Path(scratch, "input")
        argument.write_bytes(self.data)
        pipes = [os.pipe() for _ in range(3)]
        request = {
            "environment": {**_own_variables(), **self.variables, _MARK: mark, "TMPDIR": scratch},
            "input": str(argument),
            "data_format": self.data_format,
            "module": self.function.module,
            "function": self.function.implementation or self.function.name,
            "call_id": self.call_id,
            "input_id": self.input_id,
        }
        described = Path(scratch, "request")
        described.write_text(json.dumps(request))
        self.pid = self.zygote.fork(described, [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        readers = [
            Thread(target=self._ship, args=(pipes[number][0], number + 1), daemon=True, name="peer-log")
            for number in (0, 1)
        ]
        for reader in readers:
            reader.start()
        found = self._result(pipes[2][0], limit_at)
        _clear(mark)
        for reader in readers:
            reader.join()
        shutil.rmtree(scratch, ignore_errors=True)
        self.pid = None
        return found

    def _result(self, descriptor: int, limit_at: float) -> tuple[str, Any]:
        """Read the result until the container ends, and end it on request or at its time limit."""
        got: list[bytes] = []

        def read() -> None:
            with open(descriptor, "rb") as pipe:
                got.append(pipe.read())

        reader = Thread(target=read, daemon=True, name="peer-result")
        reader.start()
        sent, kill_at = False, float("inf")
        while reader.is_alive():
            now = time.monotonic()
            if now >= limit_at:
                self._ask("timeout")
            if self._wish and not sent:
                sent, kill_at = True, now + KILL_AFTER_S
                self._signal(signal.SIGUSR1 if self._wish == "cancel" else signal.SIGINT)
            if now >= kill_at or self._killed.is_set():
                self._kill()
            reader.join(_TICK_S)
        try:
            kind, value = deserialize(got[0], None)
        except Exception:
            return "crashed", None
        return str(kind), value

    def _signal(self, number: int) -> None:
        pid = self.pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _ship(self, descriptor: int, source: int) -> None:
        with open(descriptor, "rb") as pipe:
            for line in pipe:
                self.log.append(Entry(time.time(), source, line.decode("utf-8", "replace")))


def _own_variables() -> dict[str, str]:
    """The variables of this machine, without those of launchers and replicas."""
    return {n: v for n, v in os.environ.items() if not n.startswith(("ATOLL_", "REPLICA_", "MODAL_", "AWS_"))}


def _clear(mark: str) -> None:
    """A container ends with its first process: whatever else it started goes now."""
    while left := processes_with({_MARK: mark}):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
