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
    """Launch, poll, read logs, cancel, collect.

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
        """Start `n_replicas` of an importable path, or of a callable where the backend can run one."""
        ...

    def poll(self, handle: ReplicaHandle) -> str:
        """`pending`, `running`, `succeeded`, `failed`, `cancelled` or `lost`."""
        ...

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last lines of the replica's output."""
        ...

    def cancel(self, handle: ReplicaHandle) -> None:
        """Stop the replica's run. No exception if it has already ended."""
        ...

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait, then one dict for each handle: rank, status, exit_code, error, result, and native ids."""
        ...
