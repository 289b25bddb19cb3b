"""ScriptedService: a small cloud in memory that runs containers as real processes of this machine, and fails on cue.

It knows jobs; a job has one or several tasks, each with a rank and variables of its own. Calls are plain dictionaries,
as on a wire: `create`, `describe`, `list`, `stop`, `log`. Stopping takes time, names have a rule and stay taken,
secrets come from its own vault, and each task is kept to its time limit. `scripted_wire` puts it on a socket.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from atoll.testing.bench import Call, Fault
from atoll.testing.scripted.executor import Task

NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?\Z")
PAGE = 100
_CALLS = {"create": Call.CREATE, "describe": Call.DESCRIBE, "list": Call.DESCRIBE, "stop": Call.STOP, "log": Call.LOG}


class Refusal(Exception):
    """An answer that is not what the caller hoped for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Silence(Exception):
    """No answer at all."""


@dataclass
class _Rule:
    """A fault or an action, and which calls it meets."""

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

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "token": self.token, "tasks": [task.describe() for task in self.tasks]}


class ScriptedService:
    """The cloud. `close` ends whatever it runs."""

    calls: frozenset[Call] = frozenset(Call)

    def __init__(self, *, vault: Mapping[str, str] | None = None) -> None:
        self.vault = dict(vault or {})
        self.counts: Counter[str] = Counter()
        self.admits = Event()
        """While clear, tasks stay in the queue."""
        self.admits.set()
        self._jobs: dict[str, _Job] = {}
        self._rules: list[_Rule] = []
        self._lock = Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="scripted-")
        self._threads: list[Thread] = []

    # ── the calls ───────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One call: counted, met by scripted faults before or after its effect, and served."""
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
            job = _Job(body["name"], body["token"], body["label"])
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
            names = sorted(name for name, job in self._jobs.items() if job.label == body["label"])
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
        """Do something at such calls, before or after their effect."""
        with self._lock:
            self._rules.append(_Rule(call, nth, times, after_effect, act))

    def heal(self) -> None:
        with self._lock:
            self._rules.clear()

    def forget(self, label: str) -> None:
        """Lose every trace of the jobs with this label."""
        with self._lock:
            self._jobs = {name: job for name, job in self._jobs.items() if job.label != label}

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
        """End every process, and give the folder back."""
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
