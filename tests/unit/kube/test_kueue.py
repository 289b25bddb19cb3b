"""What Kueue says about a run in one of its queues: one row for each text that Kueue 0.18 was seen to write."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.kube.kueue import (
    Cause,
    QueueState,
    pending_path,
    queue_of,
    queue_state,
    selector,
    with_position,
    with_preemptor,
    workload_of,
    workloads_path,
)
from atoll.status import Reason, ReplicaState

PENDING, FAILED = ReplicaState.PENDING, ReplicaState.FAILED
AT = "2026-11-17T04:00:00Z"
COULD_NOT = "couldn't assign flavors to pod set main: "
FULL = COULD_NOT + "insufficient unused quota for cpu in flavor default, 600m more needed"
TOO_MUCH = (
    "insufficient quota for cpu in flavor default, previously considered podsets requests (0) + current podset "
    "request (1800m) > maximum capacity (1)"
)
PREEMPTED = (
    "Preempted to accommodate a workload (UID: w-2, JobUID: j-2) due to prioritization in the ClusterQueue; preemptor "
    "path: /team; preemptee path: /team"
)


def condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": AT}


def workload(
    *conditions: dict[str, Any],
    uid: str = "j-1",
    name: str = "job-a-1",
    owner: str = "a",
    active: bool = True,
    **status: Any,
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "uid": f"w-{uid}",
            "labels": {"kueue.x-k8s.io/job-uid": uid},
            "ownerReferences": [{"kind": "Job", "name": owner, "uid": uid, "controller": True}],
            "creationTimestamp": AT,
        },
        "spec": {"queueName": "team", "active": active},
        "status": {"conditions": list(conditions), **status},
    }


def waiting(message: str, reason: str = "Pending") -> dict[str, Any]:
    return condition("QuotaReserved", reason, message, "False")


def evictions(**counts: int) -> dict[str, Any]:
    return {"evictions": [{"reason": reason, "underlyingCause": "", "count": n} for reason, n in counts.items()]}


def read(*conditions: dict[str, Any], **given: Any) -> QueueState:
    return queue_state(workload(*conditions, **given), queue="team")


# Why it waits.


@pytest.mark.parametrize(
    ("found", "cause", "reason", "fields"),
    [
        (waiting(FULL), Cause.FULL, Reason.QUOTA, {"needed": {"cpu": "600m"}}),
        (waiting(COULD_NOT + TOO_MUCH), Cause.NEVER_FITS, Reason.QUOTA, {"not_covered": []}),
        (
            waiting(COULD_NOT + "resource nvidia.com/gpu unavailable in ClusterQueue"),
            Cause.NEVER_FITS,
            Reason.QUOTA,
            {"not_covered": ["nvidia.com/gpu"], "too_much": []},
        ),
        (
            waiting(FULL + ". Pending the preemption of 2 workload(s)"),
            Cause.PREEMPTING,
            Reason.QUOTA,
            {"preempting": 2, "needed": {"cpu": "600m"}},
        ),
        (
            waiting("LocalQueue nope doesn't exist", "Inadmissible"),
            Cause.QUEUE_MISSING,
            Reason.CONFIG,
            {"missing_or_held": {"kind": "LocalQueue", "name": "nope"}},
        ),
        (
            waiting("ClusterQueue nonesuch doesn't exist", "Inadmissible"),
            Cause.QUEUE_MISSING,
            Reason.CONFIG,
            {"missing_or_held": {"kind": "ClusterQueue", "name": "nonesuch"}},
        ),
        (
            waiting("LocalQueue held is inactive", "Inadmissible"),
            Cause.QUEUE_HELD,
            Reason.CONFIG,
            {"missing_or_held": {"kind": "LocalQueue", "name": "held"}},
        ),
        (waiting("the rules of next year", "Inadmissible"), Cause.OTHER, Reason.CONFIG, {}),
        (waiting("the words of next year"), Cause.OTHER, Reason.QUOTA, {}),
    ],
)
def test_the_condition_says_why_it_waits(
    found: dict[str, Any], cause: Cause, reason: Reason, fields: dict[str, Any]
) -> None:
    state = read(found)
    assert (state.cause, state.state, state.reason) == (cause, PENDING, reason)
    assert state.fields["queue"] == "team"
    assert {name: state.fields[name] for name in fields} == fields
    assert "team" in state.message


def test_a_run_that_never_fits_says_how_much_the_queue_has() -> None:
    state = read(waiting(COULD_NOT + TOO_MUCH))
    sizes = {"resource": "cpu", "flavor": "default", "request": "1800m", "capacity": "1"}
    assert state.fields["too_much"] == [sizes]
    assert state.is_hopeless
    assert "maximum capacity (1)" in state.message


def test_kueue_before_0_14_2_says_in_other_words_that_a_run_never_fits() -> None:
    earlier = "insufficient quota for cpu in flavor default, request > maximum capacity (24 > 16)"
    state = read(waiting(COULD_NOT + earlier))
    assert (state.cause, state.is_hopeless) == (Cause.NEVER_FITS, True)
    sizes = {"resource": "cpu", "flavor": "default", "request": "24", "capacity": "16"}
    assert state.fields["too_much"] == [sizes]
    other = "insufficient unused quota for cpu in flavor spot, 8 more needed"
    assert read(waiting(f"{COULD_NOT}{earlier}, {other}")).cause is Cause.FULL


def test_a_run_that_fits_into_another_flavor_only_waits() -> None:
    both = f"{COULD_NOT}{TOO_MUCH}, insufficient unused quota for cpu in flavor spot, 2 more needed"
    state = read(waiting(both))
    assert (state.cause, state.is_hopeless) == (Cause.FULL, False)
    assert state.fields["needed"] == {"cpu": "2"}


def test_several_resources_are_all_named() -> None:
    more = "insufficient unused quota for nvidia.com/gpu in flavor h100, 8 more needed"
    assert read(waiting(f"{FULL}, {more}")).fields["needed"] == {"cpu": "600m", "nvidia.com/gpu": "8"}


def test_without_a_condition_it_stands_in_line() -> None:
    state = read()
    assert (state.cause, state.reason, state.is_queued) == (Cause.IN_LINE, Reason.QUOTA, True)


def test_an_admitted_run_only_waits_for_its_pods() -> None:
    state = read(condition("QuotaReserved"), condition("Admitted"))
    assert (state.cause, state.state, state.reason, state.is_queued) == (
        Cause.ADMITTED,
        PENDING,
        Reason.STARTING,
        False,
    )


def test_an_admission_check_is_named() -> None:
    checks = [{"name": "nodes", "state": "Pending", "message": "no nodes yet"}, {"name": "budget", "state": "Ready"}]
    state = read(condition("QuotaReserved"), admissionChecks=checks)
    assert (state.cause, state.reason, state.fields["checks"]) == (Cause.CHECKS, Reason.CAPACITY, ["nodes"])


@pytest.mark.parametrize(
    ("waited_s", "cause", "reason"),
    [(0.5, Cause.NEW, Reason.WAITING), (10.0, Cause.NO_WORKLOAD, Reason.CONFIG)],
)
def test_no_workload_is_an_error_after_a_while(waited_s: float, cause: Cause, reason: Reason) -> None:
    state = queue_state(None, queue="team", waited_s=waited_s)
    assert (state.cause, state.state, state.reason, state.fields) == (cause, PENDING, reason, {"queue": "team"})


# Position.


def pending(name: str, local: int, cluster: int) -> dict[str, Any]:
    owner = {"kind": "Job", "name": f"of-{name}", "uid": f"j-{name}"}
    return {
        "metadata": {"name": name, "ownerReferences": [owner]},
        "priority": 0,
        "localQueueName": "team",
        "positionInLocalQueue": local,
        "positionInClusterQueue": cluster,
    }


def test_the_position_counts_from_one_and_names_what_is_ahead() -> None:
    items = [pending("x", 0, 0), pending("y", 1, 3), pending("job-a-1", 2, 4), pending("z", 3, 5)]
    state = with_position(read(waiting(FULL)), workload(), items)
    assert state.fields["position"] == 5
    assert state.fields["ahead"] == ["Job `of-x`", "Job `of-y`"]
    assert state.fields["ahead_in_other_queues"] == 2
    assert "position 5" in state.message
    assert "`of-y`" in state.message


def test_the_first_in_line_has_nothing_ahead() -> None:
    state = with_position(read(), workload(), [pending("job-a-1", 0, 0)])
    assert (state.fields["position"], state.fields["ahead"]) == (1, [])


def test_many_runs_ahead_are_counted() -> None:
    items = [pending(f"w{n}", n, n) for n in range(40)] + [pending("job-a-1", 40, 40)]
    state = with_position(read(waiting(FULL)), workload(), items)
    assert (state.fields["position"], len(state.fields["ahead"])) == (41, 40)
    assert len(state.message) < 250


@pytest.mark.parametrize("items", [[], [pending("other", 0, 0)]])
def test_a_list_without_the_run_changes_nothing(items: list[dict[str, Any]]) -> None:
    before = read(waiting(FULL))
    assert with_position(before, workload(), items) == before


def test_a_missing_queue_has_no_position() -> None:
    before = read(waiting("LocalQueue nope doesn't exist", "Inadmissible"))
    assert with_position(before, workload(), [pending("job-a-1", 0, 0)]) == before


# Evictions.


def test_a_preempted_run_says_for_whom_and_how_often() -> None:
    state = read(condition("Evicted", "Preempted", PREEMPTED), waiting(FULL), schedulingStats=evictions(Preempted=2))
    assert (state.cause, state.state, state.reason, state.evictions) == (Cause.FULL, PENDING, Reason.PREEMPTED, 2)
    assert state.fields["preemptor"] == {
        "uid": "j-2",
        "workload_uid": "w-2",
        "why": "prioritization in the ClusterQueue",
    }
    assert state.fields["evictions"] == {"Preempted": 2}
    assert state.fields["needed"] == {"cpu": "600m"}
    assert state.preemptor_uid == "j-2"


def test_the_preemptor_is_named_if_its_workload_can_be_read() -> None:
    state = read(condition("Evicted", "Preempted", PREEMPTED), waiting(PREEMPTED))
    named = with_preemptor(state, workload(uid="j-2", owner="urgent"))
    assert named.fields["preemptor"]["name"] == "Job `urgent`"
    assert "Job `urgent`" in named.message
    assert "j-2" not in named.message
    assert named.preemptor_uid is None
    assert with_preemptor(state, None) == state


def test_just_after_an_eviction_only_the_eviction_is_known() -> None:
    for more in (waiting(PREEMPTED), condition("Admitted")):
        state = read(condition("Evicted", "Preempted", PREEMPTED), more, schedulingStats=evictions(Preempted=1))
        assert (state.cause, state.reason, state.evictions) == (Cause.EVICTED, Reason.PREEMPTED, 1)
        assert state.message.count("preempted") == 1


def test_a_run_that_came_back_keeps_its_count() -> None:
    before = condition("Evicted", "Preempted", f"Previously: {PREEMPTED}", "False")
    state = read(before, condition("QuotaReserved"), condition("Admitted"), schedulingStats=evictions(Preempted=1))
    assert (state.cause, state.reason, state.evictions) == (Cause.ADMITTED, Reason.STARTING, 1)
    assert state.preemptor_uid is None


def test_a_preempted_run_that_no_longer_fits_is_hopeless() -> None:
    state = read(condition("Evicted", "Preempted", PREEMPTED), waiting(COULD_NOT + TOO_MUCH))
    assert (state.cause, state.reason, state.is_hopeless) == (Cause.NEVER_FITS, Reason.QUOTA, True)


def test_pods_that_were_not_ready_in_time_are_tried_again() -> None:
    text = "Exceeded the PodsReady timeout ns/job-a-1"
    state = read(
        condition("Evicted", "PodsReadyTimeout", text),
        condition("Requeued", "PodsReadyTimeout", text, "False"),
        waiting(text),
        requeueState={"count": 1, "requeueAt": "2026-11-17T04:02:00Z"},
        schedulingStats=evictions(PodsReadyTimeout=1),
    )
    assert (state.cause, state.state, state.reason) == (Cause.BACKOFF, PENDING, Reason.PREEMPTED)
    assert (state.fields["requeue_at"], state.evictions) == ("2026-11-17T04:02:00Z", 1)


def test_a_queue_that_was_stopped_keeps_its_reason_after_the_eviction() -> None:
    state = read(
        condition("Evicted", "LocalQueueStopped", "The LocalQueue is stopped"),
        waiting("LocalQueue team is inactive", "Inadmissible"),
    )
    assert (state.cause, state.reason, state.fields["evicted"]) == (
        Cause.QUEUE_HELD,
        Reason.CONFIG,
        "LocalQueueStopped",
    )


# Deactivation: the Job stays suspended for ever.


@pytest.mark.parametrize(
    ("why", "cause", "reason"),
    [
        ("MaximumExecutionTimeExceeded", Cause.TIME_LIMIT, Reason.TIMEOUT),
        ("RequeuingLimitExceeded", Cause.NOT_READY, Reason.UNSCHEDULABLE),
        ("AdmissionCheck", Cause.DEACTIVATED, Reason.BACKEND),
    ],
)
def test_what_kueue_deactivates_has_failed(why: str, cause: Cause, reason: Reason) -> None:
    text = "The workload is deactivated due to exceeding something"
    gone = condition("Evicted", f"DeactivatedDueTo{why}", text)
    state = read(gone, waiting(text), active=False, schedulingStats=evictions(Deactivated=1))
    assert (state.cause, state.state, state.reason, state.fields["why"]) == (cause, FAILED, reason, why)
    assert text in state.message
    assert state.at == 1794888000.0


@pytest.mark.parametrize("conditions", [(), (condition("Evicted", "Deactivated", "The workload is deactivated"),)])
def test_what_a_person_deactivates_is_held(conditions: tuple[dict[str, Any], ...]) -> None:
    state = read(*conditions, waiting("The workload is deactivated"), active=False)
    assert (state.cause, state.state, state.reason) == (Cause.HELD, PENDING, Reason.WAITING)
    assert not state.is_queued


# Finding.


def test_a_workload_is_found_by_label_or_owner_and_never_by_name() -> None:
    ours, other = workload(name="n-1"), workload(uid="j-9", name="job-j-1-12345")
    unlabelled = workload(uid="j-5", name="n-5")
    del unlabelled["metadata"]["labels"]
    found = [other, unlabelled, ours]
    assert workload_of(found, "j-1") is ours
    assert workload_of(found, "j-5") is unlabelled
    assert workload_of(found, "12345") is None


def test_the_newest_of_two_workloads_counts() -> None:
    old, new = workload(name="old"), workload(name="new")
    new["metadata"]["creationTimestamp"] = "2026-11-17T05:00:00Z"
    assert workload_of([new, old], "j-1") is new


def test_paths_and_selectors() -> None:
    assert workloads_path("ns") == "/apis/kueue.x-k8s.io/v1beta2/namespaces/ns/workloads"
    assert pending_path("ns", "q") == (
        "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/ns/localqueues/q/pendingworkloads"
    )
    assert selector("a") == {"labelSelector": "kueue.x-k8s.io/job-uid=a"}
    assert selector("a", "b") == {"labelSelector": "kueue.x-k8s.io/job-uid in (a,b)"}


def test_the_queue_is_read_from_the_object() -> None:
    assert queue_of({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}}}) == "team"
    assert queue_of({"metadata": {}}) == ""
