"""The bench of the executor contract: the adapter over the real `modal` client, and hooks into the peer behind it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status

from atoll import journal
from atoll.context import LAUNCH, RANK, RUN_ID, STORE
from atoll.handle import RunHandle
from atoll.registry import open_store, store_uri
from atoll.testing.bench import Bench
from services.modal.call import Call
from services.modal.server import Peer
from services.peer_bench import KillPoints, closed

ADAPTER = "atoll.executors.modal.executor:ModalExecutor"
SETTINGS: dict[str, Any] = {"store_is_mounted": True}
HASTE: dict[str, Any] = {"patience_s": 0.6, "pause_s": 0.04, "stop_s": 30.0, "log_lag_s": 0.05}
VAULT = {"CONTRACT_TOKEN": "hunter2 hunter3"}


@dataclass
class ModalBench(KillPoints, Bench):
    """Made for each test over a peer that they share."""

    peer: Peer = None  # type: ignore[assignment]

    @classmethod
    def below(cls, folder: Path, peer: Peer) -> ModalBench:
        """Expects the peer's variables in the environment of this process."""
        peer.engine.secrets["contract-vault"] = dict(VAULT)
        return cls(
            ADAPTER,
            store_uri(str(folder / "store")),
            {**SETTINGS, **HASTE},
            impatient={"timeout_s": 0.8, "patience_s": 0.3},
            secret=("modal:contract-vault", VAULT["CONTRACT_TOKEN"]),
            extra="modal",
            sdk=["modal"],
            faults=peer.faults,
            peer=peer,
        )

    def running(self, run_id: str) -> list[str]:
        """Calls that are not over and that may enter user code, and processes of the run.

        A call whose rank another call, or a cancel, has claimed returns at once.
        """
        alive = [call for call in calls_of(self.peer, run_id, self.store_uri) if not call.is_over]
        return [*(call.call_id for call in alive if may_run(call)), *super().running(run_id)]

    def kill_replica(self, run_id: str, rank: int) -> None:
        """The whole container goes: not even its first process has a last word."""
        for call in calls_of(self.peer, run_id, self.store_uri):
            if variables(call)[RANK] == str(rank) and may_run(call):
                call.crash()

    def forget(self, handle: RunHandle) -> None:
        store, _, run_id = handle.native_id.rsplit("/", 2)
        for call in calls_of(self.peer, run_id, store):
            del self.peer.engine.calls[call.call_id]

    def hide_once(self, handle: RunHandle, rank: int) -> None:
        store, _, run_id = handle.native_id.rsplit("/", 2)
        for call in calls_of(self.peer, run_id, store):
            if variables(call)[RANK] == str(rank):
                unknown = GRPCError(Status.NOT_FOUND, f"Function call {call.call_id} not found")
                for rpc in ("FunctionGetCallGraph", "FunctionGetOutputs"):
                    self.peer.faults.raise_at(rpc, unknown, times=1, name=call.call_id)

    def queue_held(self) -> AbstractContextManager[None]:
        return closed(self.peer.engine.admits)

    def calls(self) -> int:
        return sum(self.peer.calls.values())

    def most_status_calls(self, replicas: int) -> int:
        """A look at a call that has not ended is two requests: its graph and its output."""
        return 2 * super().most_status_calls(replicas)


def variables(call: Call) -> dict[str, str]:
    """The variables of the replica, from the argument of its call."""
    from modal._serialization import deserialize_data_format

    (context,), _ = deserialize_data_format(call.data, call.data_format, None)
    return dict(context.get("environment", {}))


def calls_of(peer: Peer, run_id: str, store: str) -> list[Call]:
    found = []
    for call in list(peer.engine.calls.values()):
        given = variables(call)
        if (given.get(RUN_ID), given.get(STORE)) == (run_id, store):
            found.append(call)
    return found


def may_run(call: Call) -> bool:
    """Whether the claim of its rank is free, or its own."""
    given = variables(call)
    where = {"rank": int(given[RANK]), "launch": int(given.get(LAUNCH, 1))}
    try:
        claim = journal.read_claim(open_store(given[STORE]), given[RUN_ID], **where)
    except Exception:
        return True
    return claim.job == call.call_id
