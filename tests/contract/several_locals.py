"""The executor `several` with two parts on this machine, for the contract: it divides the replicas of any placement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.context import RunContext
from atoll.executors.base import Plan
from atoll.executors.several.executor import SeveralExecutor
from atoll.executors.several.parts import joined_handle, part_handles, part_plans
from atoll.handle import RunHandle
from atoll.replica.spool import Spool
from atoll.spec import Part, Placement
from atoll.testing.bench import Bench, LocalBench


class DividingExecutor(SeveralExecutor):
    """Plans two parts, or one for a single replica, if the placement names none."""

    part = "local"

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        if not placement.parts:
            placement = replace(placement, parts=divided(placement.replicas, self.part))
        return super().plan(context, placement)

    def part_prices(self, plan: Plan, placement: Placement) -> list[float | None]:
        """The placement does not name the parts, and this machine has no price."""
        return [None for _ in part_plans(plan)]


def divided(replicas: int, on: str) -> tuple[Part, ...]:
    first = (replicas + 1) // 2
    return tuple(Part(on, count) for count in (first, replicas - first) if count)


@dataclass
class SeveralBench(LocalBench):
    """Two parts on the local executor."""

    @classmethod
    def below(cls, folder: Path) -> SeveralBench:
        local = LocalBench.below(folder)
        return cls(
            f"{DividingExecutor.__module__}:{DividingExecutor.__name__}",
            local.store_uri,
            {"settings": {"local": dict(local.settings)}},
            environment={"PYTHONPATH": str(Path(__file__).parent)},
            secret=local.secret,
        )

    def stranger(self, handle: RunHandle) -> RunHandle:
        return joined_handle([Bench.stranger(self, part) for part in part_handles(handle)])

    def forget(self, handle: RunHandle) -> None:
        for part in part_handles(handle):
            super().forget(part)

    @contextmanager
    def start_broken(self, plan: Plan, rank: int) -> Iterator[None]:
        for part in part_plans(plan):
            if rank in part.request["ranks"]:
                folder = Spool(part.request["label"]).attempt(rank, 0).root.parent
                folder.parent.mkdir(parents=True)
                folder.touch()
        yield
