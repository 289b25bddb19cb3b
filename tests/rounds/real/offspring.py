"""The test's side of the nursery: start replicas as real processes, watch them, signal them, start them again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from atoll.stores.base import Store

HERE = Path(__file__).parent
PATIENCE_S = 120.0
"""Longer than anything here takes on a busy machine; only a hang gets this far."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Place:
    """An empty store for one test, and the test's own view of it."""

    kind: str
    uri: str
    store: Store


@dataclass
class Child:
    """One real process."""

    number: int
    out: Path
    arguments: dict[str, Any]
    changed: Condition
    facts: dict[str, Any] = field(default_factory=dict)

    def wait(self, patience_s: float = PATIENCE_S) -> Child:
        """Wait for its end."""
        self._await(lambda: "code" in self.facts, patience_s)
        return self

    def wait_stopped(self) -> Child:
        self._await(lambda: self.facts.get("state") == "stopped" or "code" in self.facts, PATIENCE_S)
        assert "code" not in self.facts, self.log
        return self

    def signal(self, number: int) -> None:
        os.kill(self.facts["pid"], number)

    def end(self) -> None:
        if "code" not in self.facts:
            self.signal(signal.SIGKILL)
            self.wait()

    @property
    def code(self) -> int:
        return int(self.facts["code"])

    @property
    def is_killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def came(self) -> dict[str, Any]:
        """What it left: `value`, or `error`, `message` and `details`."""
        assert self.code == 0, f"exit code {self.code}\n{self.log}"
        return dict(json.loads(self.out.read_text()))

    @property
    def value(self) -> Any:
        came = self.came
        assert "value" in came, self.log
        return came["value"]

    @property
    def error(self) -> str | None:
        return self.came.get("error")

    @property
    def log(self) -> str:
        path = self.out.with_name(self.out.name + ".log")
        return path.read_text() if path.exists() else ""

    def _await(self, holds: Any, patience_s: float) -> None:
        with self.changed:
            if not self.changed.wait_for(holds, patience_s):
                raise AssertionError(f"{self.arguments} hangs:\n{self.log}")


class Nursery:
    """Forks children from a process that has everything imported."""

    def __init__(self, folder: Path, modules: Iterable[str]) -> None:
        self.folder, self.environment = folder, dict[str, str]()
        self._changed = Condition()
        self._children: dict[int, Child] = {}
        self._numbers = count()
        command = [sys.executable, str(HERE / "nursery.py"), *modules]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ONE_THREAD}
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the nursery did not come up"
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, entry: str, **arguments: Any) -> Child:
        number = next(self._numbers)
        child = self._children[number] = Child(number, self.folder / f"{number}", arguments, self._changed)
        order = {"number": number, "entry": entry, "arguments": arguments, "out": str(child.out)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**order, "environment": self.environment}).encode() + b"\n")
        self._process.stdin.flush()
        with self._changed:
            assert self._changed.wait_for(lambda: "pid" in child.facts, PATIENCE_S)
        return child

    def first_over(self, children: Mapping[Any, Child], patience_s: float = PATIENCE_S) -> Any:
        """The key of a child that is over."""
        with self._changed:
            over = self._changed.wait_for(
                lambda: [key for key, child in children.items() if "code" in child.facts], patience_s
            )
        if not over:
            raise AssertionError("\n".join(f"{child.arguments} hangs:\n{child.log}" for child in children.values()))
        return over[0]

    def end_children(self) -> None:
        for child in self._children.values():
            child.end()
        self._children.clear()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fact = json.loads(line)
            with self._changed:
                child = self._children.get(fact.pop("number"))
                if child is not None:
                    child.facts.update(fact)
                self._changed.notify_all()


@contextmanager
def nursery_in(folder: Path, *modules: str) -> Iterator[Nursery]:
    made = Nursery(folder, modules)
    try:
        yield made
    finally:
        made.close()


def run_with_restarts(
    nursery: Nursery, entry: str, ranks: Iterable[dict[str, Any]], fates: Mapping[int, list[Any]] | None = None
) -> list[Child]:
    """Every rank to its end. One that is killed starts again as its next attempt, with its next fate, if it has one."""
    fates = fates or {}
    alive: dict[int, Child] = {}
    done: dict[int, Child] = {}

    def start(arguments: dict[str, Any], attempt: int) -> None:
        rank = arguments["rank"]
        fate = dict(enumerate(fates.get(rank, []))).get(attempt)
        alive[rank] = nursery.start(entry, **{**arguments, "attempt": attempt, "fate": fate})

    for arguments in ranks:
        start(arguments, 0)
    deadline = time.monotonic() + PATIENCE_S
    while alive:
        rank = nursery.first_over(alive, deadline - time.monotonic())
        child = alive.pop(rank)
        if child.is_killed:
            start(child.arguments, child.arguments["attempt"] + 1)
        else:
            done[rank] = child
    return [done[rank] for rank in sorted(done)]
