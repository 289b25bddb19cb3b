"""The status of a run from its Job, its pods and their events: one table row for each thing a cluster can say."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.journal import version_problem
from atoll.kube import bootstrap
from atoll.kube.kueue import queue_state
from atoll.kube.pod_state import needs_log, seconds
from atoll.kube.reading import indexes, lost_nodes, queue_left_s, queue_limit_s, run_status
from atoll.status import Reason, ReplicaState

PENDING, RUNNING, SUCCEEDED = ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.SUCCEEDED
FAILED, CANCELLED, LOST = ReplicaState.FAILED, ReplicaState.CANCELLED, ReplicaState.LOST
START, END = "2026-08-01T12:00:00Z", "2026-08-01T12:01:40Z"
OLDER = version_problem({"atoll": "999.0.0"})
ENDING = {"deletionTimestamp": END}


def job(
    *conditions: dict[str, Any],
    restarts: int | None = 0,
    command: str = "replica",
    timeout: str = "86400",
    metadata: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    marks = {"atoll.dev/command": command, "atoll.dev/timeout-s": timeout}
    return {
        "metadata": {"name": "j", "uid": "job", "creationTimestamp": START, "annotations": marks, **(metadata or {})},
        "spec": {"completions": 3, **({} if restarts is None else {"backoffLimitPerIndex": restarts}), **(spec or {})},
        "status": {"conditions": list(conditions), **status},
    }


def condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


SCHEDULED = condition("PodScheduled")


def pod(
    rank: int,
    phase: str,
    state: dict[str, Any] | None = None,
    *conditions: dict[str, Any],
    failures: int = 0,
    ignored: int = 0,
    created: str = START,
    metadata: dict[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    marks = {
        "batch.kubernetes.io/job-completion-index": str(rank),
        "batch.kubernetes.io/job-index-failure-count": str(failures),
        "batch.kubernetes.io/job-index-ignored-failure-count": str(ignored),
    }
    name = f"j-{rank}-{failures}{ignored}"
    containers = [] if state is None else [{"name": "replica", "state": state}]
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "creationTimestamp": created,
            "annotations": marks,
            **(metadata or {}),
        },
        "spec": {"nodeName": f"node-{rank}"},
        "status": {"phase": phase, "conditions": list(conditions), "containerStatuses": containers, **status},
    }


def ended(code: int, reason: str = "Error", message: str = "", start: str = START, end: str = END) -> dict[str, Any]:
    found = {"exitCode": code, "reason": reason, "startedAt": start, "finishedAt": end}
    return {"terminated": {**found, **({"message": message} if message else {})}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


RUNS = {"running": {"startedAt": START}}


def first(given: dict[str, Any] | None, *pods: dict[str, Any], **more: Any):
    """The status of rank 0."""
    return run_status(given, pods, replicas=3, **more).replicas[0]


# ── index sets ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, set()), ("", set()), ("0", {0}), ("0,1", {0, 1}), ("0-2", {0, 1, 2}), ("0,1,3-5,9", {0, 1, 3, 4, 5, 9}),
        ("8-1000000000", {8, 9}), ("12", set()), ("12-20", set()),
    ],
)  # fmt: skip
def test_index_sets(text, found):
    assert indexes(text, 10) == found


# ── one pod ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "reason", "words"),
    [
        (pod(0, "Pending", None, condition("PodScheduled", "Unschedulable", "0/1 nodes are available", "False")),
         Reason.UNSCHEDULABLE, "0/1 nodes are available"),
        (pod(0, "Pending", None, condition("PodScheduled", "SchedulingGated", "gated", "False")), Reason.WAITING,
         "SchedulingGated: gated"),
        (pod(0, "Pending"), Reason.WAITING, "gang"),
        (pod(0, "Pending", waiting("ContainerCreating"), SCHEDULED), Reason.STARTING, "ContainerCreating"),
        (pod(0, "Pending", None, SCHEDULED), Reason.STARTING, "starting"),
        (pod(0, "Pending", waiting("ErrImagePull", "not found"), SCHEDULED), Reason.IMAGE, "ErrImagePull: not found"),
        (pod(0, "Pending", waiting("ImagePullBackOff", "Back-off"), SCHEDULED), Reason.IMAGE, "ImagePullBackOff"),
        (pod(0, "Pending", waiting("InvalidImageName"), SCHEDULED), Reason.IMAGE, "InvalidImageName"),
        (pod(0, "Pending", waiting("CreateContainerConfigError", 'secret "x" not found'), SCHEDULED), Reason.CONFIG,
         'secret "x" not found'),
        (pod(0, "Pending", waiting("CreateContainerConfigError", "image will run as root"), SCHEDULED), Reason.CONFIG,
         "root"),
        (pod(0, "Pending", waiting("PodInitializing"), SCHEDULED, initContainerStatuses=[
            {"name": "i", "state": waiting("ErrImagePull", "no")}]), Reason.IMAGE, "ErrImagePull: no"),
        (pod(0, "Pending", waiting("PodInitializing"), SCHEDULED, initContainerStatuses=[
            {"name": "i", "state": waiting("CrashLoopBackOff", "back-off 10s")}]), Reason.CONFIG, "CrashLoopBackOff"),
    ],
)  # fmt: skip
def test_pods_that_wait(given, reason, words):
    found = first(job(active=3), given)
    assert (found.state, found.reason, found.exit_code) == (PENDING, reason, None)
    assert words in found.message


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        (ended(1), Reason.USER_ERROR, "exit code 1"),
        (ended(3, message="line\nValueError: bad\n"), Reason.USER_ERROR, "exit code 3: ValueError: bad"),
        (ended(137, "OOMKilled"), Reason.OOM, "OOMKilled"),
        (ended(137), Reason.KILLED, "SIGKILL"),
        (ended(139), Reason.KILLED, "SIGSEGV"),
        (ended(165), Reason.KILLED, "signal 37"),
        (ended(192), Reason.KILLED, "SIGRTMAX"),
        (ended(250), Reason.USER_ERROR, "exit code 250"),
        (ended(255, message="SystemExit: -1"), Reason.USER_ERROR, "exit code 255: SystemExit: -1"),
        (ended(255, "Unknown"), Reason.BACKEND, "Unknown"),
        (ended(128, "StartError", 'exec: "python": executable file not found in $PATH', "1970-01-01T00:00:00Z"),
         Reason.IMAGE, "executable file not found"),
        (ended(128, "StartError", "permission denied", "1970-01-01T00:00:00Z"), Reason.CONFIG, "permission denied"),
        (ended(137, "ContainerStatusUnknown"), Reason.BACKEND, "ContainerStatusUnknown"),
        (ended(1, message="/usr/bin/python: No module named atoll"), Reason.IMAGE, "bootstrap"),
        (ended(1, message="/usr/bin/python: No module named atoll.replica"), Reason.IMAGE, "too old"),
        (ended(1, message="ModuleNotFoundError: No module named 'atoll'"), Reason.IMAGE, "too old"),
        (ended(1, message="ModuleNotFoundError: No module named 'atolls'"), Reason.USER_ERROR, "atolls"),
        (ended(80, message=f"x\natoll.errors.ConfigError: {OLDER}\n"), Reason.IMAGE, f"{OLDER}; install Atoll"),
        (ended(80, message="SystemExit: 80"), Reason.USER_ERROR, "exit code 80"),
    ],
)  # fmt: skip
def test_containers_that_failed(state, reason, words):
    found = first(job(failedIndexes=""), pod(0, "Failed", state))
    assert (found.state, found.reason, found.exit_code) == (FAILED, reason, state["terminated"]["exitCode"])
    assert words in found.message
    assert found.host == "node-0"
    assert found.native_id == "j-0-00"


def test_a_start_error_has_no_start():
    found = first(job(), pod(0, "Failed", ended(128, "StartError", "x", "1970-01-01T00:00:00Z")))
    assert (found.started_at, found.ended_at) == (None, seconds(END))


@pytest.mark.parametrize(
    ("state", "timeout", "reason"),
    [
        (ended(143), "100", Reason.TIMEOUT),
        (ended(137), "100.9", Reason.TIMEOUT),
        (ended(124), "100", Reason.TIMEOUT),
        (ended(143), "200", Reason.KILLED),
        (ended(124), "200", Reason.USER_ERROR),
        (ended(1), "100", Reason.USER_ERROR),
    ],
)
def test_a_container_that_ends_at_its_limit(state, timeout, reason):
    assert first(job(timeout=timeout), pod(0, "Failed", state)).reason is reason


def test_earlier_pods_of_a_rank_have_used_a_part_of_its_limit():
    again = {"failures": 1, "ignored": 1}
    assert first(job(timeout="500"), pod(0, "Failed", ended(124), **again)).reason is Reason.TIMEOUT
    assert first(job(timeout="500"), pod(0, "Failed", ended(143), **again)).reason is Reason.KILLED
    assert first(job(timeout="500", command="own"), pod(0, "Failed", ended(124), **again)).reason is Reason.USER_ERROR


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"reason": "DeadlineExceeded", "message": "Pod was active too long"}, Reason.TIMEOUT),
        ({"reason": "Evicted", "message": "The node was low on resource: memory"}, Reason.PREEMPTED),
        (
            {
                "reason": "Evicted",
                "message": "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi",
            },
            Reason.KILLED,
        ),
        ({"reason": "Evicted", "message": 'Usage of EmptyDir volume "dshm" exceeds the limit "1Gi"'}, Reason.KILLED),
        (
            {"reason": "Evicted", "message": 'Container replica exceeded its local ephemeral storage limit "1Gi"'},
            Reason.KILLED,
        ),
        ({"reason": "OutOfcpu", "message": "Node didn't have enough resource"}, Reason.CAPACITY),
        ({"reason": "NodeAffinity", "message": "x"}, Reason.UNSCHEDULABLE),
        ({"reason": "UnexpectedAdmissionError", "message": "no devices"}, Reason.BACKEND),
        ({}, Reason.BACKEND),
    ],
)
def test_pods_that_kubernetes_ended(status, reason):
    found = first(job(failedIndexes="0"), pod(0, "Failed", None, **status))
    assert (found.state, found.reason) == (FAILED, reason)
    assert status.get("message", "") in found.message


def test_a_container_that_the_kubelet_does_not_find_any_more_has_run():
    last = ended(137, "ContainerStatusUnknown", "The container could not be located when the pod was deleted.")
    given = pod(0, "Failed", waiting("ContainerCreating"))
    given["status"]["containerStatuses"][0]["lastState"] = last
    found = first(job(failedIndexes="0"), given)
    assert (found.state, found.reason, found.exit_code) == (FAILED, Reason.BACKEND, 137)
    assert "could not be located" in found.message


def test_an_init_container_that_failed_is_named():
    for state, words in ((ended(7), "code 7 before"), (ended(137, "OOMKilled"), "code 137 (OOMKilled) before")):
        init = [{"name": "fetch", "state": state}]
        found = first(job(), pod(0, "Failed", waiting("PodInitializing"), initContainerStatuses=init))
        assert (found.reason, "`fetch`" in found.message, words in found.message) == (Reason.CONFIG, True, True)


def test_a_bootstrap_that_failed_is_an_image_problem():
    words = f"{bootstrap.WORDS} pip ended with code 1"
    state = ended(bootstrap.EXIT_CODE, message=f"x\n{words}\ny")
    assert first(job(command="pip"), pod(0, "Failed", state)).message == words
    assert first(job(command="pip"), pod(0, "Failed", state)).reason is Reason.IMAGE
    assert first(job(), pod(0, "Failed", state)).reason is Reason.USER_ERROR


def test_the_log_says_that_atoll_is_missing_if_the_kubelet_does_not():
    given = pod(0, "Failed", ended(1))
    assert needs_log(given, job())
    assert not needs_log(given, job(command="own"))
    assert not needs_log(pod(0, "Failed", ended(1, message="x")), job())
    assert not needs_log(pod(0, "Running", RUNS), job())
    policy = [{"name": "replica", "terminationMessagePolicy": "FallbackToLogsOnError"}]
    assert needs_log({**given, "spec": {"containers": policy}}, job())  # not everything that runs pods does it
    found = first(job(), given, log_tails={"j-0-00": "python: No module named atoll"})
    assert found.reason is Reason.IMAGE
    assert first(job(command="own"), given, log_tails={"j-0-00": "No module named atoll"}).reason is Reason.USER_ERROR


def test_success_and_running():
    done = first(job(completedIndexes="0"), pod(0, "Succeeded", ended(0, "Completed")))
    assert (done.state, done.reason, done.exit_code) == (SUCCEEDED, Reason.OK, 0)
    assert (done.started_at, done.ended_at) == (seconds(START), seconds(END))
    runs = first(job(active=3), pod(0, "Running", RUNS, condition("Ready")))
    assert (runs.state, runs.reason, runs.started_at, runs.ended_at) == (RUNNING, Reason.OK, seconds(START), None)


def test_a_sidecar_keeps_the_pod_of_an_ended_replica():
    given = pod(0, "Running", ended(0, "Completed"))
    given["status"]["containerStatuses"].append({"name": "proxy", "state": RUNS})
    found = first(job(), given)
    assert (found.state, found.reason) == (RUNNING, Reason.OK)
    assert "proxy" in found.message


# ── restarts and evictions ──────────────────────────────────────────────────────────────────────────────────────


def test_the_newest_pod_of_a_rank_counts():
    old = pod(0, "Failed", ended(1))
    new = pod(0, "Running", RUNS, failures=1, ignored=2, created="2026-08-01T12:05:00Z")
    for order in ((old, new), (new, old)):
        found = first(job(restarts=2), *order)
        assert (found.state, found.attempt, found.native_id) == (RUNNING, 3, "j-0-12")


def test_a_failed_pod_is_the_end_only_after_the_last_restart():
    again = first(job(restarts=1), pod(0, "Failed", ended(1)))
    assert (again.state, again.reason, again.attempt) == (PENDING, Reason.RESTARTING, 1)
    assert first(job(restarts=1), pod(0, "Failed", ended(1), failures=1)).state is FAILED
    assert first(job(restarts=1, failedIndexes="0"), pod(0, "Failed", ended(1))).state is FAILED
    assert first(job(restarts=None), pod(0, "Failed", ended(1))).state is PENDING


def test_an_exit_code_that_ends_the_rank_is_not_followed_by_a_restart():
    codes = {"containerName": "replica", "operator": "In", "values": [124]}
    rules = {"podFailurePolicy": {"rules": [{"action": "FailIndex", "onExitCodes": codes}]}}
    found = first(job(restarts=3, timeout="100", spec=rules), pod(0, "Failed", ended(124)))
    assert (found.state, found.reason) == (FAILED, Reason.TIMEOUT)


@pytest.mark.parametrize(
    "reason",
    [
        "EvictionByEvictionAPI",
        "DeletionByTaintManager",
        "PreemptionByScheduler",
        "DeletionByPodGC",
        "TerminationByKubelet",
    ],
)
def test_an_eviction_is_not_the_end_and_names_its_author(reason):
    evicted = pod(0, "Failed", ended(143), condition("DisruptionTarget", reason, "because"), metadata=ENDING)
    found = first(job(), evicted)
    assert (found.state, found.reason, found.attempt) == (PENDING, Reason.RESTARTING, 1)
    assert reason in found.message
    assert "because" in found.message


def test_a_pod_that_was_deleted_by_hand_fails_its_rank():
    given = pod(0, "Failed", ended(143), metadata=ENDING)
    found = first(job(failedIndexes="0"), given)
    assert (found.state, found.reason, found.exit_code) == (FAILED, Reason.KILLED, 143)
    undecided = first(job(), given)
    assert (undecided.state, undecided.reason, undecided.exit_code) == (RUNNING, Reason.STOPPING, None)


# ── the whole Job ───────────────────────────────────────────────────────────────────────────────────────────────


def states(given: dict[str, Any], *pods: dict[str, Any], **more: Any) -> list[tuple[ReplicaState, Reason]]:
    return [(row.state, row.reason) for row in run_status(given, pods, replicas=3, **more).replicas]


def test_without_a_job_every_rank_is_lost():
    assert states(None) == [(LOST, Reason.LOST)] * 3


def test_pods_that_were_removed_are_known_from_the_index_sets():
    given = job(completedIndexes="0,2", failedIndexes="1")
    assert states(given) == [(SUCCEEDED, Reason.OK), (FAILED, Reason.KILLED), (SUCCEEDED, Reason.OK)]


def test_sets_that_overlap_mean_success():
    assert states(job(completedIndexes="0-2", failedIndexes="1")) == [(SUCCEEDED, Reason.OK)] * 3


@pytest.mark.parametrize("kind", ["FailureTarget", "Failed"])
def test_the_others_were_stopped_because_one_rank_failed(kind):
    failing = condition(kind, "MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number")
    given = job(failing, failedIndexes="1")
    pods = [
        pod(0, "Running", RUNS, metadata=ENDING),
        pod(1, "Failed", ended(3)),
        pod(2, "Failed", ended(143), metadata=ENDING),
    ]
    assert states(given, *pods) == [
        (RUNNING, Reason.STOPPING),
        (FAILED, Reason.USER_ERROR),
        (CANCELLED, Reason.CANCELLED),
    ]
    assert states(given, pods[1])[0] == (CANCELLED, Reason.CANCELLED)
    rows = run_status(given, pods, replicas=3).replicas
    assert "rank 1 failed" in rows[0].message
    assert "rank 1 failed" in rows[2].message
    assert "MaxFailedIndexesExceeded" in rows[2].message


def test_a_job_that_counts_all_failures_together_has_a_culprit_too():
    given = job(condition("FailureTarget", "BackoffLimitExceeded"), restarts=None)
    rows = run_status(given, [pod(2, "Failed", ended(1))], replicas=3).replicas
    assert [row.state for row in rows] == [CANCELLED, CANCELLED, FAILED]
    assert "rank 2" in rows[0].message


def test_a_failed_rank_does_not_end_the_others():
    given = job(failedIndexes="1", active=2)
    pods = [pod(0, "Running", RUNS), pod(1, "Failed", ended(1)), pod(2, "Running", RUNS)]
    assert states(given, *pods) == [(RUNNING, Reason.OK), (FAILED, Reason.USER_ERROR), (RUNNING, Reason.OK)]


def test_the_deadline_of_the_job_is_a_time_out():
    given = job(condition("FailureTarget", "DeadlineExceeded", "Job was active longer"), completedIndexes="2")
    found = states(given, pod(0, "Failed", ended(143), metadata=ENDING))
    assert found == [(FAILED, Reason.TIMEOUT), (FAILED, Reason.TIMEOUT), (SUCCEEDED, Reason.OK)]


@pytest.mark.parametrize("kind", ["SuccessCriteriaMet", "Complete"])
def test_a_success_policy_leaves_no_rank_pending(kind):
    found = states(job(condition(kind, "SuccessPolicy"), completedIndexes="0"))
    assert found == [(SUCCEEDED, Reason.OK), (CANCELLED, Reason.CANCELLED), (CANCELLED, Reason.CANCELLED)]


def test_a_suspended_job_waits_with_the_words_of_the_cluster():
    given = job(condition("Suspended", "JobSuspended", "Job suspended"), spec={"suspend": True})
    found = first(given)
    assert (found.state, found.reason) == (PENDING, Reason.WAITING)
    assert "JobSuspended: Job suspended" in found.message
    pods = [
        pod(0, "Running", RUNS, metadata=ENDING),
        pod(1, "Failed", ended(143), metadata=ENDING),
        pod(2, "Failed", ended(3)),
    ]
    found = states({**given, "status": {**given["status"], "failedIndexes": "2"}}, *pods)
    assert found == [(RUNNING, Reason.STOPPING), (PENDING, Reason.WAITING), (FAILED, Reason.USER_ERROR)]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "j-0-x" is forbidden: exceeded quota: q, requested: cpu=4', Reason.QUOTA),
        ('pods "quota-0-x" is forbidden: violates PodSecurity "baseline:latest"', Reason.CONFIG),
        ('pods "j" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot', Reason.CONFIG),
        ('pods "j" is forbidden: error looking up service account a/b: serviceaccount "b" not found', Reason.CONFIG),
        ("Internal error occurred: failed calling webhook", Reason.BACKEND),
    ],
)
def test_a_job_without_pods_says_why_in_its_events(message, reason):
    about = {"uid": "job", "name": "j"}
    old = {"reason": "FailedCreate", "involvedObject": about, "message": "old", "lastTimestamp": START}
    new = {"reason": "FailedCreate", "involvedObject": about, "message": message, "lastTimestamp": END}
    stranger = {**new, "involvedObject": {"uid": "other", "name": "j"}, "message": "x", "lastTimestamp": "9"}
    found = first(job(), events=[old, new, stranger])
    assert (found.state, found.reason) == (PENDING, reason)
    assert message in found.message
    assert first(job()).reason is Reason.WAITING


def test_a_rank_that_cannot_start_again_says_why():
    about = {"uid": "job", "name": "j"}
    event = {"reason": "FailedCreate", "involvedObject": about, "message": "exceeded quota: q"}
    given = pod(0, "Failed", ended(1))
    found = first(job(restarts=1), given, events=[{**event, "lastTimestamp": "2026-08-01T13:00:00Z"}])
    assert (found.state, found.reason, found.attempt) == (PENDING, Reason.QUOTA, 1)
    old = first(job(restarts=1), given, events=[{**event, "lastTimestamp": START}])
    assert (old.state, old.reason, old.attempt) == (PENDING, Reason.RESTARTING, 1)


def test_pods_without_their_job_are_not_lost():
    pods = [pod(0, "Running", RUNS), pod(1, "Running", RUNS, metadata=ENDING)]
    assert states(None, *pods) == [(RUNNING, Reason.BACKEND), (RUNNING, Reason.STOPPING), (LOST, Reason.LOST)]
    assert states(None, pod(0, "Succeeded", ended(0)), pod(1, "Succeeded", ended(0), metadata=ENDING))[:2] == [
        (SUCCEEDED, Reason.OK),
        (LOST, Reason.LOST),
    ]


def test_a_volume_that_cannot_be_mounted_is_reported():
    event = {
        "reason": "FailedMount",
        "regarding": {"uid": "j-0-00"},
        "message": "configmap not found",
        "eventTime": START,
    }
    found = first(job(), pod(0, "Pending", waiting("ContainerCreating"), SCHEDULED), events=[event])
    assert (found.state, found.reason) == (PENDING, Reason.CONFIG)
    assert "configmap not found" in found.message


@pytest.mark.parametrize(("has_sandbox", "reason"), [("False", Reason.CONFIG), ("True", Reason.STARTING)])
def test_trouble_before_the_sandbox_is_over_when_there_is_one(has_sandbox, reason):
    """The first mount often fails, as before a ConfigMap of the run is there; then the image is pulled for minutes."""
    event = {"reason": "FailedMount", "involvedObject": {"uid": "j-0-00"}, "message": "timed out", "lastTimestamp": END}
    sandbox = condition("PodReadyToStartContainers", status=has_sandbox)
    given = pod(0, "Pending", waiting("ContainerCreating"), SCHEDULED, sandbox)
    assert first(job(), given, events=[event]).reason is reason


def test_a_job_that_is_being_deleted_has_no_end_yet():
    given = job(metadata=ENDING)
    pods = [pod(0, "Running", RUNS, metadata=ENDING), pod(1, "Failed", ended(143), metadata=ENDING)]
    assert states(given, *pods) == [(RUNNING, Reason.STOPPING), (RUNNING, Reason.STOPPING), (PENDING, Reason.STOPPING)]


# ── lost nodes and waiting ──────────────────────────────────────────────────────────────────────────────────────

LOST_NODE = condition("DisruptionTarget", "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")


def test_a_lost_node_is_named_and_the_rank_ends_with_the_job():
    stuck = pod(0, "Running", RUNS, LOST_NODE, metadata=ENDING)
    found = first(job(), stuck)
    assert (found.state, found.reason) == (RUNNING, Reason.STOPPING)
    assert "node lost: `node-0`" in found.message
    failing = first(job(condition("FailureTarget", "MaxFailedIndexesExceeded"), failedIndexes="1"), stuck)
    assert (failing.state, failing.reason) == (FAILED, Reason.PREEMPTED)
    assert lost_nodes([stuck, pod(1, "Running", RUNS)]) == {"j-0-00": "node-0"}
    deleted = first(job(metadata=ENDING), stuck)
    assert "node lost" in deleted.message


def test_a_taint_on_a_node_that_answers_does_not_make_it_lost():
    marks = condition("DisruptionTarget", "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
    ready = pod(0, "Running", RUNS, marks, condition("Ready"), metadata=ENDING)
    found = first(job(), ready)
    assert (found.state, found.reason) == (RUNNING, Reason.STOPPING)
    assert "NoExecute taint" in found.message
    assert "does not answer" not in found.message
    assert first(job(condition("FailureTarget", "FailedIndexes")), ready).state is RUNNING, "its process still runs"
    assert lost_nodes([ready]) == {}
    assert lost_nodes([pod(0, "Running", RUNS, marks, condition("Ready", status="False"), metadata=ENDING)])


def with_sidecar(given: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    given["status"]["containerStatuses"].append({"name": "side", "state": state})
    return given


def test_a_sidecar_that_fails_is_not_an_error_of_the_user_code():
    found = first(job(failedIndexes="0"), with_sidecar(pod(0, "Failed", ended(0, "Completed")), ended(3)))
    assert (found.state, found.reason, found.exit_code) == (FAILED, Reason.CONFIG, 0)
    assert found.message == "container `side` ended with code 3, and the replica ended with code 0"
    alone = first(job(failedIndexes="0"), pod(0, "Failed", ended(0, "Completed")))
    assert (alone.reason, alone.message) == (Reason.BACKEND, "the pod failed, and the replica ended with code 0")


def test_a_replica_runs_although_its_sidecar_cannot_start():
    held = waiting("ImagePullBackOff", "no such image")
    found = first(job(), with_sidecar(pod(0, "Pending", RUNS, SCHEDULED), held))
    assert (found.state, found.reason, found.started_at) == (RUNNING, Reason.OK, seconds(START))
    assert found.message == "container `side` waits: ImagePullBackOff: no such image"
    over = first(job(), with_sidecar(pod(0, "Pending", ended(3), SCHEDULED), held))
    assert (over.state, over.exit_code) == (RUNNING, 3)
    assert over.message == "the replica ended with code 3; the pod goes on because of side"
    assert first(job(), with_sidecar(pod(0, "Running", RUNS), waiting("ContainerCreating"))).message == ""


def test_a_node_that_stops_reporting_is_mentioned():
    found = first(job(), pod(0, "Running", RUNS, condition("Ready", status="False")))
    assert (found.state, found.reason) == (RUNNING, Reason.BACKEND)
    assert "node-0" in found.message


def test_ranks_that_wait_for_too_long_are_found():
    limit = {"annotations": {"atoll.dev/queue-timeout-s": "60"}}
    given, pods = job(metadata=limit), [pod(0, "Running", RUNS), pod(1, "Pending", created="2026-08-01T12:01:00Z")]
    status = run_status(given, pods, replicas=3)
    start = seconds(START)
    assert (queue_limit_s(given), queue_limit_s(job())) == (60.0, None)
    assert queue_left_s(given, status, pods, start + 59, 60.0) == 1.0
    assert queue_left_s(given, status, pods, start + 61, 60.0) == -1.0
    assert queue_left_s(given, run_status(given, pods, replicas=2), pods, start + 61, 60.0) == 59.0
    assert queue_left_s(given, run_status(given, pods, replicas=1), pods, start + 1e6, 60.0) == 60.0
    again = [pod(0, "Failed", ended(1))]
    assert queue_left_s(given, run_status(job(restarts=1), again, replicas=1), again, start + 1e6, 60.0) == 60.0


@pytest.mark.parametrize(
    ("message", "reason"),
    [("ClusterQueue q is inactive", Reason.CONFIG), ("insufficient unused quota for cpu in flavor f, 1 more needed",
     Reason.PREEMPTED)],
)  # fmt: skip
def test_a_run_that_kueue_has_stopped_may_wait_for_as_long_as_it_takes(message, reason):
    conditions = [
        condition("QuotaReserved", "Pending", message, "False"),
        condition("Evicted", "ClusterQueueStopped", "The ClusterQueue is stopped"),
    ]
    stats = {"evictions": [{"reason": "ClusterQueueStopped", "count": 1}]}
    workload = {"spec": {}, "status": {"conditions": conditions, "schedulingStats": stats}}
    given, late = job(spec={"suspend": True}), seconds(START) + 1e6
    status = run_status(given, [], replicas=3, queue=queue_state(workload, queue="q"))
    assert {row.reason for row in status.replicas} == {reason}
    assert queue_left_s(given, status, [], late, 60.0) == 60.0


def test_ranks_without_a_pod_wait_from_when_the_job_was_last_suspended_or_started():
    hour = "2026-08-01T13:00:00Z"
    suspended = {**condition("Suspended", "JobSuspended"), "lastTransitionTime": hour}
    resumed = {**condition("Suspended", "JobResumed", status="False"), "lastTransitionTime": END}
    for given in (job(suspended, spec={"suspend": True}), job(resumed, startTime=hour)):
        status = run_status(given, [], replicas=3)
        assert queue_left_s(given, status, [], seconds(hour) + 10, 60.0) == 50.0


def test_pods_of_other_indexes_are_left_out():
    strange = pod(0, "Running", RUNS)
    strange["metadata"]["annotations"] = {}
    assert states(job(), pod(7, "Running", RUNS), strange) == [(PENDING, Reason.WAITING)] * 3


# ── many ranks ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_five_hundred_ranks_each_have_their_own_row():
    count = 500
    given = job(completedIndexes="0-99", failedIndexes="100-149", active=300)
    pods = [pod(rank, "Failed", ended(3)) for rank in range(100, 150)]
    pods += [pod(rank, "Running", RUNS, failures=1, created="2026-08-01T12:05:00Z") for rank in range(150, 300)]
    pods += [pod(rank, "Failed", ended(1)) for rank in range(150, 300)]
    held = condition("PodScheduled", "Unschedulable", "0/9 nodes are available", "False")
    pods += [pod(rank, "Pending", None, held) for rank in range(300, 450)]
    events = [
        {"reason": "FailedMount", "involvedObject": {"uid": each["metadata"]["uid"]}, "message": "no"} for each in pods
    ]
    refused = {"reason": "FailedCreate", "involvedObject": {"uid": "job"}, "message": "exceeded quota: q"}
    rows = run_status(given, reversed(pods), replicas=count, events=[*events, refused]).replicas
    assert [row.rank for row in rows] == list(range(count))
    found = [(row.state, row.reason, row.exit_code, row.attempt) for row in rows]
    assert found == (
        [(SUCCEEDED, Reason.OK, 0, 0)] * 100
        + [(FAILED, Reason.USER_ERROR, 3, 0)] * 50
        + [(RUNNING, Reason.OK, None, 1)] * 150
        + [(PENDING, Reason.UNSCHEDULABLE, None, 0)] * 150
        + [(PENDING, Reason.QUOTA, None, 0)] * 50
    )


def test_five_hundred_ranks_that_stop_because_of_one():
    failing = condition("FailureTarget", "MaxFailedIndexesExceeded")
    pods = [pod(rank, "Running", RUNS, metadata=ENDING) for rank in range(499)]
    rows = run_status(job(failing, failedIndexes="499"), [*pods, pod(499, "Failed", ended(3))], replicas=500).replicas
    assert {(row.state, row.reason) for row in rows[:-1]} == {(RUNNING, Reason.STOPPING)}
    assert all("rank 499 failed" in row.message for row in rows[:-1])
    assert (rows[-1].state, rows[-1].exit_code) == (FAILED, 3)


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (job(), RUNNING),  # evicted or deleted by hand
        (job(metadata=ENDING), RUNNING),
        (job(spec={"suspend": True}), RUNNING),
        (job(condition("FailureTarget", "MaxFailedIndexesExceeded"), failedIndexes="1"), RUNNING),
        (job(condition("Failed", "MaxFailedIndexesExceeded"), failedIndexes="1"), CANCELLED),
        (job(completedIndexes="0"), SUCCEEDED),
        (job(metadata=ENDING, completedIndexes="0"), SUCCEEDED),
    ],
)
def test_a_pod_that_ends_with_code_0_when_it_is_told_to_end_counts_only_if_the_job_says_so(given, state):
    row = first(given, pod(0, "Succeeded", ended(0, "Completed"), metadata=ENDING))
    assert (row.state, row.reason) == (
        state, {RUNNING: Reason.STOPPING, CANCELLED: Reason.CANCELLED, SUCCEEDED: Reason.OK}[state],
    )  # fmt: skip
