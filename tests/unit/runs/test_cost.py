"""What a run costs, and the time limit that keeps a limit of the cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

import atoll
from atoll import journal
from atoll.errors import BackendUnavailable, InvalidSpec
from atoll.executors.local.executor import LocalExecutor
from atoll.runs.cost import cost_of, limit_s
from atoll.runs.run import Run
from atoll.status import Progress, ReplicaState, ReplicaStatus, RunStatus


def replica(rank: int, state: ReplicaState = ReplicaState.RUNNING, **known) -> ReplicaStatus:
    return ReplicaStatus(rank, state, **known)


def test_a_replica_costs_from_its_start_to_its_end():
    status = RunStatus(
        (
            replica(0, ReplicaState.SUCCEEDED, started_at=1000.0, ended_at=4600.0),
            replica(1, started_at=2800.0, progress=Progress(eta_s=1800.0)),
            replica(2, ReplicaState.PENDING, progress=Progress(eta_s=3600.0)),
        )
    )
    found = cost_of(status, 2.0, timeout_s=7200.0, now=6400.0)
    assert found.so_far_usd == pytest.approx(2.0 + 2.0)
    assert found.expected_usd == pytest.approx(4.0 + 1.0 + 2.0)
    assert found.at_most_usd == pytest.approx(12.0)
    unknown = cost_of(status.with_replicas([*status.replicas[:2], replica(2)]), 2.0, timeout_s=7200.0, now=6400.0)
    assert unknown.expected_usd is None


def test_the_cost_of_a_lost_rank_is_known_until_its_last_heartbeat_or_not_at_all():
    lost = ReplicaState.LOST
    status = RunStatus(
        (
            replica(0, ReplicaState.SUCCEEDED, started_at=1000.0, ended_at=4600.0),
            replica(1, lost, started_at=1000.0, progress=Progress(beat_at=2800.0)),
            replica(2, lost, progress=Progress(beat_at=2800.0)),
            replica(3, lost),
        )
    )
    found = cost_of(status, 2.0, timeout_s=3600.0, now=1e6)
    assert (found.so_far_usd, found.expected_usd, found.untimed) == (pytest.approx(3.0), None, (2, 3))
    assert str(found) == "$3.00 so far, at most $8.00; how long ranks 2-3 ran is not known"
    assert found.to_json()["untimed"] == [2, 3]
    known = cost_of(status.with_replicas(status.replicas[:2]), 2.0, timeout_s=3600.0, now=1e6)
    assert (known.untimed, "untimed" in known.to_json(), known.expected_usd) == ((), False, pytest.approx(3.0))


@pytest.mark.parametrize(
    ("max_cost", "hourly"), [(0, 1.0), (-1, 1.0), (float("nan"), 1.0), ("5", 1.0), (5.0, None), (0.01, 10.0)]
)
def test_a_limit_that_cannot_be_kept_is_refused(max_cost, hourly):
    with pytest.raises(InvalidSpec) as caught:
        limit_s(max_cost, hourly, 4, backend="somewhere")
    assert caught.value.fields == ("max_cost",)


class Priced(LocalExecutor):
    """Replicas on this machine that have a price."""

    price: float | None = 1.5

    def hourly_usd(self, plan, placement):
        if self.price is None:
            raise BackendUnavailable("no answer")
        return self.price


@pytest.fixture
def launched(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text("def f(ctx):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    return lambda **options: atoll.prepare("job:f", store=str(tmp_path / "store"), replicas=4, **options)


def test_a_limit_of_the_cost_becomes_a_time_limit_that_the_plan_has(launched):
    executor = Priced()
    draft = launched(on=executor, max_cost=12.0)
    assert draft.spec.placement.timeout_s == 7200.0
    assert draft.plan == launched(on=executor, timeout_s=7200.0, run_id=draft.spec.run_id).plan
    assert [note for note in draft.notes() if "$12.00" in note and "2h" in note]
    shorter = launched(on=executor, max_cost=12.0, timeout_s=600.0)
    assert shorter.spec.placement.timeout_s == 600.0
    assert [note for note in shorter.notes() if "$1.00" in note]
    with pytest.raises(InvalidSpec) as caught:
        launched(on="local", max_cost=12.0)
    assert caught.value.fields == ("max_cost",)
    executor.price = None
    with pytest.raises(InvalidSpec):
        launched(on=executor, max_cost=12.0)
    executor.price = 0.0
    free = launched(on=executor, max_cost=12.0)
    assert free.spec.placement.timeout_s == launched(on=executor).spec.placement.timeout_s


def test_the_price_of_the_launch_is_recorded_and_counts(launched):
    draft = launched(on=Priced())
    journal.record_run(draft.store, draft.spec, executor="local")
    run = Run(draft.spec, draft.executor, draft.store, None)
    status = RunStatus(tuple(replica(rank, started_at=run._clock.time() - 3600.0) for rank in range(4)))
    assert run.cost(status) is None
    journal.record_intent(draft.store, draft.spec.run_id, draft.plan.request, None, hourly_usd=draft.hourly_usd())
    again = Run(draft.spec, draft.executor, draft.store, None)
    found = again.cost(status)
    assert found.hourly_usd == 1.5
    assert found.so_far_usd == pytest.approx(6.0, abs=0.1)
    assert found.at_most_usd == pytest.approx(1.5 * 4 * 24)
    assert replace(found, so_far_usd=6.0).to_json()["so_far_usd"] == 6.0
