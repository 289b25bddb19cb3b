"""The public contract: `ReplicaHandle` and `ServerlessExecutor`, structural and checkable at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass
class ReplicaHandle:
    """One replica. `metadata` is JSON, so another process can use the handle."""

    rank: int
    backend_name: str
    metadata: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Launch, poll, read logs, cancel, collect. docs/replica-protocol.md has the details.

    `handles[i].rank == i`. `REPLICA_RANK` (or the variable that `rank_env` in the arguments names) holds the rank of a
    replica, and `WORLD_SIZE` the count. An option that a backend does not support is an error; it is never ignored.
    """

    backend_name: str
    supports_inter_replica_network: bool

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any] | None,
        *,
        gpu: str | None = None,
        timeout: float = 3600,
    ) -> list[ReplicaHandle]:
        """Start `n_replicas` of a function, or of the trainer that `entrypoint_args` name. Each launch is a new run."""
        ...

    def poll(self, handle: ReplicaHandle) -> str:
        """`pending`, `running`, `succeeded`, `failed`, `cancelled` or `lost`."""
        ...

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last lines of the replica's output, or one line in angle brackets that says why there is none."""
        ...

    def cancel(self, handle: ReplicaHandle) -> None:
        """Stop this replica, or all of its run where the backend can only do that. Quiet if it is over or unknown."""
        ...

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for these replicas only, then one dict for each: rank, status, exit_code, error, result, native ids."""
        ...
