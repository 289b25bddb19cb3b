"""ScriptedService: a small cloud in memory that runs containers as real processes and injects scripted faults.

A job has one or several tasks, each with its own rank and variables. Calls take and return plain dictionaries:
`create`, `describe`, `list`, `stop`, `log`. Stopping takes time, names follow a rule and stay taken, secrets come from
the service's own vault, and the service enforces time limits. `atoll.testing.scripted.wire` serves it on a socket.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from atoll.context import RUN_ID, STORE
from atoll.testing.bench import Call, Fault, processes_with

NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?\Z")
PAGE = 100
_TICK_S = 0.01
_MARK = "SCRIPTED_CONTAINER"
_CALLS = {"create": Call.CREATE, "describe": Call.DESCRIBE, "list": Call.DESCRIBE, "stop": Call.STOP, "log": Call.LOG}


class Refusal(Exception):
    """An error answer with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Silence(Exception):
    """No answer at all."""


@dataclass
class _Rule:
    """A fault or an action, and the calls at which it happens."""

    call: Call
    nth: int
    times: int | None
    after_effect: bool
    act: Callable[[], None]
    seen: int = 0

    def meets(self, call: Call) -> bool:
        if call is not self.call:
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


@dataclass
class _Job:
    name: str
    token: str
    label: str
    tasks: list[Task] = field(default_factory=list)
    unseen_lists: int = 0
    """How many more lists do not show this job."""

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "token": self.token, "tasks": [task.describe() for task in self.tasks]}


class ScriptedService:
    """The cloud. `close` ends every container."""

    calls: frozenset[Call] = frozenset(Call)

    def __init__(self, *, vault: Mapping[str, str] | None = None) -> None:
        self.vault = dict(vault or {})
        self.counts: Counter[str] = Counter()
        self.admits = Event()
        """While clear, tasks stay in the queue."""
        self.admits.set()
        self.unseen_lists = 0
        """How many lists do not show a new job."""
        self._jobs: dict[str, _Job] = {}
        self._rules: list[_Rule] = []
        self._lock = Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="scripted-")
        self._threads: list[Thread] = []

    # ── the calls ───────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Count and serve one call, with scripted faults before or after its effect."""
        handlers = {
            "create": self._create,
            "describe": self._describe,
            "list": self._list,
            "stop": self._stop,
            "log": self._log,
        }
        if verb not in handlers:
            raise Refusal(400, f"no call `{verb}`")
        with self._scripted(verb):
            return handlers[verb](body)

    def _create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if not NAME.match(body["name"]):
            raise Refusal(400, f"name `{body['name']}` does not match {NAME.pattern}")
        missing = [where for where in body["secrets"].values() if where not in self.vault]
        if missing:
            raise Refusal(400, f"the vault has no {', '.join(missing)}")
        with self._lock:
            if body["name"] in self._jobs:
                raise Refusal(409, f"a job named `{body['name']}` already exists")
            job = _Job(body["name"], body["token"], body["label"], unseen_lists=self.unseen_lists)
            secrets = {name: self.vault[where] for name, where in body["secrets"].items()}
            folder = Path(self._folder.name) / job.name
            for each in body["tasks"]:
                variables = {**body["environment"], **secrets, **each["environment"]}
                job.tasks.append(Task(each["rank"], body, variables, folder))
            self._jobs[job.name] = job
        for task in job.tasks:
            thread = Thread(target=task.run, args=(self.admits,), daemon=True)
            self._threads.append(thread)
            thread.start()
        return job.describe()

    def _describe(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._job(body["name"]).describe()

    def _list(self, body: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            jobs = {name: job for name, job in self._jobs.items() if job.label == body["label"]}
            names = sorted(name for name, job in jobs.items() if job.unseen_lists <= 0)
            for job in jobs.values():
                job.unseen_lists -= 1
        start = int(body.get("page") or 0)
        page = [self._jobs[name].describe() for name in names[start : start + PAGE] if name in self._jobs]
        return {"jobs": page, "next": start + PAGE if start + PAGE < len(names) else None}

    def _stop(self, body: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job(body["name"])
        if all(task.is_over for task in job.tasks):
            raise Refusal(409, f"job `{job.name}` is over and cannot be stopped")
        for task in job.tasks:
            task.stop()
        return {}

    def _log(self, body: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job(body["name"])
        task = next((task for task in job.tasks if task.rank == body["rank"]), None)
        if task is None:
            raise Refusal(404, f"job `{job.name}` has no task {body['rank']}")
        text, end = task.log(int(body["start"]))
        return {"text": text, "next": end}

    def _job(self, name: str) -> _Job:
        with self._lock:
            if name not in self._jobs:
                raise Refusal(404, f"no job `{name}`")
            return self._jobs[name]

    # ── the script ──────────────────────────────────────────────────────────────────────────────────────────────

    def fail(
        self, call: Call, fault: Fault, *, nth: int = 1, times: int | None = None, after_effect: bool = False
    ) -> None:
        """Answer such calls with a fault, from the `nth` on; `after_effect`, only the answer is lost. (`Faults`)"""

        def act() -> None:
            if fault is Fault.SILENT:
                raise Silence
            raise Refusal(int(fault), f"scripted {fault}")

        self.on(call, act, nth=nth, times=times, after_effect=after_effect)

    def on(
        self, call: Call, act: Callable[[], None], *, nth: int = 1, times: int | None = 1, after_effect: bool = False
    ) -> None:
        """Call `act` at such calls, before or after their effect."""
        with self._lock:
            self._rules.append(_Rule(call, nth, times, after_effect, act))

    def heal(self) -> None:
        with self._lock:
            self._rules.clear()

    def forget(self, label: str) -> None:
        """Delete all jobs with this label."""
        with self._lock:
            self._jobs = {name: job for name, job in self._jobs.items() if job.label != label}

    def hide(self, name: str, *, lists: int) -> None:
        """Leave this job out of the next lists."""
        with self._lock:
            self._jobs[name].unseen_lists = lists

    def unfinished(self, run_id: str, store_uri: str) -> list[str]:
        """Names of the jobs of a run that are not over."""
        with self._lock:
            jobs = list(self._jobs.values())
        return [job.name for job in jobs for task in job.tasks if task.is_of(run_id, store_uri) and not task.is_over]

    def container(self, run_id: str, store_uri: str, rank: int) -> int:
        """The pid of a task's first process."""
        with self._lock:
            tasks = [task for job in self._jobs.values() for task in job.tasks if task.rank == rank]
        return next(task.pid for task in tasks if task.is_of(run_id, store_uri) and task.pid is not None)

    def close(self) -> None:
        """End every process, and delete the folder."""
        self.heal()
        self.admits.set()
        for job in list(self._jobs.values()):
            for task in job.tasks:
                task.kill()
        for thread in self._threads:
            thread.join()
        self._folder.cleanup()

    @contextmanager
    def _scripted(self, verb: str) -> Iterator[None]:
        with self._lock:
            self.counts[verb] += 1
            met = [rule for rule in self._rules if rule.meets(_CALLS[verb])]
        for rule in met:
            if not rule.after_effect:
                rule.act()
        yield
        for rule in met:
            if rule.after_effect:
                rule.act()


class Task:
    """One container: Queued, Running, then Succeeded, Failed, Stopped or TimedOut. `run` is the body of a thread."""

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
        """Request the end; the container has its grace to exit."""
        self._stop.set()

    def kill(self) -> None:
        """End it now."""
        self._killed.set()
        self._stop.set()

    def log(self, start: int) -> tuple[str, int]:
        """Whole lines of the newest attempt from byte `start` on (the rest once it is over), and where they end."""
        is_over = self.is_over  # before reading: what is written later is read by the next call
        try:
            data = self._log_path().read_bytes()[start:]
        except FileNotFoundError:
            return "", start
        if not is_over:
            data = data[: data.rfind(b"\n") + 1]
        return data.decode("utf-8", "backslashreplace"), start + len(data)

    def run(self, admits: Event) -> None:
        """Wait in the queue, run, restart if allowed, and end."""
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
        stop_state, kill_at = "", float("inf")
        while process.poll() is None:
            now = time.monotonic()
            if not stop_state and (self._stop.is_set() or now >= limit_at):
                stop_state = "Stopped" if self._stop.is_set() else "TimedOut"
                process.send_signal(signal.SIGTERM)
                kill_at = now + float(self._body["stop_grace_s"])
            if now >= kill_at or self._killed.is_set():
                process.kill()
            time.sleep(_TICK_S)
        _clear(mark)
        code = process.returncode
        self._exit_code = code if code >= 0 else 128 - code
        return "Succeeded" if code == 0 else stop_state or "Failed"

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
    """A container ends with its first process: kill the others that it started."""
    while left := processes_with({_MARK: mark}):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.001)
