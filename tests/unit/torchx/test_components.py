"""An Atoll run as a component of TorchX, and workspaces without docker."""

from __future__ import annotations

import json
import os

import pytest
from torchx.specs.finder import get_component

from atoll.errors import ConfigError
from atoll.registry import open_store
from atoll.torchx import components, unpack
from atoll.torchx.mounts import SecretMount
from atoll.torchx.workspace import upload_workspace
from torchx_apps import role


def test_a_run_of_atoll_is_a_component():
    made = components.diloco("train:main", "s3://b/x", 3, "img", mounts=["type=secret", "src=s", "dst=/s"])
    only = made.roles[0]
    assert only.num_replicas == 3
    assert only.env["REPLICA_RANK"] == "${replica_id}"
    assert only.args[only.args.index("--run-id") + 1] == "${app_id}"
    assert only.args[only.args.index("--trainer-module") + 1] == "train"
    assert only.mounts == [SecretMount("s", "/s")]


def test_the_arguments_of_a_run_have_nothing_that_torchx_or_kubernetes_replaces():
    given = {"a": "$1 $$ $(WORLD_SIZE) ${app_id}", "b": ["\\$", {"$c": None}]}
    made = components.diloco("train:main", "s3://b/x", args=json.dumps(given))
    assert "$" not in made.roles[0].args[-1]
    assert json.loads(made.roles[0].args[-1]) == given


@pytest.mark.parametrize("wrong", [{"entry": "train"}, {"replicas": 0}, {"args": "[]"}, {"args": "no"}])
def test_wrong_arguments_of_the_component_are_refused(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}="):
        components.diloco(**{"entry": "train:main", "store": "s3://b/x", "image": "i", **wrong})


def test_torchx_finds_the_component_in_its_file():
    found = get_component(f"{components.__file__}:diloco")
    assert found.validation_errors == []
    assert found.fn_name == "diloco"


def test_a_workspace_goes_to_a_store_and_comes_back(tmp_path, monkeypatch):
    folder, store = tmp_path / "code", tmp_path / "store"
    folder.mkdir()
    (folder / "train.py").write_text("print('here')\n")
    made = role(args=["train.py", "${app_id}"])
    upload_workspace(made, str(folder), str(store))
    uri, digest = made.args[2:4]
    assert made.entrypoint == "python"
    assert made.args == ["-m", "atoll.torchx.unpack", uri, digest, "--", "python", "train.py", "${app_id}"]
    assert len(list(open_store(uri).list(""))) == 1

    became = {}
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(os, "execvpe", lambda *given: became.update(given=given, folder=os.getcwd()))
    monkeypatch.chdir(tmp_path)
    unpack.main([uri, digest, "--", "python", "train.py"])
    program, command, env = became["given"]
    assert (program, command) == ("python", ["python", "train.py"])
    assert os.path.exists(os.path.join(became["folder"], "train.py"))
    assert env["PYTHONPATH"].split(os.pathsep)[0] == became["folder"]


def test_only_local_folders_can_be_packed(tmp_path):
    with pytest.raises(ConfigError):
        upload_workspace(role(), "s3://bucket/code", str(tmp_path))


def test_the_unpacker_wants_a_command():
    with pytest.raises(SystemExit):
        unpack.main(["uri", "digest", "--"])
