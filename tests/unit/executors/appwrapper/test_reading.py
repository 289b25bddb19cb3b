"""The status of a run in an AppWrapper: recorded transcripts, and states that no scenario shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll._time import SYSTEM_CLOCK
from atoll.context import TIMED_OUT, TOO_OLD
from atoll.errors import RunNotFound
from atoll.executors.appwrapper import executor as executor_module
from atoll.executors.appwrapper.executor import AppWrapperExecutor
from atoll.executors.appwrapper.reading import (
    Snapshot,
    attempt_of,
    end_annotation,
    has_restart,
    kept_end,
    kept_number,
    kept_tail,
    notes_to_keep,
    wrapper_status,
)
from atoll.executors.appwrapper.restart import next_attempt
from atoll.executors.appwrapper.wrappers import Wrappers
from atoll.handle import RunHandle
from atoll.kube.appwrapper import MCAD, PREFIX, V1BETA2
from atoll.kube.gang import KUEUE_QUEUE
from atoll.kube.kueue import Cause, QueueState, queue_state
from atoll.kube.names import ATTEMPT, COMMAND, CONTROLLER_UID, ENDED, INDEX, MAX_RESTARTS, POKE
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus
from repository import TESTS
from services.kubernetes.wrapper_transcripts import WrapperTranscript

TRANSCRIPTS = sorted((TESTS / "executors" / "appwrapper" / "transcripts").glob("*.json"))
PENDING, RUNNING, SUCCEEDED = ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.SUCCEEDED
FAILED, CANCELLED, LOST = ReplicaState.FAILED, ReplicaState.CANCELLED, ReplicaState.LOST
UID = "uid-of-the-job"


def wrapper(status: dict[str, Any], dialect=V1BETA2, *, restarts: int = 0, **more: Any) -> dict[str, Any]:
    annotations = {MAX_RESTARTS: str(restarts), ATTEMPT: "0", **more.pop("annotations", {})}
    metadata = {"name": "x", "namespace": "n", "uid": "u", "annotations": annotations, **more.pop("metadata", {})}
    return {"apiVersion": dialect.api_version, "kind": "AppWrapper", "metadata": metadata, "status": status,
            "spec": more}  # fmt: skip


def job(*conditions: str, command: str = "own", **status: Any) -> dict[str, Any]:
    listed = [{"type": each, "status": "True", "reason": "MaxFailedIndexesExceeded"} for each in conditions]
    spec = {"completions": 2, "backoffLimitPerIndex": 0, "maxFailedIndexes": 0}
    return {"metadata": {"name": "x", "uid": UID, "annotations": {COMMAND: command}}, "spec": spec,
            "status": {"conditions": listed, **status}}  # fmt: skip


def pod(rank: int, phase: str = "Running", code: int | None = None, *, uid: str = UID) -> dict[str, Any]:
    state: dict[str, Any] = {"running": {"startedAt": "2026-11-18T09:00:00Z"}}
    if code is not None:
        state = {"terminated": {"exitCode": code, "startedAt": "2026-11-18T09:00:00Z",
                                "finishedAt": "2026-11-18T09:01:00Z", "message": "no luck"}}  # fmt: skip
    marks = {INDEX: str(rank), CONTROLLER_UID: uid}
    status = {"phase": phase, "containerStatuses": [{"name": "replica", "state": state}]}
    metadata = {"name": f"x-{rank}-{uid[:3]}", "labels": marks, "annotations": {INDEX: str(rank)}}
    return {"metadata": metadata, "spec": {}, "status": status}


def read(seen: Snapshot) -> list[tuple[ReplicaState, Reason]]:
    return [(row.state, row.reason) for row in wrapper_status(seen, replicas=2).replicas]


FAILURE = {"job": job("FailureTarget", "Failed", failedIndexes="1"), "pods": [pod(1, "Failed", 3)]}
GOING = {"job": job(active=2), "pods": [pod(0), pod(1)]}


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_a_recorded_run_gives_the_same_rows_again(path: Path):
    for recorded, found in WrapperTranscript.load(path).replayed():
        assert found == recorded


def test_there_are_transcripts():
    assert len(TRANSCRIPTS) >= 10


@pytest.mark.parametrize(
    ("status", "more", "wanted"),
    [
        ({}, {}, (PENDING, Reason.WAITING)),
        ({"phase": "Suspended"}, {}, (PENDING, Reason.WAITING)),
        ({"phase": "Resuming"}, {}, (PENDING, Reason.WAITING)),
        ({"phase": "Running"}, GOING, (RUNNING, Reason.OK)),
        ({"phase": "Succeeded"}, {}, (SUCCEEDED, Reason.OK)),
        ({"phase": "Resetting", "resettingCount": 1}, {}, (PENDING, Reason.RESTARTING)),
        ({"phase": "Suspending"}, GOING, (RUNNING, Reason.STOPPING)),
        ({"phase": "Levitating"}, {}, (PENDING, Reason.BACKEND)),
        ({"phase": "Levitating"}, GOING, (RUNNING, Reason.OK)),
    ],
    ids=str,
)
def test_every_phase_of_v1beta2(status, more, wanted):
    assert read(Snapshot(wrapper(status), **{"job": None, **more})) == [wanted] * 2


@pytest.mark.parametrize(
    ("state", "more", "wanted"),
    [
        ("", {}, (PENDING, Reason.WAITING)),
        ("Pending", {}, (PENDING, Reason.WAITING)),
        ("Running", {}, (PENDING, Reason.WAITING)),
        ("Running", GOING, (RUNNING, Reason.OK)),
        ("Running", {"job": job("Complete", completedIndexes="0,1")}, (SUCCEEDED, Reason.OK)),
        ("Completed", {"job": job("Complete", completedIndexes="0,1")}, (SUCCEEDED, Reason.OK)),
        ("Completed", {}, (LOST, Reason.LOST)),
        ("Failed", {}, (PENDING, Reason.CONFIG)),
        ("Dreaming", {}, (PENDING, Reason.BACKEND)),
    ],
    ids=str,
)
def test_every_state_of_mcad_is_what_the_job_says(state, more, wanted):
    assert read(Snapshot(wrapper({"state": state}, MCAD), **{"job": None, **more})) == [wanted] * 2


@pytest.mark.parametrize("state", ["Running", "Completed", "Failed", "Deleted"])
def test_a_failed_job_is_the_end_on_mcad_whatever_its_state(state):
    found = read(Snapshot(wrapper({"state": state}, MCAD), **FAILURE))
    assert found == [(CANCELLED, Reason.CANCELLED), (FAILED, Reason.USER_ERROR)]


@pytest.mark.parametrize("dialect", [V1BETA2, MCAD], ids=str)
def test_a_failed_job_with_restarts_left_is_no_end(dialect):
    status = {"state": "Completed", "phase": "Running"}
    assert read(Snapshot(wrapper(status, dialect, restarts=1), **FAILURE)) == [(PENDING, Reason.RESTARTING)] * 2


def test_a_rank_that_succeeds_has_ended_unless_all_may_start_again():
    seen = {"job": job(completedIndexes="0", active=1), "pods": [pod(0, "Succeeded", 0), pod(1)]}
    assert read(Snapshot(wrapper({"phase": "Running"}), **seen))[0] == (SUCCEEDED, Reason.OK)
    assert read(Snapshot(wrapper({"phase": "Running"}, restarts=1), **seen))[0] == (RUNNING, Reason.OK)
    seen["job"] = job("SuccessCriteriaMet", completedIndexes="0,1")
    assert read(Snapshot(wrapper({"phase": "Running"}, restarts=1), **seen))[0] == (SUCCEEDED, Reason.OK)


def test_a_rank_that_fails_has_ended_when_the_job_says_so():
    seen = {"job": job(active=1), "pods": [pod(0), pod(1, "Failed", 3)]}
    assert read(Snapshot(wrapper({"phase": "Running"}), **seen))[1] == (RUNNING, Reason.OK)
    seen["job"] = job("FailureTarget", failedIndexes="1")
    assert read(Snapshot(wrapper({"phase": "Running"}), **seen))[1] == (FAILED, Reason.USER_ERROR)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_rank_whose_pod_outlives_the_job_has_not_ended(is_kept):
    rows = RunStatus((ReplicaStatus(0, CANCELLED, Reason.CANCELLED), ReplicaStatus(1, FAILED, Reason.TIMEOUT)))
    notes = {f"{ENDED}0": end_annotation(rows, {}, 0)} if is_kept else {}
    ended = wrapper({"phase": "Failed"}, annotations=notes)
    assert read(Snapshot(ended, None, [pod(0), pod(1, "Failed", 3)]))[0] == (RUNNING, Reason.STOPPING)
    assert all(state in (FAILED, CANCELLED) for state, _ in read(Snapshot(ended, None, [])))


@pytest.mark.parametrize(
    ("annotations", "is_restarted"),
    [
        ({}, True),
        ({f"{PREFIX}terminalExitCodes": "4,3"}, False),
        ({f"{PREFIX}terminalExitCodes": "4"}, True),
        ({f"{PREFIX}retryableExitCodes": "4"}, False),
        ({f"{PREFIX}retryableExitCodes": "3"}, True),
    ],
    ids=str,
)
def test_exit_codes_decide_about_restarts(annotations, is_restarted):
    rows = RunStatus((ReplicaStatus(0, FAILED, Reason.USER_ERROR, "", 3), ReplicaStatus(1, CANCELLED)))
    assert has_restart(wrapper({}, restarts=1, annotations=annotations), rows) is is_restarted
    assert not has_restart(wrapper({"resettingCount": 1}, restarts=1, annotations=annotations), rows)


@pytest.mark.parametrize(
    ("code", "command", "is_restarted"),
    [(1, "replica", True), (TIMED_OUT, "replica", False), (TOO_OLD, "replica", False), (TIMED_OUT, "own", True)],
)
def test_an_end_that_no_restart_changes_is_not_restarted_on_mcad(code, command, is_restarted):
    items = [{"generictemplate": job(command=command)}]
    rows = RunStatus((ReplicaStatus(0, FAILED, Reason.USER_ERROR, exit_code=code),))
    assert has_restart(wrapper({}, MCAD, restarts=1, resources={"GenericItems": items}), rows) is is_restarted


def test_the_end_is_kept_when_the_failure_is_visible_and_again_when_every_pod_has_ended():
    early = Snapshot(
        wrapper({"phase": "Running"}), job("FailureTarget", failedIndexes="1"), [pod(0), pod(1, "Failed", 3)]
    )
    assert notes_to_keep(early, 2, {}).keys() == {f"{ENDED}0"}
    late = Snapshot(wrapper({"phase": "Running"}), **FAILURE)
    notes = notes_to_keep(late, 2, {1: "the last line"})
    assert notes.keys() == {f"{ENDED}0", POKE}
    kept = wrapper({"phase": "Failed"}, annotations=notes)
    assert notes_to_keep(replace(late, wrapper=kept), 2, {}) == {}
    assert notes_to_keep(Snapshot(wrapper({}), **GOING), 2, {}) == {}
    assert notes_to_keep(replace(late, wrapper=wrapper({"state": "Completed"}, MCAD)), 2, {}) == {}
    assert kept_tail(kept, 0, 1) == ["the last line"]
    assert kept_tail(kept, 0, 0) is None
    before, after = wrapper_status(late, replicas=2), wrapper_status(Snapshot(kept, None), replicas=2)
    assert [(r.state, r.reason, r.exit_code) for r in after.replicas] == [
        (r.state, r.reason, r.exit_code) for r in before.replicas
    ]


def test_the_end_of_an_attempt_that_is_being_reset_is_not_that_of_the_next_one():
    """The controller counts the reset before it deletes the Job."""
    status = {"phase": "Resetting", "resettingCount": 1}
    notes = notes_to_keep(Snapshot(wrapper(status, restarts=1), **FAILURE), 2, {1: "the last line"})
    assert notes.keys() == {f"{ENDED}0", POKE}
    resumed = wrapper({"phase": "Resuming", "resettingCount": 1}, restarts=1, annotations=notes)
    assert read(Snapshot(resumed, None)) == [(PENDING, Reason.WAITING)] * 2
    assert kept_number(resumed, 0) == 0


def test_a_lost_node_wakes_the_controller_once():
    lost = pod(1)
    lost["metadata"]["deletionTimestamp"] = "2026-11-18T09:00:00Z"
    lost["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "gone"}
    ]
    seen = Snapshot(wrapper({"phase": "Running"}), job(active=1), [pod(0), lost])
    notes = notes_to_keep(seen, 2, {})
    assert notes == {POKE: lost["metadata"]["name"]}
    assert notes_to_keep(replace(seen, wrapper=wrapper({"phase": "Running"}, annotations=notes)), 2, {}) == {}


def test_an_end_that_was_kept_counts_while_the_controller_has_not_said_that_it_gave_up():
    notes = notes_to_keep(Snapshot(wrapper({"phase": "Running"}), **FAILURE), 2, {})
    found = read(Snapshot(wrapper({"phase": "Running"}, annotations=notes), None))
    assert found == [(CANCELLED, Reason.CANCELLED), (FAILED, Reason.USER_ERROR)]


def test_a_thousand_ranks_are_kept_in_few_bytes():
    rows = RunStatus(tuple(ReplicaStatus(rank, CANCELLED, Reason.CANCELLED, "stopped") for rank in range(1000)))
    text = end_annotation(rows, {}, 0)
    assert len(text) < 300
    assert kept_end(wrapper({}, annotations={f"{ENDED}0": text}), 0, 1000) == rows


def test_the_end_of_an_attempt_has_a_limited_size():
    said = "\N{WATER WAVE}" * 3000
    rows = RunStatus(
        tuple(ReplicaStatus(n, FAILED, Reason.USER_ERROR, f"{n % 9}{said}", 1 + n % 2) for n in range(1000))
    )
    text = end_annotation(rows, dict.fromkeys(range(4), said), 0)
    assert len(text) <= 24_000
    kept = kept_end(wrapper({}, annotations={f"{ENDED}0": text}), 0, 1000)
    assert kept is not None
    assert [(row.state, row.exit_code) for row in kept.replicas[:2]] == [(FAILED, 1), (FAILED, 2)]


@pytest.mark.parametrize("dialect", [V1BETA2, MCAD])
def test_the_annotations_of_many_attempts_fit_into_the_limit_of_kubernetes(dialect):
    there: dict[str, Any] = {"mine": "x" * 50_000}
    for attempt in range(30):
        status = {"phase": "Running", "resettingCount": attempt} if dialect is V1BETA2 else {"state": "Completed"}
        held = wrapper(status, dialect, annotations={**there, ATTEMPT: str(attempt if dialect is MCAD else 0)})
        if dialect is V1BETA2:
            notes = notes_to_keep(Snapshot(held, **FAILURE), 2, {1: "é" * 5000})
        else:
            notes = next_attempt(Snapshot(held, None), "x" * 24_000)["metadata"]["annotations"]
            there = {"mine": there["mine"]}
        there = {key: text for key, text in {**there, **notes}.items() if text is not None and key != POKE}
        assert sum(len(key) + len(text) for key, text in there.items()) < 256 * 1024
        assert {"mine", f"{ENDED}{attempt}"} <= there.keys()


def test_the_log_of_an_attempt_is_that_of_this_attempt(monkeypatch):
    first = end_annotation(RunStatus((ReplicaStatus(0, FAILED, Reason.USER_ERROR, "", 3),)), {0: "before"}, 0)
    queue = QueueState(PENDING, Reason.WAITING, Cause.IN_LINE, "", evictions=1)
    mcad = Snapshot(wrapper({}, MCAD, annotations={ATTEMPT: "1", f"{ENDED}0": first}), **GOING)
    evicted = Snapshot(wrapper({"phase": "Running", "resettingCount": 1}, annotations={f"{ENDED}0": first}), **GOING)
    monkeypatch.setattr(executor_module, "last_lines", lambda *_: iter(["now"]))
    for seen, current in ((mcad, 1), (replace(evicted, queue=queue), 2)):
        found = SimpleNamespace(look=lambda *_, seen=seen: seen, jobs=SimpleNamespace(client=None))
        monkeypatch.setattr(AppWrapperExecutor, "_of", lambda *_, found=found: found)
        executor, handle = AppWrapperExecutor(), RunHandle("appwrapper", "n", "x", 2)
        assert list(executor.attempt_logs(handle, 0, 0)) == ["before"]
        assert list(executor.attempt_logs(handle, 0, current)) == ["now"]
        with pytest.raises(RunNotFound):
            executor.attempt_logs(handle, 0, current + 1)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "[{}]", '[{"state": "x"}]', "no json", '[{"state":"failed"}]']
)
def test_a_note_that_somebody_has_changed_is_no_note(text):
    assert kept_end(wrapper({}, annotations={f"{ENDED}0": text}), 0, 2) is None


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        ("CreateFailed", Reason.CONFIG),
        ("MissingComponent", Reason.KILLED),
        ("FailedComponent", Reason.USER_ERROR),
        ("InsufficientPodsReady", Reason.UNSCHEDULABLE),
        ("SomethingNew", Reason.BACKEND),
    ],
)
def test_a_failed_appwrapper_that_nobody_watched_says_what_it_knows(reason, wanted):
    unhealthy = {"type": "Unhealthy", "status": "True", "reason": reason, "message": "words of the controller"}
    found = wrapper_status(Snapshot(wrapper({"phase": "Failed", "conditions": [unhealthy]}), None), replicas=2)
    assert {(row.state, row.reason) for row in found.replicas} == {(FAILED, wanted)}
    assert "words of the controller" in found.replicas[0].message


def test_a_controller_that_is_silent_for_long_may_be_down():
    created = {"creationTimestamp": "2026-11-18T09:00:00Z"}
    new = wrapper({}, metadata=created)
    texts = [
        wrapper_status(Snapshot(new, None, now=1_794_992_400.0 + s), replicas=1).replicas[0].message for s in (1, 99)
    ]
    assert texts[0] != texts[1]
    assert "down" in texts[1]


def test_kueue_says_why_a_suspended_appwrapper_waits():
    queue = QueueState(Cause.FULL, PENDING, Reason.QUOTA, "full", evictions=2)
    found = wrapper_status(Snapshot(wrapper({"phase": "Suspended"}), None, queue=queue), replicas=2)
    assert [(r.reason, r.message, r.attempt) for r in found.replicas] == [(Reason.QUOTA, "full", 2)] * 2
    ended = QueueState(Cause.TIME_LIMIT, FAILED, Reason.TIMEOUT, "over")
    assert read(Snapshot(wrapper({"phase": "Suspended"}), None, queue=ended)) == [(FAILED, Reason.TIMEOUT)] * 2


@pytest.mark.parametrize("phase", ["", "Suspended"])
def test_an_admitted_appwrapper_without_a_job_names_the_controller_that_may_be_down(phase):
    admitted = {"type": "Admitted", "status": "True", "lastTransitionTime": "2026-11-18T09:00:00Z"}
    workload = {"metadata": {"name": "w"}, "status": {"conditions": [admitted]}}
    queue, at = queue_state(workload, queue="q"), 1_794_992_400.0
    texts = [
        wrapper_status(Snapshot(wrapper({"phase": phase}), None, queue=queue, now=at + s), replicas=1)
        .replicas[0]
        .message
        for s in (1, 99)
    ]
    assert texts[0] == "admitted by queue `q`"
    assert "the AppWrapper controller" in texts[1]
    assert "down" in texts[1]


def test_restarts_before_a_replica_began_do_not_deny_its_outcome():
    for command, attempt in (("replica", 0), ("own", 2)):
        seen = Snapshot(wrapper({"phase": "Succeeded", "resettingCount": 2}), job("Complete", command=command))
        assert {row.attempt for row in wrapper_status(seen, replicas=2).replicas} == {attempt}


@pytest.mark.parametrize(
    ("dialect", "status", "is_stray"),
    [
        (V1BETA2, {"phase": "Running"}, True),
        (V1BETA2, {"phase": "Failed"}, False),
        (MCAD, {"state": "Completed"}, False),
        (MCAD, {"state": "Failed"}, True),
        (MCAD, {"state": "Deleted"}, True),
    ],
)
def test_a_failed_appwrapper_of_mcad_runs_again_and_is_a_stray(monkeypatch, dialect, status, is_stray):
    inside = {"kind": "Job", "spec": {"completions": 2}}
    found = wrapper(status, dialect, components=[{"template": inside}])
    place = SimpleNamespace(namespace="n", context=None)
    jobs = SimpleNamespace(client=SimpleNamespace(connection=SimpleNamespace(place=place)))
    there = SimpleNamespace(jobs=jobs, dialect=lambda _: dialect, of_atoll=lambda _: [found])
    monkeypatch.setattr(AppWrapperExecutor, "_cluster", lambda *_: there)
    monkeypatch.setattr(executor_module, "context_of", lambda _: SimpleNamespace(run_id="r", first_rank=0))
    assert [stray.native_id for stray in AppWrapperExecutor().strays()] == (["x"] if is_stray else [])


def test_pods_of_an_earlier_job_of_the_same_name_do_not_count():
    seen = Snapshot(wrapper({"phase": "Running"}), job(active=2), [pod(0, uid="old"), pod(0), pod(1)])
    assert [pod["metadata"]["name"] for pod in seen.job_pods] == ["x-0-uid", "x-1-uid"]


def test_what_is_left_without_its_appwrapper():
    assert read(Snapshot(None, None)) == [(LOST, Reason.LOST)] * 2
    assert read(Snapshot(None, **GOING)) == [(RUNNING, Reason.BACKEND)] * 2


def test_an_appwrapper_that_is_being_deleted_stops():
    gone = wrapper({"phase": "Running"}, metadata={"deletionTimestamp": "2026-11-18T09:00:00Z"})
    assert read(Snapshot(gone, **GOING)) == [(RUNNING, Reason.STOPPING)] * 2


def test_the_next_attempt_on_mcad_is_the_same_object_with_another_number():
    before = wrapper({"state": "Completed"}, MCAD, restarts=2, resources={"GenericItems": []},
                     metadata={"labels": {"a": "b"}, "resourceVersion": "7"})  # fmt: skip
    again = next_attempt(Snapshot(before, None), "the end")
    assert again["metadata"]["annotations"] | {ATTEMPT: "1", f"{ENDED}0": "the end"} == again["metadata"]["annotations"]
    assert again["spec"] == before["spec"]
    assert not {"uid", "resourceVersion"} & again["metadata"].keys()
    assert attempt_of(again) == 1


words = st.sampled_from(["", "Running", "Failed", "Succeeded", "Completed", "Pending", "Resetting", "Suspended", "?"])


@given(words, words, st.sampled_from([V1BETA2, MCAD]), st.booleans(), st.integers(0, 2), st.integers(0, 2))
def test_no_combination_of_states_raises(phase, state, dialect, has_job, resets, restarts):
    status = {"phase": phase, "state": state, "resettingCount": resets}
    seen = Snapshot(wrapper(status, dialect, restarts=restarts), job() if has_job else None, [pod(0)])
    assert len(wrapper_status(seen, replicas=2).replicas) == 2
    assert json.loads(end_annotation(wrapper_status(seen, replicas=2), {}, 0))


@pytest.mark.parametrize(("command", "attempt"), [("own", 1), ("replica", 0)])
def test_an_eviction_counts_also_when_a_program_of_the_image_has_failed(command, attempt):
    evicted = QueueState(Cause.ADMITTED, PENDING, Reason.WAITING, "", evictions=1)
    jobs: Any = SimpleNamespace(queues=SimpleNamespace(state=lambda *_, **__: evicted))
    ended = wrapper({"phase": "Failed"}, metadata={"labels": {KUEUE_QUEUE: "q"}},
                    components=[{"template": job(command=command)}])  # fmt: skip
    queue = Wrappers(jobs, SYSTEM_CLOCK, V1BETA2).queue(ended)
    rows = wrapper_status(Snapshot(ended, None, queue=queue), replicas=2).replicas
    assert [(row.state, row.attempt) for row in rows] == [(FAILED, attempt)] * 2
