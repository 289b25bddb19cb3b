"""The request of a run in an AppWrapper: what settings change, what is refused, and the same run in every dialect."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.context import TIMED_OUT, TOO_OLD, RunContext
from atoll.executors.appwrapper.request import CAPABILITIES, in_dialect, wrapper_request
from atoll.executors.appwrapper.settings import AppWrapperSettings
from atoll.kube.appwrapper import DIALECTS, MCAD, OLD_MCAD, PREFIX, V1BETA2, annotation_problems, components_of
from atoll.kube.bootstrap import Wheel
from atoll.kube.gang import KUEUE_PRIORITY, KUEUE_QUEUE
from atoll.kube.job import token_of
from atoll.kube.names import wrapper_name
from atoll.spec import Placement
from atoll.validation import check_settings

CONTEXT = RunContext("exp", "s3://bucket/exp")
WHEEL = Wheel("atoll-0.1.0-py3-none-any.whl", "ab" * 32)


def planned(settings: dict[str, Any] | None = None, **placement: Any):
    checked = {"image": "registry.invalid/train:1", **(settings or {})}
    made = AppWrapperSettings(**check_settings("appwrapper", checked, AppWrapperSettings))
    return wrapper_request(CONTEXT, Placement(**placement), made, namespace="team-a", version="0.1.0", wheel=WHEEL)


def wrapper(settings: dict[str, Any] | None = None, **placement: Any) -> dict[str, Any]:
    found, problems, _ = planned(settings, **placement)
    assert problems == []
    return found["appwrapper"]


def refused(settings: dict[str, Any], **placement: Any) -> set[str]:
    """The fields that the problems name."""
    return {p.partition(":")[0].partition("=")[0] for p in planned(settings, **placement)[1]}


def annotation(found: dict[str, Any], name: str) -> str:
    return found["metadata"]["annotations"][f"{PREFIX}{name}"]


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_one_failed_replica_ends_all():
    assert CAPABILITIES.fails_together
    assert CAPABILITIES.cancels_together
    (job,) = components_of(wrapper(replicas=2, max_restarts=3))
    spec = job["spec"]
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (0, 0)
    assert not {"ttlSecondsAfterFinished", "successPolicy", "backoffLimit", "suspend"} & spec.keys()


@pytest.mark.parametrize("restarts", [0, 2])
def test_every_annotation_is_valid_and_the_limit_is_written_also_if_it_is_0(restarts):
    found = wrapper(max_restarts=restarts)
    assert annotation(found, "retryLimit") == str(restarts)
    assert not list(annotation_problems(found["metadata"]["annotations"]))


@pytest.mark.parametrize("timeout_s", [60.0, 30 * 86_400.0])
@pytest.mark.parametrize("restarts", [0, 3])
def test_the_success_ttl_is_longer_than_the_run_and_its_collection(timeout_s, restarts):
    found = wrapper({"ttl_s": 3600, "warmup_s": 600}, timeout_s=timeout_s, max_restarts=restarts)
    longest = (restarts + 1) * (600 + timeout_s) + 3600
    assert seconds(annotation(found, "successTTLDuration")) > longest


def test_an_appwrapper_that_is_never_removed_has_a_ttl_of_years():
    assert seconds(annotation(wrapper({"ttl_s": None}), "successTTLDuration")) > 5 * 365 * 86_400


def test_the_warm_up_is_the_queue_timeout_unless_it_is_set():
    name = "warmupGracePeriodDuration"
    assert annotation(wrapper(), name) == "1800s"
    assert annotation(wrapper({"queue_timeout_s": 7200}), name) == "7200s"
    assert annotation(wrapper({"queue_timeout_s": 7200, "warmup_s": 60}), name) == "60s"
    assert annotation(wrapper({"queue_timeout_s": 7 * 86_400}), name) == "86400s"


def test_pods_of_a_failed_run_are_kept_only_without_restarts():
    name = "deletionOnFailureGracePeriodDuration"
    assert annotation(wrapper({"keep_failed_s": 90}), name) == "90s"
    assert annotation(wrapper({"keep_failed_s": 90}, max_restarts=1), name) == "0s"


def test_ends_that_do_not_get_better_are_terminal():
    found = wrapper({"terminal_exit_codes": [7]}, max_restarts=1)
    assert annotation(found, "terminalExitCodes") == f"7,{TOO_OLD},{TIMED_OUT}"
    found = wrapper({"command": ["train"], "retryable_exit_codes": [9]}, max_restarts=1)
    assert f"{PREFIX}terminalExitCodes" not in found["metadata"]["annotations"]
    assert annotation(found, "retryableExitCodes") == "9"


def test_a_queue_suspends_and_labels_the_appwrapper_and_not_the_job():
    found = wrapper({"queue": "gpus", "priority": "high"}, cpus=1)
    assert found["spec"]["suspend"] is True
    assert found["metadata"]["labels"] | {KUEUE_QUEUE: "gpus", KUEUE_PRIORITY: "high"} == found["metadata"]["labels"]
    (job,) = components_of(found)
    assert not {KUEUE_QUEUE, KUEUE_PRIORITY} & job["metadata"]["labels"].keys()


def test_host_names_need_a_service_which_is_the_second_component():
    job, service = components_of(wrapper({"hostnames": True}))
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"


def test_an_overlay_keeps_its_nulls_and_directives_beside_host_names():
    container = {"name": "replica", "env": [{"name": "PLACE", "$patch": "delete"}]}
    overlay = {"spec": {"template": {"spec": {"dnsPolicy": None, "containers": [container]}}}}
    job, service = components_of(wrapper({"hostnames": True, "overlay": overlay}, env={"PLACE": "here", "OTHER": "x"}))
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    names = {variable["name"] for variable in pod["containers"][0]["env"]}
    assert ("PLACE" in names, "OTHER" in names) == (False, True)
    own = {"spec": {"template": {"spec": {"subdomain": "mine"}}}}
    job, _ = components_of(wrapper({"hostnames": True, "overlay": own}))
    assert job["spec"]["template"]["spec"]["subdomain"] == "mine"


def test_names_are_unique_in_the_cluster_and_fit_for_every_rank():
    names = {wrapper_name(CONTEXT, namespace, 2) for namespace in ("team-a", "team-b")}
    assert len(names) == 2
    long = wrapper_name(RunContext("x" * 128, "s3://b"), "n" * 63, 1000)
    assert len(f"{long}-999") <= 63


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"priority": "high"}, {"priority"}),
        ({"priority": 5, "dialect": "v1beta2"}, {"priority"}),
        ({"priority": 5, "queue": "q"}, {"priority"}),
        ({"queue": "q", "dialect": "v1beta1"}, {"queue"}),
        ({"queue": "q", "priority": "high", "dialect": "mcad.ibm.com/v1beta1"}, {"queue", "priority"}),
        ({"dialect": "v1beta1", "terminal_exit_codes": [3]}, {"terminal_exit_codes"}),
        ({"terminal_exit_codes": [3], "retryable_exit_codes": [3]}, {"terminal_exit_codes, retryable_exit_codes"}),
        ({"annotations": {f"{PREFIX}retryLimit": "3"}}, {f"annotations.{PREFIX}retryLimit"}),
        ({"labels": {KUEUE_QUEUE: "q"}}, {f"labels.{KUEUE_QUEUE}"}),
        ({"labels": {KUEUE_PRIORITY: "q"}}, {f"labels.{KUEUE_PRIORITY}"}),
        ({"overlay": {"spec": {"ttlSecondsAfterFinished": 5}}}, {"overlay.spec.ttlSecondsAfterFinished"}),
    ],
    ids=lambda value: str(sorted(value)),
)
def test_settings_that_contradict_each_other_or_the_dialect_are_refused(settings, fields):
    assert refused(settings, cpus=1) == fields


def test_a_queue_needs_requests():
    assert refused({"queue": "q"}) == {"queue"}
    assert refused({"queue": "q"}, gpu="H100") == set()


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=str)
def test_a_plan_for_any_cluster_is_the_same_run_in_every_dialect(dialect):
    shown = wrapper({"dialect": "auto"}, replicas=2, cpus=1)
    found = in_dialect(shown, dialect)
    assert found["apiVersion"] == dialect.api_version
    assert (components_of(found), token_of(found)) == (components_of(shown), token_of(shown))
    has_retries = any(key.startswith(PREFIX) for key in found["metadata"]["annotations"])
    assert has_retries is (not dialect.is_mcad)


def test_a_number_as_priority_is_for_mcad():
    shown = wrapper({"priority": 7})
    assert shown["apiVersion"] == MCAD.api_version
    assert in_dialect(shown, OLD_MCAD)["spec"]["priority"] == 7
    assert wrapper({"dialect": "v1beta1", "priority": 0})["spec"]["priority"] == 0


def test_the_object_does_not_grow_with_the_replicas():
    assert len(str(wrapper(replicas=1000))) - len(str(wrapper(replicas=2))) < 20


@pytest.mark.parametrize("dialect", ["auto", "v1beta1"])
def test_the_plan_says_what_needs_a_watcher(dialect):
    notes = planned({"dialect": dialect}, max_restarts=2)[2]
    assert any("restarts on MCAD" in note and "atoll wait" in note for note in notes)
    assert any("60 s" in note for note in planned({"dialect": V1BETA2.name})[2])
