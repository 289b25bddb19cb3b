"""One job: its container is a process group of this machine, with its output kept line by line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from threading import Condition, Event, Thread
from typing import Any

from atoll.testing.bench import processes_with

_TICK_S = 0.01
_MARK = "PEER_CONTAINER"
OVER = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
DEFAULT_TIMEOUT_S = 30 * 60
_NOT_INHERITED = ("ATOLL_", "REPLICA_", "HF_", "HUGGING", "AWS_", "RENDEZVOUS", "WORLD_SIZE", "JOB_ID")
"""Variables of the machine of the launcher, which a container never has."""


class Job:
    """SCHEDULING, RUNNING, then COMPLETED, CANCELED or ERROR. `attempts` are tries in total."""

    def __init__(self, spec: Mapping[str, Any], namespace: str, *, stop_grace_s: float) -> None:
        self.spec, self.namespace = spec, namespace
        self.id = uuid.uuid4().hex[:24]
        self.labels = dict(spec.get("labels") or {})
        self.stage, self.message = "SCHEDULING", None
        self.created_at = time.time()
        self.started_at: float | None = None
        self.finished_at: float | None = None
        self.unseen_lists = 0
        """How many more lists do not show the job."""
        self.process: subprocess.Popen[bytes] | None = None
        self.log = Log()
        self._stop_grace_s = stop_grace_s
        self._stop, self._killed = Event(), Event()

    @property
    def is_over(self) -> bool:
        return self.stage in OVER

    def info(self) -> dict[str, Any]:
        """The job as the service describes it. Values of secrets never come back."""
        end = self.finished_at or time.time()
        spec = self.spec
        running = None if self.started_at is None else int(end - self.started_at)
        return {
            "id": self.id,
            "createdAt": moment(self.created_at),
            "startedAt": None if self.started_at is None else moment(self.started_at),
            "finishedAt": None if self.finished_at is None else moment(self.finished_at),
            **{name: spec[name] for name in ("dockerImage", "spaceId") if name in spec},
            "command": spec["command"],
            "arguments": spec["arguments"],
            "environment": spec["environment"],
            "secrets": list(spec.get("secrets", {})),
            "flavor": spec["flavor"],
            "labels": self.labels,
            "status": {"stage": self.stage, "message": self.message},
            "durations": {
                "schedulingSecs": None if self.started_at is None else int(self.started_at - self.created_at),
                "runningSecs": running,
                "totalSecs": int(end - self.created_at),
            },
            "owner": {"id": "5e9ecfc04957053f60648a3e", "name": self.namespace, "type": "user"},
            "initiator": {"type": "user", "id": "5e9ecfc04957053f60648a3e", "name": "tester"},
            "retry": int(spec.get("attempts", 1)) - 1,
        }

    def cancel(self) -> None:
        self._stop.set()

    def kill(self) -> None:
        """End it now, with the peer."""
        self._killed.set()
        self._stop.set()

    def run(self, admits: Event) -> None:
        """The body of a thread: from the queue to the end."""
        while not admits.wait(_TICK_S):
            if self._stop.is_set():
                break
        stage, message = "CANCELED", None
        if not self._stop.is_set():
            self.started_at = time.time()
            self.stage = "RUNNING"
            for _ in range(int(self.spec.get("attempts", 1))):
                stage, message = self._contain()
                if stage != "ERROR" or message == _TIMEOUT:
                    break
        self.finished_at = time.time()
        self.message, self.stage = message, stage
        self.log.close()

    def _contain(self) -> tuple[str, str | None]:
        """Run the container once. Returns how it ended."""
        mark, scratch = uuid.uuid4().hex, tempfile.mkdtemp(prefix="peer-")
        self.log.write(f"===== Job started at {datetime.now(UTC):%Y-%m-%d %H:%M:%S} =====")
        process = self.process = self._start(mark, scratch)
        reader = Thread(target=self._ship, args=(process,), daemon=True)
        reader.start()
        limit_at = time.monotonic() + float(self.spec.get("timeoutSeconds", DEFAULT_TIMEOUT_S))
        ended, kill_at = "", float("inf")
        while process.poll() is None:
            now = time.monotonic()
            if not ended and (self._stop.is_set() or now >= limit_at):
                ended = "CANCELED" if self._stop.is_set() else _TIMEOUT
                process.send_signal(signal.SIGTERM)
                kill_at = now + self._stop_grace_s
            if now >= kill_at or self._killed.is_set():
                process.kill()
            time.sleep(_TICK_S)
        _clear(mark)
        reader.join()
        shutil.rmtree(scratch, ignore_errors=True)
        if ended:
            return ("CANCELED", None) if ended == "CANCELED" else ("ERROR", _TIMEOUT)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return ("COMPLETED", None) if code == 0 else ("ERROR", f"Job failed with exit code: {code}. Reason: Error")

    def _start(self, mark: str, scratch: str) -> subprocess.Popen[bytes]:
        words = [*self.spec["command"], *self.spec["arguments"]]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        own = {"JOB_ID": self.id, "ACCELERATOR": "none", "CPU_CORES": "2", "MEMORY": "16Gi"}
        given = {**self.spec["environment"], **self.spec.get("secrets", {})}
        return subprocess.Popen(
            [sys.executable if word == "python" else word for word in words],
            env={**clean, **own, **{name: str(value) for name, value in given.items()}, _MARK: mark, "TMPDIR": scratch},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _ship(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                self.log.write(line.decode("utf-8", "replace").removesuffix("\n"))


_TIMEOUT = "Job timeout"


class Log:
    """Lines with times. Readers get what is there, then what comes, until the job is over."""

    def __init__(self) -> None:
        self._lines: list[dict[str, str]] = []
        self._changed = Condition()
        self._is_closed = False

    @property
    def count(self) -> int:
        return len(self._lines)

    def write(self, line: str) -> None:
        with self._changed:
            self._lines.append({"timestamp": moment(time.time()), "data": line})
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def events(self, tail: int | None, quiet_s: float) -> Iterator[dict[str, str] | None]:
        """Events from the last `tail` lines on. None when nothing was written for `quiet_s`."""
        with self._changed:
            place = 0 if tail is None else max(0, len(self._lines) - tail)
        while True:
            with self._changed:
                if place == len(self._lines) and not self._is_closed:
                    self._changed.wait(quiet_s)
                new, is_closed = self._lines[place:], self._is_closed
            if not new and is_closed:
                return
            yield from new or [None]
            place += len(new)


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _clear(mark: str) -> None:
    """A container ends with its first process, so all other processes of it end now."""
    while left := processes_with({_MARK: mark}):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.001)
