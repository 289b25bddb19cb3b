"""The parts of the process kubelet that need no cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.kubernetes.kubelet.environment import ConfigError, command_line, expand, variables
from services.kubernetes.kubelet.images import full_name, known_images
from services.kubernetes.kubelet.logs import Log, Selection
from services.kubernetes.kubelet.quantities import in_units
from services.kubernetes.kubelet.volumes import substituted


@pytest.mark.parametrize(
    ("text", "expanded"),
    [("$(A)-$(B)", "1-$(B)"), ("$$(A)", "$(A)"), ("$A", "$A"), ("$$$(A)", "$1"), ("plain", "plain")],
)
def test_references_in_commands_and_values(text: str, expanded: str):
    assert expand(text, {"A": "1"}) == expanded


def test_the_last_of_one_name_wins_and_sees_the_one_before():
    container = {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "$(A)2"}]}
    assert variables({}, container, {"A": "0"}, lambda *_: None) == {"A": "12"}


def test_what_is_optional_may_be_missing():
    reference = {"name": "gone", "key": "key", "optional": True}
    container = {
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": reference}}],
        "envFrom": [{"secretRef": {"name": "gone", "optional": True}}],
    }
    assert variables({"metadata": {"namespace": "n"}}, container, {}, lambda *_: None) == {}
    del reference["optional"]
    with pytest.raises(ConfigError, match='secret "gone" not found'):
        variables({"metadata": {"namespace": "n"}}, container, {}, lambda *_: None)


def test_arguments_without_a_command_replace_those_of_the_image():
    assert command_line({}, ("sh",), {}) == ["sh"]
    assert command_line({"args": ["-c", "true"], "command": ["bash"]}, ("sh",), {}) == ["bash", "-c", "true"]
    with pytest.raises(ConfigError):
        command_line({}, (), {})


@pytest.mark.parametrize(
    ("quantity", "divisor", "units"),
    [("1500m", "1m", "1500"), ("1500m", "1", "2"), ("1Gi", "1Mi", "1024"), ("2", "0", "2"), ("1k", "1", "1000")],
)
def test_quantities(quantity: str, divisor: str, units: str):
    assert in_units(quantity, divisor) == units


@pytest.mark.parametrize(
    ("name", "full"),
    [("a", "a:latest"), ("a:1", "a:1"), ("host:5000/a", "host:5000/a:latest"), ("a@sha256:1", "a@sha256:1")],
)
def test_image_names(name: str, full: str):
    assert full_name(name) == full


def test_pip_in_the_bare_image_installs_below_the_home_of_the_pod():
    env = known_images()["python:3.11"].environment()
    assert env["PIP_USER"] == "1", "otherwise a pod changes the Python of this machine"


def test_without_mounts_folders_take_the_place_of_mount_points():
    mounts = [("/pod/data", "/data", False), ("/pod/deep", "/data/deep", False)]
    told = substituted("cp /data/a /data/deep/b /database --to=/data", mounts)
    assert told == "cp /pod/data/a /pod/deep/b /database --to=/pod/data"


def test_a_log_without_a_last_line_end(tmp_path: Path):
    log = Log(tmp_path / "log")
    for piece in (b"on", b"e\ntwo\n", b"x" * 40_000):
        log.append(piece)
    log.close()
    assert b"".join(log.read(Selection())) == b"one\ntwo\n" + b"x" * 40_000
    assert b"".join(log.read(Selection(is_followed=True, limit_bytes=5))) == b"one\nt"
