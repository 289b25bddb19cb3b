"""The bench of the replica protocol: `ModalSpawnExecutor` as its users build it, and hooks into the peer behind it."""

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
from services.modal.bench import ADAPTER, HASTE, SETTINGS, calls_of
from services.modal.server import Peer
from services.peer_bench import closed, create_refused

_DEFAULTS = {**SETTINGS, **{name: HASTE[name] for name in ("patience_s", "pause_s", "log_lag_s")}}


@dataclass
class ModalFacadeBench(FacadeBench):
    """Made over a running peer, whose variables are in the environment."""

    peer: Peer = None  # type: ignore[assignment]

    @classmethod
    def below(cls, folder: Path, peer: Peer) -> ModalFacadeBench:
        return cls(
            "atoll.serverless.modal:ModalSpawnExecutor",
            folder,
            native_ids=["call_id"],
            link_names=["call"],
            extra="modal",
            sdk=["modal"],
            import_path=[str(TESTS)],
            prelude=prelude(ADAPTER, _DEFAULTS),
            peer=peer,
        )

    def queue_held(self) -> AbstractContextManager[None]:
        return closed(self.peer.engine.admits)

    def rank_broken(self, rank: int) -> AbstractContextManager[None]:
        return create_refused(self.peer.faults, rank)

    def forget(self, handle: ReplicaHandle) -> None:
        store, _, run_id = RunHandle.parse(handle.metadata["run"]).native_id.rsplit("/", 2)
        for call in calls_of(self.peer, run_id, store):
            del self.peer.engine.calls[call.call_id]

    def running(self) -> list[str]:
        return [call.call_id for call in self.peer.engine.calls.values() if not call.is_over]


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Set what the facade has no arguments for."""
    set_defaults(ADAPTER, _DEFAULTS, patch.setattr)
