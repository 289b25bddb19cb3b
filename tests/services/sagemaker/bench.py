"""The bench of the executor contract: the adapter over real boto3, and hooks into the peer behind it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.context import RANK, RUN_ID, STORE
from atoll.executors.sagemaker.request import job_name
from atoll.handle import RunHandle
from atoll.registry import store_uri
from atoll.testing.bench import Bench
from services.peer_bench import KillPoints, closed
from services.sagemaker.job import Job
from services.sagemaker.server import Peer

ADAPTER = "atoll.executors.sagemaker.executor:SageMakerTrainingExecutor"
SETTINGS: dict[str, Any] = {
    "role_arn": "arn:aws:iam::123456789012:role/replicas",
    "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1",
    "output_s3_path": "s3://bucket/output",
    "region": "us-east-1",
}
HASTE: dict[str, Any] = {
    "patience_s": 0.6,
    "pause_s": 0.04,
    "stop_s": 30.0,
    "log_lag_s": 0.05,
    "list_calls_per_s": 500.0,
    "calls_per_s": 500.0,
    "store_is_mounted": True,
}


@dataclass
class SageMakerBench(KillPoints, Bench):
    """Made for each test over a peer that they share."""

    peer: Peer = None  # type: ignore[assignment]

    @classmethod
    def below(cls, folder: Path, peer: Peer) -> SageMakerBench:
        """Expects the peer's variables in the environment of this process."""
        return cls(
            ADAPTER,
            store_uri(str(folder / "store")),
            {**SETTINGS, **HASTE},
            impatient={"timeout_s": 0.8, "patience_s": 0.3},
            extra="sagemaker",
            sdk=["boto3", "botocore"],
            faults=peer.faults,
            peer=peer,
        )

    def running(self, run_id: str) -> list[str]:
        unfinished = [job.name for job in self._jobs(run_id) if not job.is_over]
        return [*unfinished, *super().running(run_id)]

    def kill_replica(self, run_id: str, rank: int) -> None:
        """The whole container goes: not even its first process has a last word."""
        job = next(job for job in self._jobs(run_id) if job.request["Environment"][RANK] == str(rank))
        assert job.process is not None
        os.kill(job.process.pid, signal.SIGKILL)

    def forget(self, handle: RunHandle) -> None:
        self.peer.engine.forget(handle.native_id)
        self.peer.log.forget(handle.native_id)

    def queue_held(self) -> AbstractContextManager[None]:
        return closed(self.peer.engine.admits)

    @contextmanager
    def lists_late(self) -> Iterator[None]:
        self.peer.engine.unseen_looks = {"ListTrainingJobs": 10**6}
        try:
            yield
        finally:
            self.peer.engine.unseen_looks = {}

    def hide_once(self, handle: RunHandle, rank: int) -> None:
        self.peer.engine.hide(job_name(handle.native_id, rank), ListTrainingJobs=1)

    def calls(self) -> int:
        return sum(count for (service, _), count in self.peer.calls.items() if service in ("sagemaker", "logs"))

    def _jobs(self, run_id: str) -> list[Job]:
        wanted = (run_id, self.store_uri)
        jobs = list(self.peer.engine.jobs.values())
        return [job for job in jobs if tuple(job.request["Environment"].get(n) for n in (RUN_ID, STORE)) == wanted]
