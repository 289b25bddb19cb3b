"""Volumes as settings."""

from __future__ import annotations

import pytest

from atoll.kube.volumes import pod_volumes, shared_memory, volume_problems


@pytest.mark.parametrize(
    ("volume", "source"),
    [
        ({"pvc": "data"}, {"persistentVolumeClaim": {"claimName": "data"}}),
        ({"host_path": "/mnt/x"}, {"hostPath": {"path": "/mnt/x"}}),
        ({"secret": "s"}, {"secret": {"secretName": "s"}}),
        ({"config_map": "c"}, {"configMap": {"name": "c"}}),
        ({"empty_dir": True}, {"emptyDir": {}}),
        ({"empty_dir": "memory"}, {"emptyDir": {"medium": "Memory"}}),
        ({"empty_dir": "10Gi"}, {"emptyDir": {"sizeLimit": "10Gi"}}),
    ],
)
def test_sources(volume, source):
    given = [{**volume, "mount": "/data"}]
    assert list(volume_problems(given)) == []
    assert pod_volumes(given) == ([{"name": "volume-0", **source}], [{"name": "volume-0", "mountPath": "/data"}])


def test_read_only_and_sub_path():
    sources, mounts = pod_volumes([{"pvc": "d", "mount": "/d", "read_only": True, "sub_path": "a/b"}])
    assert sources[0]["persistentVolumeClaim"]["readOnly"] is True
    assert mounts == [{"name": "volume-0", "mountPath": "/d", "readOnly": True, "subPath": "a/b"}]


@pytest.mark.parametrize(
    ("volume", "field"),
    [
        ({"mount": "/d"}, "volumes[0]"),
        ({"pvc": "a", "secret": "b", "mount": "/d"}, "volumes[0]"),
        ({"pvc": "A b", "mount": "/d"}, "volumes[0].pvc"),
        ({"host_path": "x", "mount": "/d"}, "volumes[0].host_path"),
        ({"host_path": "/x/../y", "mount": "/d"}, "volumes[0].host_path"),
        ({"empty_dir": False, "mount": "/d"}, "volumes[0].empty_dir"),
        ({"empty_dir": "10 GB", "mount": "/d"}, "volumes[0].empty_dir"),
        ({"pvc": "a"}, "volumes[0].mount"),
        ({"pvc": "a", "mount": "d"}, "volumes[0].mount"),
        ({"pvc": "a", "mount": "/d", "read_only": "yes"}, "volumes[0].read_only"),
        ({"pvc": "a", "mount": "/d", "sub_path": "../x"}, "volumes[0].sub_path"),
        ({"pvc": "a", "mount": "/d", "nfs": "x"}, "volumes[0].nfs"),
    ],
)
def test_broken_rules(volume, field):
    (problem,) = volume_problems([volume])
    assert problem.startswith((f"{field}:", f"{field}="))


def test_two_volumes_at_one_place():
    (problem,) = volume_problems([{"pvc": "a", "mount": "/d"}, {"pvc": "b", "mount": "/d"}])
    assert problem.startswith("volumes[1].mount")


def test_shared_memory_has_the_size_or_none():
    assert shared_memory("2Gi")[0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert shared_memory(None)[0]["emptyDir"] == {"medium": "Memory"}
