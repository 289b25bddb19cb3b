"""The bench of the replica protocol: `SageMakerExecutor` as its users build it, and hooks into the peer behind it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.handle import RunHandle
from atoll.serverless.protocol import ReplicaHandle
from atoll.testing.protocol_contract import FacadeBench
from repository import TESTS
from services.defaults import prelude, set_defaults
from services.peer_bench import closed, create_refused
from services.sagemaker.bench import ADAPTER, HASTE, SETTINGS
from services.sagemaker.plain_clients import CALLS
from services.sagemaker.server import Peer

_DEFAULTS = {name: HASTE[name] for name in ("patience_s", "pause_s", "log_lag_s", "list_calls_per_s", "calls_per_s")}


@dataclass
class SageMakerFacadeBench(FacadeBench):
    """Made over a running peer, whose variables are in the environment."""

    peer: Peer = None  # type: ignore[assignment]

    @classmethod
    def below(cls, folder: Path, peer: Peer) -> SageMakerFacadeBench:
        return cls(
            "atoll.serverless.sagemaker:SageMakerExecutor",
            folder,
            {**SETTINGS, "store_is_mounted": True},
            runs_commands=True,
            native_ids=["training_job_name"],
            row_ids=["model_artifacts", "billable_seconds"],
            link_names=["console", "logs"],
            extra="sagemaker",
            sdk=["boto3", "botocore"],
            clients="services.sagemaker.plain_clients:plain_clients",
            client_calls=CALLS,
            import_path=[str(TESTS)],
            prelude=prelude(ADAPTER, _DEFAULTS),
            peer=peer,
        )

    def queue_held(self) -> AbstractContextManager[None]:
        return closed(self.peer.engine.admits)

    def rank_broken(self, rank: int) -> AbstractContextManager[None]:
        return create_refused(self.peer.faults, rank)

    def forget(self, handle: ReplicaHandle) -> None:
        label = RunHandle.parse(handle.metadata["run"]).native_id
        self.peer.engine.forget(label)
        self.peer.log.forget(label)

    def running(self) -> list[str]:
        return [job.name for job in self.peer.engine.jobs.values() if not job.is_over]


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Set what the facade has no arguments for."""
    set_defaults(ADAPTER, _DEFAULTS, patch.setattr)
