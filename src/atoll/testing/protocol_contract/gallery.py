"""Launches that many statements share: replicas take a second to start, so no statement starts its own without need.

`Gallery` launches one run for each way to say what runs and for each kind of end, and collects them in one call. `Held`
takes four replicas, two of which run until they are released, through the calls whose order matters. Both keep what
each step returned or raised, and raise it again in the test that asks for it: one broken step fails one test.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from atoll.serverless.protocol import ReplicaHandle, ServerlessExecutor
from atoll.testing import protocol_jobs
from atoll.testing.protocol_contract.bench import JOBS, FacadeBench, until

PREFIX = "exp"
VARIABLES = ["REPLICA_RANK", "WORLD_SIZE", "RENDEZVOUS_URI", "MY_RANK"]
LOSERS = ("store", "backend", "both")
"""What forgets a run."""
RETURNED = ["converted", "tensors", "object", "nested", "nan"]
"""What each rank of a run returns."""
ENDS = ["return", "raise", "exit", "sigkill"]
NESTED = {"x": [1, {"y": 'é "quoted"\n'}], "nothing": None}
TERMINAL = ("succeeded", "failed", "cancelled", "lost")
BARE, PACKAGE, WITHOUT_MAIN = "protocol_program", "protocol_package", "protocol_without_main"
MODULES = {
    f"{BARE}.py": "def main(**arguments):\n    return {'called': 'bare main', 'arguments': arguments}\n",
    f"{WITHOUT_MAIN}.py": "def other():\n    pass\n",
    f"{PACKAGE}/__init__.py": "def thing():\n    return 'the function'\n",
    f"{PACKAGE}/thing.py": "def main():\n    return 'the main of the module'\n",
}
"""The suite's own modules, which replicas import. `thing` is a function and, as a dotted name, a module."""


def write_modules(folder: Path) -> None:
    for name, source in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)


class Steps:
    """What each step returned or raised."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._errors: dict[str, Exception] = {}

    def take(self, name: str, step: Callable[[], Any]) -> None:
        try:
            self._values[name] = step()
        except Exception as exc:  # noqa: BLE001 - the test that asks for the step raises it
            self._errors[name] = exc

    def __getitem__(self, name: str) -> Any:
        if name in self._errors:
            raise self._errors[name]
        return self._values[name]

    def items(self) -> list[tuple[str, Any]]:
        return list(self._values.items())


class Gallery:
    """Runs that end by themselves, with their handles and rows by name."""

    def __init__(self, bench: FacadeBench) -> None:
        self.bench = bench
        self.facade = bench.usual(run_id=PREFIX)
        self.handles = Steps()
        self.launched_between: dict[str, tuple[float, float]] = {}
        self._forms()
        self._stores()
        self._launch("returned", 5, f"{JOBS}:returned", {"parts": RETURNED})
        self._launch("arguments", 1, f"{JOBS}:echo", protocol_jobs.converted())
        self.ends = self._ends()
        self._launch("late", 1, f"{JOBS}:hold", {"key": "never"}, timeout=1)
        every = [handle for _, handles in self.handles.items() for handle in handles]
        self.every = every
        self.rows = Steps()
        self.rows.take("all", lambda: self.facade.collect(every))

    def handle(self, name: str, rank: int = 0) -> ReplicaHandle:
        found: ReplicaHandle = self.handles[name][rank]
        return found

    def row(self, name: str, rank: int = 0) -> dict[str, Any]:
        """The row of a replica, found by its place among the handles."""
        found: dict[str, Any] = self.rows["all"][self.every.index(self.handle(name, rank))]
        return found

    def result(self, name: str, rank: int = 0) -> Any:
        """The result of a replica, which must have succeeded."""
        row = self.row(name, rank)
        assert (row["status"], row["error"]) == ("succeeded", None), f"{name}: {row}"
        return row["result"]

    def _forms(self) -> None:
        """The ways to say what runs. Three of them also show where the store comes from, with all sources set."""
        store, constructor = self.bench.store("store"), {"store": self.bench.store("constructor")}
        with mock.patch.dict(os.environ, ATOLL_STORE=self.bench.store("variable")):
            own = {"rank_env": "MY_RANK", "rendezvous_uri": self.bench.store("argument")}
            self._launch("store_argument", 1, f"{JOBS}:only_x", {"x": 1, **own}, **constructor)
            self._launch("store_constructor", 1, f"{JOBS}.echo", NESTED, **constructor)
            self._launch("store_variable", 1, JOBS, {"x": 1}, store=None)
        if self.bench.runs_callables:
            self._launch("callable", 1, protocol_jobs.echo, NESTED)
        self._launch("colon", 1, f"{JOBS}:echo", NESTED)
        self._launch("bare", 1, BARE, {"x": 1, "rank_env": "MY_RANK"})
        self._launch("module_first", 1, f"{PACKAGE}.thing", None)
        least = {"rendezvous_uri": store, "trainer_module": JOBS}
        self._launch("trainer", 1, "atoll.serverless.replica_entrypoint", least)
        more = {"trainer_fn": "variables", "trainer_kwargs": {"names": VARIABLES}, "rank_env": "MY_RANK"}
        self._launch("trainer_with_all", 2, "their.own.replica_entrypoint", {**least, **more})
        self._launch("variables", 2, f"{JOBS}:variables", {"names": VARIABLES, "rank_env": "MY_RANK"})
        self._launch("kept", 1, f"{JOBS}:own_names", {"rank_env": "MY_RANK", "rendezvous_uri": store})

    def _ends(self) -> list[tuple[str, int]]:
        """One replica for each kind of end: their runs and ranks. One run, unless a failure ends the whole run."""
        parts = [[end] for end in ENDS] if self.bench.fails_together else [ENDS]
        names = [f"ends-{number}" for number in range(len(parts))]
        for name, each in zip(names, parts, strict=True):
            self._launch(name, len(each), f"{JOBS}:act", {"parts": each})
        return [(name, rank) for name, each in zip(names, parts, strict=True) for rank in range(len(each))]

    def _stores(self) -> None:
        """Runs in stores of their own, which tests delete, and one without a named store."""
        for loser in LOSERS:
            self._launch(f"lost-{loser}", 1, f"{JOBS}:echo", {}, store=self.bench.store(f"lost-{loser}"))
        if self.bench.is_local:
            with mock.patch.dict(os.environ, ATOLL_HOME=str(self.bench.folder / "home")):
                self._launch("store_default", 1, f"{JOBS}:echo", {}, store=None)

    def _launch(self, name: str, n: int, entry: Any, args: Mapping[str, Any] | None, **options: Any) -> None:
        timeout = options.pop("timeout", 600)
        before = time.time()
        given = {"run_id": PREFIX, **options} if options else {}

        def launch() -> list[ReplicaHandle]:
            facade = self.bench.usual(**given) if given else self.facade
            return facade.launch_replicas(n, entry, args, timeout=timeout)

        self.handles.take(name, launch)
        self.launched_between[name] = (before, time.time())


class Held:
    """Four replicas: one returns, one raises, two hold. The names of the steps say when each was taken.

    Where one failure ends the others, none raises, and two return.
    """

    def __init__(self, bench: FacadeBench) -> None:
        self.bench, self.facade, self.steps = bench, bench.usual(run_id=PREFIX), Steps()
        self.key = uuid.uuid4().hex
        second = "return" if bench.fails_together else "raise"
        self.ended = ["succeeded", "succeeded" if bench.fails_together else "failed"]
        args = {"parts": ["return", second, "hold", "hold"], "key": self.key}
        self.handles = self.facade.launch_replicas(4, f"{JOBS}:act", args, timeout=600)
        try:
            self._go_through()
        finally:
            protocol_jobs.let_go(bench.store("store"), self.key)
        self.steps.take("rows at the end", lambda: self.facade.collect(self.handles))
        with suppress(Exception):  # a broken `collect` has its test; nothing may be left running
            self.facade.cancel(self.handles[3])

    def _go_through(self) -> None:
        steps, facade, handles = self.steps, self.facade, self.handles
        until(self.bench, "two have ended and two hold", lambda: self._polls()[2:] == ["running"] * 2 and self._over())
        steps.take("rows at the deadline", lambda: facade.collect(handles, timeout=0.5))
        steps.take("states after the deadline", self._polls)
        steps.take("rows of those that have ended", lambda: self._collect_two_of(facade, handles))
        steps.take("states after those", self._polls)
        if not self.bench.cancels_together:
            self._cancel_one_that_has_ended()
        steps.take("cancel", lambda: facade.cancel(handles[2]))
        steps.take("states after the cancel", self._polls)
        steps.take("second cancel", lambda: facade.cancel(handles[2]))
        if self.bench.cancels_together:
            self._cancel_one_that_has_ended()
        steps.take("row of the cancelled one", lambda: facade.collect([handles[2]], timeout=self.bench.patience_s))

    def _cancel_one_that_has_ended(self) -> None:
        self.steps.take("cancel of one that has ended", lambda: self.facade.cancel(self.handles[0]))
        self.steps.take("states after that", self._polls)

    def _polls(self) -> list[str]:
        return [self.facade.poll(handle) for handle in self.handles]

    def _over(self) -> bool:
        return all(state in TERMINAL for state in self._polls()[:2])

    def _collect_two_of(self, facade: ServerlessExecutor, handles: list[ReplicaHandle]) -> list[dict[str, Any]]:
        """In a thread: a `collect` that waits for other replicas as well would not return while they hold."""
        pool = ThreadPoolExecutor(1)
        try:
            return pool.submit(facade.collect, [handles[1], handles[0]]).result(self.bench.patience_s / 4)
        finally:
            pool.shutdown(wait=False)
