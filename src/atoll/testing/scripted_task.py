"""One task of the scripted cloud: a container, which here is a process and whatever it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

from atoll.context import RUN_ID, STORE
from atoll.testing.executor_bench import processes_with

_TICK_S = 0.01
_MARK = "SCRIPTED_CONTAINER"


class Task:
    """Queued, Running, then Succeeded, Failed, Stopped or TimedOut. `run` is the body of a thread."""

    def __init__(self, rank: int, body: Mapping[str, Any], environment: Mapping[str, str], folder: Path) -> None:
        self.rank = rank
        self._body, self._environment = body, environment
        self._folder = folder / f"{rank}"
        self._state, self._attempt = "Queued", 0
        self._exit_code: int | None = None
        self._stop, self._killed = Event(), Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at: float | None = None
        self._ended_at: float | None = None

    @property
    def is_over(self) -> bool:
        return self._state in ("Succeeded", "Failed", "Stopped", "TimedOut")

    @property
    def pid(self) -> int | None:
        """The first process of the container, while it lives."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def is_of(self, run_id: str, store_uri: str) -> bool:
        return (self._environment[RUN_ID], self._environment[STORE]) == (run_id, store_uri)

    def describe(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "state": self._state,
            "exit_code": self._exit_code,
            "attempt": self._attempt,
            "started_at": self._started_at,
            "ended_at": self._ended_at,
        }

    def stop(self) -> None:
        """Ask it to end; it has its grace to do so."""
        self._stop.set()

    def kill(self) -> None:
        """End it now."""
        self._killed.set()
        self._stop.set()

    def log(self, start: int) -> tuple[str, int]:
        """Whole lines of the newest attempt from byte `start` on (the rest once it is over), and where they end."""
        is_over = self.is_over  # before reading: what is written after this is read next time
        try:
            data = self._log_path().read_bytes()[start:]
        except FileNotFoundError:
            return "", start
        if not is_over:
            data = data[: data.rfind(b"\n") + 1]
        return data.decode("utf-8", "backslashreplace"), start + len(data)

    def run(self, admits: Event) -> None:
        """Live: wait in the queue, run, run again if that is allowed, and end."""
        while not admits.wait(_TICK_S):
            if self._stop.is_set():
                break
        self._started_at = time.time()
        limit_at = time.monotonic() + float(self._body["max_runtime_s"])
        verdict = "Stopped"
        while not self._stop.is_set():
            verdict = self._attempt_once(limit_at)
            if verdict != "Failed" or self._attempt >= int(self._body["max_restarts"]) or self._stop.is_set():
                break
            self._attempt += 1
        self._ended_at = time.time()
        self._state = verdict

    def _attempt_once(self, limit_at: float) -> str:
        mark = uuid.uuid4().hex
        process = self._process = self._start(mark)
        self._state = "Running"
        asked, kill_at = "", float("inf")
        while process.poll() is None:
            now = time.monotonic()
            if not asked and (self._stop.is_set() or now >= limit_at):
                asked = "Stopped" if self._stop.is_set() else "TimedOut"
                process.send_signal(signal.SIGTERM)
                kill_at = now + float(self._body["stop_grace_s"])
            if now >= kill_at or self._killed.is_set():
                process.kill()
            time.sleep(_TICK_S)
        _clear(mark)
        code = process.returncode
        self._exit_code = code if code >= 0 else 128 - code
        return "Succeeded" if code == 0 else asked or "Failed"

    def _start(self, mark: str) -> subprocess.Popen[bytes]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "REPLICA_"))}
        environment = {**clean, **self._environment, _MARK: mark, "TMPDIR": str(self._folder)}
        path = self._log_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as log:
            return subprocess.Popen(
                [sys.executable, *self._body["command"]],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _log_path(self) -> Path:
        return self._folder / f"{self._attempt}.log"


def _clear(mark: str) -> None:
    """A container ends with its first process: whatever else it started goes now."""
    while left := processes_with({_MARK: mark}):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.001)
