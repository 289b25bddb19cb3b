"""The bench of the local executor, for the executor contract."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.executors.base import Plan
from atoll.handle import RunHandle
from atoll.registry import store_uri
from atoll.replica.spool import Spool
from atoll.testing.executor_bench import Bench


@dataclass
class LocalBench(Bench):
    """The local executor, with spools and store in a folder of the test."""

    @classmethod
    def below(cls, folder: Path) -> LocalBench:
        """Expects the variable `CONTRACT_VAULT` in this process: it is the secret."""
        return cls(
            "atoll.executors.local.executor:LocalExecutor",
            store_uri(str(folder / "store")),
            {"root": str(folder / "spools")},
            secret=("env:CONTRACT_VAULT", "hunter2 hunter3"),
        )

    def forget(self, handle: RunHandle) -> None:
        shutil.rmtree(f"/{handle.native_id}")

    @contextmanager
    def start_broken(self, plan: Plan, rank: int) -> Iterator[None]:
        """A file lies where the shepherd wants to make the folder of this rank."""
        folder = Spool(plan.request["label"]).attempt(rank, 0).root.parent
        folder.parent.mkdir(parents=True)
        folder.touch()
        yield
