"""The layout `pods`: the form of TorchX 0.7.0, and the places where the original did not work."""

from __future__ import annotations

import copy
import json
import warnings
from unittest.mock import patch

import pytest
import yaml
from torchx import specs

from atoll.torchx import kubernetes_mcad_scheduler as scheduler
from atoll.torchx.models import plain
from atoll.torchx.problems import InvalidApp
from torchx_apps import app, role


def built(made, unique="fit-x", **options):
    given = dict.fromkeys(
        ("service_account", "image_secret", "coscheduler_name", "priority_class_name", "network"), None
    )
    with patch.object(scheduler, "make_unique", return_value=unique):
        return scheduler.app_to_resource(made, "ns", **{**given, **options})


def items(resource):
    return [plain(item["generictemplate"]) for item in resource["spec"]["resources"]["GenericItems"]]


def pods(resource):
    return [each for each in items(resource) if each["kind"] == "Pod"]


def env(pod):
    return {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}


def test_a_pod_has_the_fields_of_the_original():
    pod = pods(built(app(role(mounts=[specs.BindMount(src_path="/a", dst_path="/b", read_only=True)]))))[0]
    own = pod["spec"]["containers"][0]
    assert pod["metadata"]["name"] == own["name"] == pod["spec"]["hostname"] == "fit-x-0"
    assert pod["spec"]["subdomain"] == "fit-x"
    assert pod["spec"]["imagePullSecrets"] == [{}]
    assert own["command"] == ["python", "train.py", "--id", "fit-x", "--rank0", "TORCHX_RANK0_HOST"]
    assert own["resources"]["limits"] == {"cpu": "2000m", "memory": "3000M", "nvidia.com/gpu": "1"}
    assert own["resources"]["requests"] == {"cpu": "1900m", "memory": "1976M", "nvidia.com/gpu": "1"}
    assert own["volumeMounts"][1] == {"name": "mount-0", "mountPath": "/b", "readOnly": True}
    assert pod["metadata"]["labels"]["torchx.pytorch.org/replica-id"] == "0"


def test_the_printed_request_is_sorted_yaml_of_plain_values():
    resource = built(app(), coscheduler_name="co", priority=0)
    text = str(scheduler.KubernetesMCADJob({}, resource))
    read = yaml.safe_load(text)
    assert text == yaml.dump(read)
    assert read["spec"]["priority"] == 0
    kinds = [item["generictemplate"]["kind"] for item in read["spec"]["resources"]["GenericItems"]]
    assert kinds == ["PodGroup", "Pod", "Service"]


def test_retries_are_the_smallest_number_of_all_roles():
    two = app(role("a", 2, max_retries=3), role("b", 1, max_retries=2))
    expected = {
        "minAvailable": 3,
        "requeuing": {
            "timeInSeconds": 300,
            "maxTimeInSeconds": 0,
            "growthType": "exponential",
            "maxNumRequeuings": 2,
        },
    }
    assert built(two)["spec"]["schedulingSpec"] == expected
    two.roles[0].max_retries = 0
    assert "schedulingSpec" not in built(two)["spec"]


def test_pods_of_two_roles_have_different_names():
    names = [each["metadata"]["name"] for each in pods(built(app(role("a", 2), role("b", 2))))]
    assert names == ["fit-x-0", "fit-x-1", "fit-x-1-0", "fit-x-1-1"]


def test_every_pod_has_the_variable_that_rank0_env_names():
    for each in pods(built(app(role("a", 2), role("b", 2)))):
        named = each["spec"]["containers"][0]["command"][-1]
        first = each["metadata"]["name"] == "fit-x-0"
        assert env(each)[named] == ("localhost" if first else "fit-x-0.fit-x")


def test_the_variable_of_a_role_names_its_own_first_replica():
    last = pods(built(app(role("a"), role("b", 2))))[-1]
    assert env(last)["TORCHX_MCAD_B_0_HOSTS"] == "fit-x-1-0.fit-x"


@pytest.mark.parametrize("other", ["a_b", "ab"])
def test_roles_with_one_variable_name_find_the_first_role(other):
    last = pods(built(app(role("a-b"), role(other))))[-1]
    names = [each["name"] for each in last["spec"]["containers"][0]["env"]]
    assert env(last)["TORCHX_MCAD_AB_0_HOSTS"] == "fit-x-0.fit-x"
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["1234", "!!!", "-x", "Größe", "a" * 80])
def test_hostile_names_give_valid_names_and_labels(name):
    made = app(name=name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resource = plain(scheduler.app_to_resource(made, "ns", None, None, None, None, None))
    found = resource["metadata"]["name"]
    assert found[0].isalpha()
    assert len(found) <= 59
    from atoll.kube.names import is_dns_label, is_label_value

    assert is_dns_label(found)
    for each in items(resource):
        assert all(map(is_label_value, each["metadata"]["labels"].values()))


def test_a_local_version_of_torchx_is_a_valid_label():
    with patch.object(scheduler.torchx, "__version__", "0.8.0+abc"):
        labels = scheduler.pod_labels(app(), 0, role(), 0, None, "fit-x")
    assert labels["torchx.pytorch.org/version"] == "0.8.0-abc"


def test_the_app_is_not_changed():
    made = app(role(args=["${app_id}"]), name="n" * 70)
    before = copy.deepcopy(made)
    with pytest.warns(UserWarning, match="too long"):
        scheduler.app_to_resource(made, "ns", None, None, None, None, None)
    assert made == before


def test_small_resources_keep_a_request():
    small = role(resource=specs.Resource(cpu=0.1, memMB=512, gpu=0))
    found = pods(built(app(small)))[0]["spec"]["containers"][0]["resources"]
    assert found["requests"] == {"cpu": "100m", "memory": "512M"}


def test_the_id_of_the_job_is_a_handle():
    handle = {"TORCHX_JOB_ID": "kubernetes_mcad://torchx/${app_id}"}
    assert env(pods(built(app(role(env=handle))))[0])["TORCHX_JOB_ID"] == "kubernetes_mcad://torchx/ns:fit-x"


def test_all_problems_come_at_once():
    bad = role(
        "a",
        0,
        image="",
        port_map={"much_too_long_a_name": 70000, "text": "80"},
        env={"TORCHX_RANK0_HOST": "x", "1 2": "y"},
        mounts=[specs.BindMount(src_path="~/x", dst_path="rel")],
        min_replicas=2,
    )
    with pytest.raises(InvalidApp) as caught:
        built(app(bad, role("b"), role("b")))
    assert set(caught.value.fields) >= {
        "roles",
        "roles[a].num_replicas",
        "roles[a].image",
        "roles[a].port_map.much_too_long_a_name",
        "roles[a].port_map.text",
        "roles[a].env.TORCHX_RANK0_HOST",
        "roles[a].env.1 2",
        "roles[a].mounts[0].src_path",
        "roles[a].mounts[0].dst_path",
        "roles[a].min_replicas",
    }


def test_an_elastic_role_needs_its_smallest_number_of_pods():
    resource = built(app(role(replicas=4, min_replicas=2, max_retries=1)), coscheduler_name="co")
    assert resource["spec"]["schedulingSpec"]["minAvailable"] == 2
    assert items(resource)[0]["spec"] == {"minMember": 2}


def test_an_object_that_is_too_big_is_refused():
    with pytest.raises(InvalidApp) as caught:
        built(app(role(replicas=1200)))
    assert "layout=jobs" in str(caught.value)


def test_models_compare_equal_to_those_of_the_client():
    from kubernetes.client import models

    made = scheduler.mcad_svc(app(), "svc", "ns", "1234")
    assert isinstance(made, models.V1Service)
    assert made.spec.ports == [models.V1ServicePort(protocol="TCP", port=1234, target_port=1234)]
    assert made.status == models.V1ServiceStatus(load_balancer={})
    pod = scheduler.role_to_pod("a", "b", "ns", role(), "sa", None, None, None, None)
    assert pod.spec.service_account_name == "sa"
    assert pod.spec.containers[0].security_context == models.V1SecurityContext()
    assert json.loads(json.dumps(plain(pod)))["spec"]["containers"][0]["name"] == "a"


def test_create_pod_group_is_an_item_of_mcad():
    item = scheduler.create_pod_group(app(), role(replicas=3), 1, "ns", "fit-x")
    assert item["generictemplate"]["metadata"]["name"] == "fit-x-pg1"
    assert item["generictemplate"]["spec"] == {"minMember": 3}
    assert item["replicas"] == 1


def test_ports_of_the_service():
    assert scheduler.get_port_for_service(app(role(port_map={"a": 1}), role("b", port_map={"b": 2}))) == "2"
    assert scheduler.get_port_for_service(app(role(port_map={}))) == "29500"
    with pytest.warns(UserWarning, match="65536"):
        assert scheduler.get_port_for_service(app(role(port_map={"a": 65536}))) == "29500"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("-/_a/b/CD!123!", "abcd123"), ("-a-bcd123", "a-bcd123"), ("!!!", ""), ("1234abcd1234", "abcd1234")],
)
def test_cleanup_str(text, expected):
    assert scheduler.cleanup_str(text) == expected


def test_ids_are_cut_so_that_objects_fit():
    made = app(name="abcde")
    assert scheduler.get_unique_truncated_appid(made).startswith("abcde-")
    made = app(name="x" * 50)
    assert len(scheduler.get_unique_truncated_appid(made)) <= 59
    many = app(role("a", 1000), role("b", 1000), name="y" * 55)
    with pytest.warns(UserWarning, match="too long"):
        unique = scheduler.get_unique_truncated_appid(many)
    assert len(f"{unique}-1-999") <= 63
