"""What torchft itself gives, as JSON: the whole real thing, Lighthouse, manager servers and Gloo, on this machine.

A program of its own, because torchft leaves sockets open that are warnings, and therefore errors, in a test.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torchft._torchft import LighthouseServer
from torchft.manager import Manager as TorchftManager
from torchft.process_group import ProcessGroupGloo
from torchft_replicas import CASES, STREAMING, Make, bits, history, run_diloco, run_local_sgd


@contextmanager
def torchft_managers(world_size: int) -> Iterator[Make]:
    """The real ones. Each replica group is one rank, with a store of its own."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=world_size, join_timeout_ms=10_000)
    address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    stores, lock = [], threading.Lock()

    def make(rank: int) -> Any:
        with lock:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            stores.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        return TorchftManager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=world_size,
            use_async_quorum=False,
            timeout=timedelta(seconds=60),
            quorum_timeout=timedelta(seconds=60),
            replica_id=str(rank),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=port,
            lighthouse_addr=address,
            hostname="127.0.0.1",
            init_sync=False,
        )

    try:
        yield make
    finally:
        lighthouse.shutdown()


def diloco(world_size: int, **options: Any) -> list[dict[str, Any]]:
    with torchft_managers(world_size) as make:
        found = run_diloco(make, world_size, **options)
    return [{"weights": bits(w).hex(), "loss": loss, "globals": bits(g).hex()} for w, loss, g in found]


def main() -> None:
    with torchft_managers(2) as make:
        averaged = [found.hex() for found in run_local_sgd(make, 2)]
    cases = []
    for delay, alpha in CASES:
        with torchft_managers(2) as make:
            cases.append(history(make, delay, alpha))
    result = {
        "whole": diloco(2),
        "fragments": diloco(2, is_split=True),
        "streaming": diloco(2, **STREAMING),
        "four": diloco(4),
        "local_sgd": averaged,
        "cases": cases,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
