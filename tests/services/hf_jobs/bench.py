"""The bench of the executor contract: the adapter over the real client, and hooks into the peer behind it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.context import RANK, RUN_ID, STORE
from atoll.handle import RunHandle
from atoll.registry import store_uri
from atoll.testing.bench import Bench
from services.hf_jobs.job import Job
from services.hf_jobs.server import Peer
from services.peer_bench import KillPoints, closed

ADAPTER = "atoll.executors.hf_jobs.executor:HubJobsExecutor"
SETTINGS: dict[str, Any] = {"image": "team/train:1", "namespace": "tester"}
HASTE: dict[str, Any] = {
    "patience_s": 0.6,
    "pause_s": 0.04,
    "stop_s": 30.0,
    "list_lag_s": 0.3,
    "log_quiet_s": 0.1,
    "store_is_mounted": True,
}
VAULT = ("CONTRACT_VAULT", "hunter2 hunter3")
"""A variable that the tests set, and its value."""


@dataclass
class HFJobsBench(KillPoints, Bench):
    """Made for each test over a peer that they share."""

    peer: Peer = None  # type: ignore[assignment]

    @classmethod
    def below(cls, folder: Path, peer: Peer) -> HFJobsBench:
        """Expects the peer's variables and `VAULT` in the environment of this process."""
        return cls(
            ADAPTER,
            store_uri(str(folder / "store")),
            {**SETTINGS, **HASTE},
            secret=(f"env:{VAULT[0]}", VAULT[1]),
            impatient={"timeout_s": 0.8, "patience_s": 0.3},
            extra="hf",
            sdk=["huggingface_hub", "httpx2"],
            faults=peer.faults,
            peer=peer,
        )

    def running(self, run_id: str) -> list[str]:
        unfinished = [job.id for job in self._jobs(run_id) if not job.is_over]
        return [*unfinished, *super().running(run_id)]

    def kill_replica(self, run_id: str, rank: int) -> None:
        """The whole container ends at once, and its first process writes no outcome."""
        job = next(job for job in self._jobs(run_id) if job.spec["environment"][RANK] == str(rank))
        assert job.process is not None
        os.kill(job.process.pid, signal.SIGKILL)

    def forget(self, handle: RunHandle) -> None:
        self.peer.forget(handle.native_id)

    def queue_held(self) -> AbstractContextManager[None]:
        return closed(self.peer.admits)

    @contextmanager
    def lists_late(self) -> Iterator[None]:
        self.peer.list_lag = 10**6
        try:
            yield
        finally:
            self.peer.list_lag = 0

    def hide_once(self, handle: RunHandle, rank: int) -> None:
        for job in self.peer.jobs.values():
            if (job.labels["atoll-run"], job.labels["atoll-rank"]) == (handle.native_id, str(rank)):
                job.unseen_lists = 1

    def calls(self) -> int:
        return sum(self.peer.calls.values())

    def _jobs(self, run_id: str) -> list[Job]:
        wanted = (run_id, self.store_uri)
        jobs = list(self.peer.jobs.values())
        return [job for job in jobs if tuple(job.spec["environment"].get(name) for name in (RUN_ID, STORE)) == wanted]
