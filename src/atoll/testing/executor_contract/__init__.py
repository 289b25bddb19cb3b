"""The Executor contract as tests: subclass `ExecutorContract`, give it a `bench` fixture, and pytest does the rest.

    class TestSlurm(ExecutorContract):
        adapter = "my_package.slurm:SlurmExecutor"

        @pytest.fixture
        def bench(self, tmp_path):
            return SlurmBench(self.adapter, f"file://{tmp_path}/store", {"partition": "test"})

Each clause E1-E30 (see `atoll.executors.base.Executor`) is one or more methods named for its number that take the bench
as an argument, so they can also be called directly. They launch real replicas and count them. A test that needs a hook
which the bench does not have is skipped, and the skip says why.

    E1   planning is pure, deterministic, JSON and secret-free.
    E2   no field is lost: changing a field of `Placement` changes the request or raises `Unsupported`.
    E3   a refusal lists every reason, and nothing was started.
    E4   a handle survives text, and a fresh executor in another process can use it.
    E5   `status` has ranks 0 to N-1, once each, in order, from the moment `submit` returns.
    E6   return is SUCCEEDED; raise, exit 3 and SIGKILL are FAILED with reason and exit code.
    E7   `cancel` raises nothing before the start, while running, after the end and twice; then nothing runs.
    E8   a terminal state never changes; a forgotten run is LOST unless the store has its outcomes.
    E9   two runs do not see each other.
    E10  a failure at rank k leaves nothing running, or the error names what is left.
    E11  arguments arrive unchanged: nested, unicode, quotes, newlines, 100 kB.
    E12  a replica past its time limit ends FAILED/timeout.
    E13  `logs` yields the replica's lines and no others; an unknown run raises.
    E14  401 403 404 409 429 500 and a time-out become the documented errors, `__cause__` kept.
    E15  without the SDK, import works and construction raises `MissingExtra` naming the extra.
    E16  hostile run names give valid, distinct native names.
    E17  a group backend answers `status` in O(1) calls, whatever N.
    E18  a lost create answer, or two launchers at once, give exactly N replicas.
    E19  a submit killed at any point is finished or undone by the next launcher with the same run id.
    E20  `cancel` works without the store: it stops first and records afterwards.
    E21  a replica that may exist is stopped by its name, or named in `left_running`.
    E22  `cancel` never creates: the handle follows from the plan, and the names of the replicas from the handle.
    E23  after an undo the same run id starts N replicas; when two launchers race, the report of each is true.
    E24  an interrupted launcher leaves a handle, or nothing, or names what runs.
    E25  a wait ends at its deadline, whatever the service does.
    E26  a refusal to stop names every replica that it concerns.
    E27  one list without a replica does not make it LOST.
    E28  `cancel` with ranks stops these and no others, or is refused; replicas that need a stopped rank end naming it.
    E29  a watch of a run shows what `status` shows, wakes when a replica changes, and leaves nothing behind.
    E30  a part of a run has the ranks and the size of the whole run; its own verbs count from 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from atoll.testing.bench import Bench
from atoll.testing.executor_contract.life import LifeClauses
from atoll.testing.executor_contract.parts import PartClauses
from atoll.testing.executor_contract.plan import PlanClauses
from atoll.testing.executor_contract.reach import ReachClauses
from atoll.testing.executor_contract.stopping import StoppingClauses
from atoll.testing.executor_contract.twins import TwinClauses
from atoll.testing.executor_contract.wire import WireClauses

CLAUSES = range(1, 31)


class ExecutorContract(PlanClauses, LifeClauses, ReachClauses, WireClauses, TwinClauses, StoppingClauses, PartClauses):
    """Clauses E1-E30. Subclasses define `adapter` and the fixture `bench`, which closes what it opened."""

    adapter: ClassVar[str]
    """`module:Class`, as in the registry."""

    @pytest.fixture
    def bench(self) -> Bench:
        """A fresh bench: a backend of its own, and an empty store."""
        pytest.fail(f"{type(self).__name__} must define the fixture `bench`")

    @pytest.fixture(autouse=True)
    def _own_home(self, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Keep runs of the suite out of the user's own index of runs."""
        assert bench.path == self.adapter, (
            f"{type(self).__name__} tests {self.adapter}, but its bench builds {bench.path}"
        )
        monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
