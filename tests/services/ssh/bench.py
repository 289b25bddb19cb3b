"""The bench of the executor contract: the adapter over OpenSSH's client, and hooks into the hosts behind it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.context import LABEL, RUN_ID, STORE
from atoll.executors.ssh.request import blocks_of_handle
from atoll.handle import RunHandle
from atoll.registry import store_uri
from atoll.testing.bench import Bench, processes_with
from services.peer_bench import KillPoints
from services.ssh.peer import VAULT, Peer

ADAPTER = "atoll.executors.ssh.executor:SshExecutor"


def settings_of(peer: Peer) -> dict[str, Any]:
    return {
        "hosts": list(peer.hosts),
        "python": sys.executable,
        "config_file": str(peer.config),
        "store_is_mounted": True,
        "patience_s": 2.0,
        "connect_timeout_s": 60,
        "timeout_s": 120.0,
    }


@dataclass
class SshBench(KillPoints, Bench):
    """Made for each test over hosts that they share."""

    peer: Peer = None  # type: ignore[assignment]

    @classmethod
    def below(cls, folder: Path, peer: Peer) -> SshBench:
        return cls(
            ADAPTER,
            store_uri(str(folder / "store")),
            settings_of(peer),
            secret=(f"env:{VAULT[0]}", VAULT[1]),
            impatient={"connect_timeout_s": 3, "timeout_s": 8.0, "patience_s": 0.3},
            faults=peer.faults,
            peer=peer,
        )

    def running(self, run_id: str) -> list[str]:
        """The names of the parts of the run on the hosts that have a process."""
        found = {_label(pid) for pid in processes_with({RUN_ID: run_id, STORE: self.store_uri})}
        names = {host: str(home / "ssh") for host, home in self.peer.homes.items()}
        return sorted(
            f"{host}/{Path(label).name}"
            for host, root in names.items()
            for label in found
            if str(Path(label).parent) == root
        )

    def stranger(self, handle: RunHandle) -> RunHandle:
        launch, run_id, store = handle.native_id.split("/", 2)
        return replace(handle, native_id=f"{launch}/{run_id}x/{store}")

    def forget(self, handle: RunHandle) -> None:
        for block in blocks_of_handle(handle, "test"):
            shutil.rmtree(self.peer.homes[str(block.host)] / "ssh" / block.context.native_name())

    def creates(self, replicas: int) -> int:
        return min(replicas, len(self.peer.hosts))

    def most_status_calls(self, replicas: int) -> int:
        return self.creates(replicas)

    def calls(self) -> int:
        return sum(self.peer.calls.values())

    def kill_points(self, replicas: int) -> Sequence[str]:
        return super().kill_points(self.creates(replicas))


def _label(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    wanted = f"{LABEL}=".encode()
    return next((each.removeprefix(wanted).decode() for each in variables if each.startswith(wanted)), "")
