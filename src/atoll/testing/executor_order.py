"""An order: one run of the contract's jobs, as plain values, so that any process can launch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.executors.base import Executor
from atoll.runs.run import Draft, prepare

JOBS = "atoll.testing.contract_jobs"


@dataclass(frozen=True)
class Order:
    """`entry` is the name of one of the jobs."""

    run_id: str
    entry: str
    replicas: int = 1
    args: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)

    def draft(self, executor: Executor, store_uri: str) -> Draft:
        """Check and plan it."""
        return prepare(
            f"{JOBS}:{self.entry}",
            on=executor,
            store=store_uri,
            run_id=self.run_id,
            replicas=self.replicas,
            args=self.args,
            **self.placement,
        )
