"""The bench of the replica protocol: `HFJobsExecutor` as its users build it, and hooks into the peer behind it."""

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
from services.hf_jobs.bench import ADAPTER, HASTE
from services.hf_jobs.plain_client import CALLS
from services.hf_jobs.server import Peer
from services.peer_bench import closed, create_refused

_DEFAULTS = {name: HASTE[name] for name in ("patience_s", "pause_s", "list_lag_s", "log_quiet_s", "store_is_mounted")}


@dataclass
class HFJobsFacadeBench(FacadeBench):
    """Made over a running peer, whose variables are in the environment."""

    peer: Peer = None  # type: ignore[assignment]

    @classmethod
    def below(cls, folder: Path, peer: Peer) -> HFJobsFacadeBench:
        return cls(
            "atoll.serverless.hf_jobs:HFJobsExecutor",
            folder,
            {"image": "team/train:1"},
            native_ids=["job_id"],
            row_ids=["running_seconds", "cost_usd"],
            link_names=["job"],
            extra="hf",
            sdk=["huggingface_hub", "httpx2"],
            clients="services.hf_jobs.plain_client:plain_client",
            client_calls=CALLS,
            import_path=[str(TESTS)],
            prelude=prelude(ADAPTER, _DEFAULTS),
            peer=peer,
        )

    def queue_held(self) -> AbstractContextManager[None]:
        return closed(self.peer.admits)

    def rank_broken(self, rank: int) -> AbstractContextManager[None]:
        return create_refused(self.peer.faults, rank)

    def forget(self, handle: ReplicaHandle) -> None:
        self.peer.forget(RunHandle.parse(handle.metadata["run"]).native_id)

    def running(self) -> list[str]:
        return [job.id for job in self.peer.jobs.values() if not job.is_over]


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Set what the facade has no arguments for."""
    set_defaults(ADAPTER, _DEFAULTS, patch.setattr)
