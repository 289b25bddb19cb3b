"""The bench of the executor contract for machines that join: each machine is a process that runs `atoll join`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll import journal
from atoll.executors.join.request import context_of
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.registry import open_store, store_uri
from atoll.replica import processes
from atoll.replica.joined import JoinedRanks, read_parts
from atoll.testing.bench import Bench
from repository import TESTS

ADAPTER = "atoll.executors.join.executor:JoinExecutor"
_POLL_S = 0.05


class Park:
    """Machines that join every run of their stores, one for each rank, as soon as it waits for machines."""

    def __init__(self) -> None:
        self._stores: list[str] = []
        self._served: set[tuple[str, str, int, int]] = set()
        self._pids: list[int] = []
        self._gate = threading.Lock()
        self._is_closed = threading.Event()
        command = [sys.executable, "-m", "services.join.machines"]
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def watch(self, uri: str) -> None:
        if uri not in self._stores:
            self._stores = [*self._stores, uri]

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this is open, no machine joins."""
        with self._gate:
            yield

    def clear(self) -> None:
        """End every machine, and serve no store any more."""
        with self._gate:
            self._stores = []
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            while self._pids:
                self._pids = [pid for pid in self._pids if not processes.is_dead(pid)]
                time.sleep(0.01)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self.clear()
        self._process.communicate()

    def _serve(self) -> None:
        while not self._is_closed.wait(_POLL_S):
            if self._gate.acquire(blocking=False):
                try:
                    for uri in self._stores:
                        self._join_all(uri)
                finally:
                    self._gate.release()

    def _join_all(self, uri: str) -> None:
        store = open_store(uri)
        for run_id in journal.run_ids(store):
            launch = journal.newest_launch(store, run_id)
            keys = RunKeys(run_id, launch.number)
            for part in [] if launch.undone is not None else read_parts(store, keys):
                if (place := (uri, run_id, launch.number, part.first_rank)) in self._served:
                    continue
                self._served.add(place)
                free = [row.rank for row in JoinedRanks(store, keys, part).read() if row.attempt is None]
                for rank in free:
                    # Machines take the next free rank, and the last one names its own. So does every machine of a part,
                    # because it could take a rank of another part.
                    is_named = rank == part.ranks[-1] or part.replicas < part.world_size
                    self._start_machine(uri, run_id, ["--rank", str(rank)] if is_named else [])

    def _start_machine(self, uri: str, run_id: str, own: list[str]) -> None:
        argv = ["join", "--store", uri, *own, "--", run_id]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = json.dumps({"argv": argv, "environment": dict(os.environ)})
        self._process.stdin.write(order.encode() + b"\n")
        self._process.stdin.flush()
        self._pids.append(int(self._process.stdout.readline()))


@dataclass
class JoinBench(Bench):
    """Made for each test, with a park of its own."""

    park: Park = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.park.watch(self.store_uri)

    @classmethod
    def below(cls, folder: Path, park: Park) -> JoinBench:
        """The caller sets the variable `CONTRACT_VAULT` in this process to the secret."""
        settings: dict[str, Any] = {"silent_after_s": 20.0}
        return cls(
            ADAPTER,
            store_uri(str(folder / "store")),
            settings,
            secret=("env:CONTRACT_VAULT", "hunter2 hunter3"),
            park=park,
        )

    def running(self, run_id: str) -> list[str]:
        """Processes of the run. A supervisor stores the outcome when its replica has ended, and exits after that."""
        until = time.monotonic() + self.patience_s
        while (found := super().running(run_id)) and self._has_ended(run_id) and time.monotonic() < until:
            time.sleep(0.01)
        return found

    def _has_ended(self, run_id: str) -> bool:
        """Whether every attempt of the run that a machine has claimed has an outcome."""
        keys = RunKeys(run_id, journal.newest_launch(self.store, run_id).number)
        starts = {keys.parse_start(key) for key in self.store.list(keys.starts_prefix())}
        barred = {each for each in starts if b"barred" in bytes(self.store.get(keys.start(*each)))}
        return starts - barred <= {keys.parse_outcome(key) for key in self.store.list(keys.outcomes_prefix())}

    def forget(self, handle: RunHandle) -> None:
        context = context_of(handle)
        self.store.delete(RunKeys(context.run_id, context.launch).join_part(handle.first_rank))

    def queue_held(self) -> Any:
        return self.park.held()

    def store_lost(self) -> Any:
        pytest.skip("only the store reaches the machines of this backend")
