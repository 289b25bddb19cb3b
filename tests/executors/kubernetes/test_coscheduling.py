"""Runs whose replicas a second scheduler places together or not at all. CI reads the transcripts only."""

from __future__ import annotations

from atoll.status import Reason, ReplicaState
from services.kubernetes.scenario import Scenario, rows

GANG = "coscheduling:coscheduling"


def test_a_group_that_is_too_big_starts_no_pod(coscheduling_scenario: Scenario):
    """Two nodes have 1000 processors each, so that two of three replicas would fit."""
    scenario = coscheduling_scenario
    run = scenario.program("true", 3, cpus=600.0, memory_gib=0.1, gang=GANG)
    status = scenario.until(run, lambda found: all(row.reason is Reason.UNSCHEDULABLE for row in found.replicas))
    assert {row.state for row in status.replicas} == {ReplicaState.PENDING}
    scenario.until(run, lambda found: all("Insufficient cpu" in row.message for row in found.replicas))
    assert all("or none, and none starts" in row.message for row in scenario.status(run).replicas)
    run.cancel()
    scenario.ended(run)


def test_a_group_that_fits_runs(coscheduling_scenario: Scenario):
    run = coscheduling_scenario.program("true", 3, cpus=600.0 / 3, memory_gib=0.1, gang=GANG)
    assert rows(coscheduling_scenario.ended(run)) == [(ReplicaState.SUCCEEDED, Reason.OK, 0, 0)] * 3
