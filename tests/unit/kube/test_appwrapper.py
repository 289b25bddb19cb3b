"""AppWrappers of every dialect: built, and read again whatever their controller says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.kube.appwrapper import (
    DIALECTS,
    MCAD,
    OLD_MCAD,
    PREFIX,
    V1BETA2,
    Phase,
    Retries,
    WrapperView,
    annotation_problems,
    app_wrapper,
    component_problems,
    components_of,
    dialect_of,
    go_duration,
    pod_sets,
    retry_annotations,
    served_dialect,
)

EVERY = list(DIALECTS.values())
RESOURCES = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi", "nvidia.com/gpu": "1"}}
JOB: dict[str, Any] = {
    "kind": "Job",
    "metadata": {"name": "x"},
    "spec": {
        "parallelism": 3,
        "template": {"spec": {"containers": [{"name": "replica", "resources": RESOURCES}]}},
    },
}
SERVICE: dict[str, Any] = {"kind": "Service", "metadata": {"name": "x"}}


@pytest.mark.parametrize("dialect", EVERY, ids=str)
def test_every_dialect_has_the_objects_inside_and_says_which_it_is(dialect):
    wrapper = app_wrapper(dialect, [JOB, SERVICE], name="x", namespace="ns", labels={"a": "b"})
    assert components_of(wrapper) == [JOB, SERVICE]
    assert dialect_of(wrapper) is dialect
    assert wrapper["metadata"] == {"name": "x", "namespace": "ns", "labels": {"a": "b"}}


def test_only_mcad_is_told_when_a_job_is_over_and_what_it_requests():
    items = app_wrapper(MCAD, [JOB, SERVICE], name="x", namespace="ns")["spec"]["resources"]["GenericItems"]
    assert items[0]["completionstatus"] == "Complete,Failed"
    requests = {"cpu": "1", "memory": "2Gi", "nvidia.com/gpu": "1"}
    assert items[0]["custompodresources"] == [{"replicas": 3, "requests": requests, "limits": requests}]
    assert items[1] == {"replicas": 1, "generictemplate": SERVICE}


def test_requests_of_all_containers_are_added():
    containers = [{"resources": {"requests": {"cpu": "500m"}}}, {"resources": {"requests": {"cpu": "2"}}}]
    job = {"kind": "Job", "spec": {"parallelism": 2, "template": {"spec": {"containers": containers}}}}
    item = app_wrapper(OLD_MCAD, [job], name="x", namespace="ns")["spec"]["resources"]["GenericItems"][0]
    assert item["custompodresources"][0]["requests"] == {"cpu": "2500m"}


def test_a_job_without_requests_has_no_custom_resources():
    job = {"kind": "Job", "spec": {"template": {"spec": {"containers": [{}]}}}}
    assert (
        "custompodresources"
        not in app_wrapper(MCAD, [job], name="x", namespace="n")["spec"]["resources"]["GenericItems"][0]
    )


def test_priority_and_suspend_are_in_the_spec_only_if_given():
    assert app_wrapper(MCAD, [], name="x", namespace="n", priority=0)["spec"]["priority"] == 0
    assert "priority" not in app_wrapper(MCAD, [], name="x", namespace="n")["spec"]
    assert app_wrapper(V1BETA2, [], name="x", namespace="n", suspend=True)["spec"]["suspend"] is True
    assert "suspend" not in app_wrapper(V1BETA2, [], name="x", namespace="n")["spec"]


@pytest.mark.parametrize(
    ("served", "wanted"),
    [
        (["workload.codeflare.dev/v1beta2", "mcad.ibm.com/v1beta1"], V1BETA2),
        (["workload.codeflare.dev/v1beta1", "mcad.ibm.com/v1beta1"], MCAD),
        (["mcad.ibm.com/v1beta1", "mcad.ibm.com/v1alpha1"], OLD_MCAD),
        (["workload.codeflare.dev/v1beta3"], None),
        ([], None),
    ],
)
def test_the_newest_dialect_that_the_cluster_serves_is_used(served, wanted):
    assert served_dialect(served) is wanted


def test_every_annotation_is_written_also_a_limit_of_0():
    found = retry_annotations(Retries(0, warmup_s=1.5, terminal_codes=(4, 3, 3)))
    assert found[f"{PREFIX}retryLimit"] == "0"
    assert found[f"{PREFIX}warmupGracePeriodDuration"] == "1.5s"
    assert found[f"{PREFIX}terminalExitCodes"] == "3,4"
    assert f"{PREFIX}retryableExitCodes" not in found
    assert len(found) == 9
    assert not list(annotation_problems(found))


@pytest.mark.parametrize(
    ("name", "value"),
    [("retryLimit", "zero"), ("warmupGracePeriodDuration", "5"), ("retryPausePeriodDuration", "abc"),
     ("successTTLDuration", ""), ("terminalExitCodes", "3;4"), ("noSuchThing", "1")],
)  # fmt: skip
def test_annotations_that_the_controller_would_ignore_are_refused(name, value):
    assert len(list(annotation_problems({f"{PREFIX}{name}": value, "example.com/other": "x"}))) == 1


@given(st.floats(0, 1e8))
def test_durations_are_read_as_they_are_written(seconds):
    text = go_duration(seconds)
    assert not list(annotation_problems({f"{PREFIX}warmupGracePeriodDuration": text}))
    assert float(text.removesuffix("s")) == pytest.approx(seconds, abs=1e-3)


def test_pod_sets_are_counted_and_nine_are_too_many():
    job_set = {"kind": "JobSet", "spec": {"replicatedJobs": [{}, {}]}}
    ray = {"kind": "RayCluster", "spec": {"workerGroupSpecs": [{}]}}
    assert pod_sets([JOB, SERVICE, job_set, ray]) == 5
    assert not list(component_problems(V1BETA2, [JOB] * 8))
    assert len(list(component_problems(V1BETA2, [JOB] * 9))) == 1
    assert not list(component_problems(MCAD, [JOB] * 9))


@pytest.mark.parametrize(
    "spec", [{"ttlSecondsAfterFinished": 0}, {"successPolicy": {"rules": []}}, {"backoffLimitPerIndex": 1}], ids=str
)
def test_jobs_that_an_appwrapper_runs_to_no_good_end_are_refused(spec):
    assert len(list(component_problems(V1BETA2, [{"kind": "Job", "spec": spec}]))) == 1


@pytest.mark.parametrize(
    ("dialect", "status", "phase"),
    [
        (V1BETA2, {}, Phase.NEW),
        (V1BETA2, {"phase": "Suspended"}, Phase.QUEUED),
        (V1BETA2, {"phase": "Resetting", "resettingCount": 2}, Phase.RESETTING),
        (V1BETA2, {"phase": "Succeeded"}, Phase.SUCCEEDED),
        (V1BETA2, {"phase": "Meditating"}, Phase.UNKNOWN),
        (MCAD, {"state": "Pending"}, Phase.QUEUED),
        (MCAD, {"state": "RunningHoldCompletion"}, Phase.DISPATCHED),
        (MCAD, {"state": "Completed"}, Phase.ENDED),
        (MCAD, {"state": "Deleted"}, Phase.FAILED),
        (OLD_MCAD, {"state": "Dreaming"}, Phase.UNKNOWN),
    ],
)
def test_every_word_of_a_controller_is_a_phase(dialect, status, phase):
    view = WrapperView.of({"apiVersion": dialect.api_version, "status": status})
    assert (view.phase, view.is_mcad, view.resets) == (phase, dialect.is_mcad, status.get("resettingCount", 0))


def test_an_unhealthy_appwrapper_says_why():
    unhealthy = {"type": "Unhealthy", "status": "True", "reason": "FailedComponent", "message": "Found 1 failed"}
    wrapper = {"apiVersion": V1BETA2.api_version, "status": {"phase": "Failed", "conditions": [unhealthy]}}
    assert WrapperView.of(wrapper).said == "FailedComponent: Found 1 failed"


def test_mcad_says_why_it_waits_in_its_newest_condition():
    conditions = [
        {"type": "Init", "status": "True"},
        {"type": "Backoff", "reason": "AppWrapperNotRunnable.", "message": "Insufficient resources."},
        {"type": "Queueing"},
    ]
    wrapper = {"apiVersion": MCAD.api_version, "status": {"state": "Pending", "conditions": conditions}}
    assert WrapperView.of(wrapper).said == "AppWrapperNotRunnable.: Insufficient resources."


@given(
    st.sampled_from([*(each.api_version for each in EVERY), "other/v1"]),
    st.fixed_dictionaries(
        {}, optional={"phase": st.text(), "state": st.text(), "resettingCount": st.none() | st.text() | st.integers()}
    ),
)
def test_reading_never_raises(api_version, status):
    view = WrapperView.of({"apiVersion": api_version, "metadata": {}, "status": status})
    assert isinstance(view.phase, Phase)
