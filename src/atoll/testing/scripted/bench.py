"""The bench of the scripted executor, for the executor contract."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from atoll.handle import RunHandle
from atoll.registry import store_uri
from atoll.testing.bench import Bench, Call
from atoll.testing.scripted.executor import task_name
from atoll.testing.scripted.service import ScriptedService
from atoll.testing.scripted.wire import ScriptedServer

NEVER = 10**6


@dataclass
class ScriptedBench(Bench):
    """The scripted executor with its own scripted service, and a store in a folder of the test."""

    service: ScriptedService = field(default_factory=ScriptedService)
    group: bool = False
    """Whether one job has all replicas of a run."""

    @classmethod
    @contextmanager
    def below(cls, folder: Path, *, group: bool = False) -> Iterator[ScriptedBench]:
        service = ScriptedService(vault={"contract": "hunter2 hunter3", "one": "1", "two": "2"})
        server = ScriptedServer(service)
        try:
            yield cls(
                f"atoll.testing.scripted.executor:{'ScriptedGroupExecutor' if group else 'ScriptedExecutor'}",
                store_uri(str(folder / "store")),
                {"endpoint": server.endpoint},
                secret=("vault:contract", "hunter2 hunter3"),
                impatient={"timeout_s": 0.8},
                extra="scripted",
                sdk=["atoll.testing.scripted.wire"],
                faults=service,
                service=service,
                group=group,
            )
        finally:
            service.close()
            server.close()

    def running(self, run_id: str) -> list[str]:
        return [*self.service.unfinished(run_id, self.store_uri), *super().running(run_id)]

    def kill_replica(self, run_id: str, rank: int) -> None:
        """Kill the container's first process, as if the machine had failed: nothing can report."""
        os.kill(self.service.container(run_id, self.store_uri, rank), signal.SIGKILL)

    def forget(self, handle: RunHandle) -> None:
        self.service.forget(handle.native_id)

    @contextmanager
    def queue_held(self) -> Iterator[None]:
        self.service.admits.clear()
        try:
            yield
        finally:
            self.service.admits.set()

    @contextmanager
    def lists_late(self) -> Iterator[None]:
        self.service.unseen_lists = NEVER
        try:
            yield
        finally:
            self.service.unseen_lists = 0

    def hide_once(self, handle: RunHandle, rank: int) -> None:
        name = handle.native_id if self.group else task_name(handle.native_id, rank)
        self.service.hide(name, lists=1)

    def creates(self, replicas: int) -> int:
        return 1 if self.group else replicas

    def calls(self) -> int:
        return self.service.counts.total()

    def kill_points(self, replicas: int) -> Sequence[str]:
        numbers = range(1, self.creates(replicas) + 1)
        return [f"{when} create {number}" for number in numbers for when in ("before", "after")]

    def at_point(self, point: str, action: Callable[[], None]) -> None:
        when, _, number = point.split()
        self.service.on(Call.CREATE, action, nth=int(number), after_effect=when == "after")
