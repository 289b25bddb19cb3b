"""The layout `jobs`, in the three dialects, and what is refused about it."""

from __future__ import annotations

import json

import pytest
from torchx import specs

from atoll.kube.appwrapper import components_of
from atoll.torchx.models import plain
from atoll.torchx.options import LEGACY, V1BETA1, V1BETA2, Options
from atoll.torchx.problems import InvalidApp, checked_wrapper
from torchx_apps import app, role


def built(made, dialect=V1BETA2, **options):
    return checked_wrapper(made, "fit-x", Options(**{"namespace": "ns", **options}), dialect, "1.0")


def problems(made, dialect=V1BETA2, **options):
    with pytest.raises(InvalidApp) as caught:
        built(made, dialect, **options)
    return caught.value.fields


def first_job(resource):
    return next(each for each in components_of(resource) if each["kind"] == "Job")


def test_a_role_is_one_indexed_job():
    resource = built(app(role("a", 3), role("b")))
    jobs = [each for each in components_of(resource) if each["kind"] == "Job"]
    assert [each["metadata"]["name"] for each in jobs] == ["fit-x-0", "fit-x-1"]
    assert [each["spec"]["completions"] for each in jobs] == [3, 1]
    assert jobs[0]["spec"]["completionMode"] == "Indexed"
    assert jobs[0]["spec"]["backoffLimit"] == 0
    assert "ttlSecondsAfterFinished" not in jobs[0]["spec"]
    assert jobs[0]["spec"]["template"]["spec"]["subdomain"] == "fit-x"


def test_the_size_does_not_depend_on_the_number_of_replicas():
    sizes = {len(json.dumps(built(app(role(replicas=count))))) for count in (100, 500, 999)}
    assert len(sizes) == 1
    thousand = len(json.dumps(built(app(role(replicas=1000)))))
    assert thousand - sizes.pop() <= 2  # the digits of completions and parallelism
    for dialect in (V1BETA1, LEGACY):
        assert len(json.dumps(built(app(role(replicas=1000)), dialect))) < 10_000


def test_the_replica_id_is_replaced_by_kubernetes():
    made = role(args=["--r", specs.macros.replica_id], env={"R": specs.macros.replica_id})
    own = first_job(built(app(made)))["spec"]["template"]["spec"]["containers"][0]
    assert own["command"][-1] == "$(TORCHX_REPLICA_ID)"
    names = [each["name"] for each in own["env"]]
    assert names.index("TORCHX_REPLICA_ID") < names.index("R")
    assert own["env"][0]["valueFrom"]["fieldRef"]["fieldPath"].endswith("job-completion-index']")


def test_every_role_reaches_replica_0_of_the_first_role():
    resource = built(app(role("a", 2), role("b", 2)))
    for job in (each for each in components_of(resource) if each["kind"] == "Job"):
        own = job["spec"]["template"]["spec"]["containers"][0]
        values = {each["name"]: each.get("value") for each in own["env"]}
        assert own["command"][-1] == "TORCHX_RANK0_HOST"
        assert values["TORCHX_RANK0_HOST"] == values["TORCHX_MCAD_A_0_HOSTS"] == "fit-x-0-0.fit-x"


def test_only_the_first_role_gets_the_line_of_shell_that_names_localhost():
    commands = [
        job["spec"]["template"]["spec"]["containers"][0]["command"]
        for job in components_of(built(app(role("a", 2), role("b", 2))))
        if job["kind"] == "Job"
    ]
    assert commands[0][0] == "/bin/sh"
    assert "TORCHX_RANK0_HOST=localhost" in commands[0][2]
    assert commands[1][0] == "python"
    plain_role = role("a", 2, args=["train.py"])
    assert first_job(built(app(plain_role)))["spec"]["template"]["spec"]["containers"][0]["command"][0] == "python"


def test_v1beta2_writes_every_annotation_also_for_no_restart():
    found = built(app())["metadata"]["annotations"]
    short = {name.rpartition("/")[2]: value for name, value in found.items()}
    assert short == {
        "retryLimit": "0",
        "admissionGracePeriodDuration": "1m",
        "retryPausePeriodDuration": "90s",
        "warmupGracePeriodDuration": "30m",
        "failureGracePeriodDuration": "1m",
        "forcefulDeletionGracePeriodDuration": "1m",
        "successTTLDuration": "720h",
        "deletionOnFailureGracePeriodDuration": "10m",
    }
    retried = built(app(role(max_retries=2)), terminal_exit_codes="4 ; 3")["metadata"]["annotations"]
    assert retried["workload.codeflare.dev.appwrapper/retryLimit"] == "2"
    assert retried["workload.codeflare.dev.appwrapper/terminalExitCodes"] == "3,4"
    assert retried["workload.codeflare.dev.appwrapper/deletionOnFailureGracePeriodDuration"] == "0s"


def test_a_queue_suspends_the_wrapper_until_kueue_admits_it():
    resource = built(app(), queue="team", queue_priority="high")
    assert resource["spec"]["suspend"] is True
    assert resource["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert resource["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert "suspend" not in built(app())["spec"]


@pytest.mark.parametrize("dialect", [V1BETA1, LEGACY])
def test_mcad_learns_the_size_and_the_end_of_a_job(dialect):
    resource = built(app(role(replicas=2)), dialect, priority=7)
    item = resource["spec"]["resources"]["GenericItems"][0]
    assert resource["apiVersion"] == dialect
    assert resource["spec"]["priority"] == 7
    assert item["completionstatus"] == "Complete,Failed"
    assert item["custompodresources"][0]["replicas"] == 2
    assert item["custompodresources"][0]["limits"]["cpu"] == "2000m"
    assert "schedulingSpec" not in resource["spec"]


def test_the_form_of_torchx_0_5_0_is_a_dialect():
    resource = built(app(role(max_retries=1)), LEGACY, layout="pods", coscheduler_name="co")
    group, pod, service = resource["spec"]["resources"]["GenericItems"]
    assert group["generictemplate"]["metadata"]["name"] == "fit-x-trainer-pg"
    assert group["generictemplate"]["metadata"]["labels"]["appwrapper.mcad.ibm.com"] == "fit-x"
    assert pod["maxRetry"] == 1
    assert pod["policies"] == [
        {"event": "PodEvicted", "action": "RestartJob"},
        {"event": "PodFailed", "action": "RestartJob"},
    ]
    assert service["generictemplate"]["spec"]["selector"] == {"appwrapper.mcad.ibm.com": "fit-x"}
    assert "schedulingSpec" not in resource["spec"]


def test_a_replica_restarts_in_place():
    made = role(max_retries=2, retry_policy=specs.RetryPolicy.REPLICA)
    resource = built(app(made))
    assert first_job(resource)["spec"]["backoffLimit"] == 2
    assert first_job(resource)["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert resource["metadata"]["annotations"]["workload.codeflare.dev.appwrapper/retryLimit"] == "0"


def test_a_coscheduler_gets_pod_groups_of_today():
    resource = built(app(role(replicas=4)), coscheduler_name="co")
    group = components_of(resource)[0]
    assert group["apiVersion"] == "scheduling.x-k8s.io/v1alpha1"
    assert group["spec"]["minMember"] == 4
    labels = first_job(resource)["spec"]["template"]["metadata"]["labels"]
    assert labels["scheduling.x-k8s.io/pod-group"] == group["metadata"]["name"] == "fit-x-pg0"


@pytest.mark.parametrize(
    ("made", "dialect", "options", "field"),
    [
        (app(), V1BETA2, {"priority": 5}, "priority"),
        (app(), V1BETA2, {"queue_priority": "high"}, "queue_priority"),
        (app(), V1BETA1, {"queue": "team"}, "queue"),
        (app(), V1BETA1, {"retry_limit": 1}, "retry_limit"),
        (app(), V1BETA1, {"warmup_grace": "1h"}, "warmup_grace"),
        (app(), V1BETA1, {"success_ttl": "1h", "layout": "pods"}, "success_ttl"),
        (app(role(max_retries=1)), V1BETA1, {}, "max_retries"),
        (app(role(replicas=4, min_replicas=2)), V1BETA2, {}, "roles"),
        (app(*(role(f"r{i}") for i in range(9))), V1BETA2, {}, "roles"),
        (app(role(replicas=9)), V1BETA2, {"layout": "pods"}, "roles"),
    ],
)
def test_what_a_dialect_cannot_do_is_refused(made, dialect, options, field):
    assert field in problems(made, dialect, **options)


@pytest.mark.parametrize(
    ("resource", "field"),
    [
        ({"gpu": 0.5}, "gpu"),
        ({"cpu": float("nan")}, "cpu"),
        ({"memMB": "2G"}, "memMB"),
        ({"devices": {"bad name": 1}}, "devices.bad name"),
        ({"devices": {"vpc.amazonaws.com/efa": 1.5}}, "devices.vpc.amazonaws.com/efa"),
        ({"capabilities": {"node.kubernetes.io/instance-type": "a b"}},
         "capabilities.node.kubernetes.io/instance-type"),
    ],
    ids=str,
)  # fmt: skip
def test_a_resource_that_kubernetes_would_refuse_is_refused(resource, field):
    wrong = specs.Resource(**{"cpu": 1, "memMB": 100, "gpu": 0, **resource})
    assert set(problems(app(role(resource=wrong)))) == {f"roles[trainer].resource.{field}"}


def test_a_role_without_a_name_and_arguments_that_are_no_text_are_refused():
    assert set(problems(app(role("", args=[3])))) == {"roles", "roles[].args[0]"}


def test_labels_that_an_overlay_or_a_long_role_makes_wrong_are_refused():
    assert problems(app(), overlay='{"metadata": {"labels": {"team": "a b"}}}') == ("labels.team",)
    long = {"layout": "pods", "coscheduler_name": "co"}
    assert "labels.pod-group.scheduling.sigs.k8s.io" in problems(app(role("r" * 60)), LEGACY, **long)


def test_a_policy_that_no_controller_has_is_refused():
    if not hasattr(specs.RetryPolicy, "ROLE"):
        pytest.skip("this TorchX has no such policy")
    made = role(max_retries=1, retry_policy=specs.RetryPolicy.ROLE)
    assert "roles[trainer].retry_policy" in problems(app(made))


def test_nine_roles_fit_in_mcad():
    assert len(components_of(built(app(*(role(f"r{i}") for i in range(9))), V1BETA1))) == 10


def test_overlays_change_pods_but_not_what_we_rely_on():
    taint = {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}
    pod = first_job(built(app(), overlay=json.dumps(taint)))["spec"]["template"]["spec"]
    assert pod["tolerations"] == taint["spec"]["tolerations"]
    own = role(metadata={"kubernetes": {"spec": {"nodeSelector": {"pool": "a"}}}})
    assert first_job(built(app(own)))["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "a"}
    moved = {"metadata": {"labels": {"app.kubernetes.io/instance": "other"}}}
    assert "overlay.spec.subdomain" in problems(app(), overlay=json.dumps(moved))
    first = {"spec": {"containers": [{"$patch": "replace"}, {"name": "other"}]}}
    assert "overlay.spec.containers" in problems(app(), overlay=json.dumps(first))


def test_resources_follow_the_options():
    own = first_job(built(app(), reserved_millicpu=0, reserved_memmb=0, gpu_resource="amd.com/gpu", shm_size="8Gi"))
    pod = own["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == pod["containers"][0]["resources"]["requests"]
    assert pod["containers"][0]["resources"]["limits"]["amd.com/gpu"] == "1"
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_nothing_is_sent_that_no_object_should_have():
    resource = built(app())
    assert "imagePullSecrets" not in first_job(resource)["spec"]["template"]["spec"]
    assert all("status" not in each for each in components_of(resource))


def test_it_is_plain_json():
    resource = built(app())
    assert plain(resource) is resource
    assert json.loads(json.dumps(resource)) == resource
