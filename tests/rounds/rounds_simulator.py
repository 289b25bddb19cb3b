"""Many replicas in one thread: drives their protocols request by request, in whatever order a test chooses.

Time is a FakeClock that moves only when everybody sleeps. Killing a replica drops it between two requests, as
SIGKILL would, before or after the effect of the one it was making. A `Read` is such a request: nothing but the
memory of its replica changes while it goes on, so a kill within it is a kill before it. What has been opened is read
only by a `Read`: anything else is an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from atoll.rounds.io import Gather, Op, Open, Read, Request, Sleep, answer
from atoll.stores.base import Store
from atoll.stores.fast import Body
from atoll.testing.fakes import FakeClock

Choose = Callable[[int], int]
"""Given n tasks that could go next, the index of the one that does."""


class Task:
    """One generator on its way, and the children it waits for."""

    def __init__(self, name: str, steps: Generator[Op, Any, Any], store: Store) -> None:
        self.name, self.steps, self.store = name, steps, store
        self.op: Op | None = None
        self.wake: float | None = None
        self.children: list[Task] | None = None
        self.is_over = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._go(lambda: next(steps))

    def reply(self, value: Any) -> None:
        self._go(lambda: self.steps.send(value))

    def throw(self, error: BaseException) -> None:
        self._go(lambda: self.steps.throw(error))

    def _go(self, resume: Callable[[], Op]) -> None:
        self.op, self.wake, self.children = None, None, None
        try:
            self.op = resume()
        except StopIteration as end:
            self.is_over, self.value = True, end.value
        except BaseException as exc:
            self.is_over, self.error = True, exc


class Simulation:
    """A set of replicas that share a store and a clock."""

    def __init__(self, clock: FakeClock, choose: Choose | None = None) -> None:
        self.clock, self.choose = clock, choose or (lambda _: 0)
        self.tasks: dict[str, Task] = {}
        self.requests: dict[str, int] = {}
        self.before: Callable[[str, int, Op], str | None] | None = None
        """Asked before each request (replica, its count so far, request): `kill`, `kill after`, `pause` or None."""
        self.killed: list[str] = []
        self.paused: set[str] = set()
        """Replicas that get no turn, as after SIGSTOP."""
        self.before_piece: Callable[[str], None] | None = None
        """Called with the replica before each piece of an opened object is read; an error it raises ends the read."""
        self.is_reading = False
        """Whether a `Read` is being answered."""

    def start(self, name: str, steps: Generator[Op, Any, Any], store: Store) -> Task:
        self.requests.setdefault(name, 0)
        self.tasks[name] = Task(name, steps, store)
        return self.tasks[name]

    def kill(self, name: str) -> None:
        del self.tasks[name]
        self.killed.append(name)

    def run(self, until: Callable[[], bool] | None = None, max_steps: int = 20_000) -> None:
        """Go on until everyone is done, `until` holds, or a replica was killed."""
        killed = len(self.killed)
        for _ in range(max_steps):
            if until is not None and until():
                return
            if len(self.killed) > killed:
                return
            ready = [leaf for root in self._running() for leaf in self._ready(root)]
            if ready:
                self._do(ready[self.choose(len(ready)) % len(ready)])
            elif not self._sleep():
                return
        raise AssertionError("the replicas did not come to an end")

    def results(self) -> dict[str, Any]:
        for task in self.tasks.values():
            if task.error is not None:
                raise task.error
            assert task.is_over, f"{task.name} is not done"
        return {name: task.value for name, task in self.tasks.items()}

    def _running(self) -> list[Task]:
        return [task for name, task in self.tasks.items() if name not in self.paused]

    def _ready(self, task: Task) -> list[Task]:
        if task.is_over:
            return []
        if isinstance(task.op, Gather):
            return self._ready_children(task)
        if isinstance(task.op, Sleep):
            if task.wake is None:
                task.wake = self.clock.monotonic() + task.op.seconds
            return [task] if task.wake <= self.clock.monotonic() else []
        return [task]

    def _ready_children(self, task: Task) -> list[Task]:
        assert isinstance(task.op, Gather)
        if task.children is None:
            task.children = []
        failed = next((child.error for child in task.children if child.error is not None), None)
        alive = [child for child in task.children if not child.is_over]
        while failed is None and len(task.children) < len(task.op.children) and len(alive) < task.op.width:
            child = Task(task.name, task.op.children[len(task.children)], task.store)
            task.children.append(child)
            failed = child.error
            if not child.is_over:
                alive.append(child)
        if not alive:
            if failed is not None:
                task.throw(failed)
            else:
                task.reply([child.value for child in task.children])
            return self._ready(task)
        leaves = [leaf for child in alive for leaf in self._ready(child)]
        # A child may have ended just now, without asking for anything.
        return self._ready(task) if any(child.is_over for child in alive) else leaves

    def _do(self, task: Task) -> None:
        op = task.op
        if isinstance(op, Sleep):
            task.reply(None)
            return
        assert op is not None
        assert not isinstance(op, Gather)
        number = self.requests[task.name]
        self.requests[task.name] += 1
        verdict = self.before(task.name, number, op) if self.before is not None else None
        if verdict == "pause":
            self.paused.add(task.name)
            return
        if verdict == "kill":
            self.kill(task.name)
            return
        try:
            result = self._answer(task, op)
        except BaseException as exc:
            if verdict == "kill after":
                self.kill(task.name)
                return
            task.throw(exc)
            return
        if verdict == "kill after":
            self.kill(task.name)
            return
        task.reply(result)

    def _answer(self, task: Task, op: Request) -> Any:
        self.is_reading = isinstance(op, Read)
        try:
            result = answer(task.store, op)
        finally:
            self.is_reading = False
        return _Watched(result, task.name, self) if isinstance(op, Open) else result

    def _sleep(self) -> bool:
        """Let time pass to the next one who wakes; False when nobody sleeps."""
        wakes = [wake for root in self._running() for wake in _wakes(root)]
        if not wakes:
            return False
        self.clock.advance(max(0.0, min(wakes) - self.clock.monotonic()))
        return True


class _Watched:
    """An opened object that refuses to be read outside a `Read`."""

    def __init__(self, body: Body, name: str, simulation: Simulation) -> None:
        self._body, self._name, self._simulation = body, name, simulation
        self.size = body.size

    def readinto(self, buffer: memoryview) -> None:
        assert self._simulation.is_reading, "the protocol reads an opened object by itself; `Read` is for that"
        if self._simulation.before_piece is not None:
            self._simulation.before_piece(self._name)
        self._body.readinto(buffer)

    def close(self) -> None:
        self._body.close()


def _wakes(task: Task) -> list[float]:
    if task.is_over:
        return []
    if task.children is not None:
        return [wake for child in task.children for wake in _wakes(child)]
    return [] if task.wake is None else [task.wake]
