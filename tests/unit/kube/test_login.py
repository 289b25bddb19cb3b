"""Credentials that the client of Kubernetes could not get: it logs this and goes on as a stranger, and we do not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConfigError
from atoll.kube.connection import Connection
from atoll.kube.errors import Refusal, translated


def kubeconfig(folder: Path, user: dict[str, Any]) -> str:
    path = folder / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(content))
    return str(path)


def plugin(script: str) -> dict[str, Any]:
    version = "client.authentication.k8s.io/v1"
    return {"exec": {"apiVersion": version, "command": "sh", "args": ["-c", script], "interactiveMode": "Never"}}


@pytest.mark.process
def test_a_plug_in_that_fails_is_named(tmp_path: Path) -> None:
    connection = Connection(kubeconfig=kubeconfig(tmp_path, plugin("echo the session has expired >&2; exit 255")))
    with pytest.raises(ConfigError) as caught:
        connection.headers()
    assert caught.value.reason == "login"
    assert "the session has expired" in caught.value.message


@pytest.mark.process
def test_a_plug_in_that_works_gives_the_token(tmp_path: Path) -> None:
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "t0"}}
    connection = Connection(kubeconfig=kubeconfig(tmp_path, plugin(f"echo '{json.dumps(answer)}'")))
    assert connection.headers()["authorization"] == "Bearer t0"


def test_a_user_without_credentials_is_no_error_and_root_keeps_its_handlers(tmp_path: Path) -> None:
    before = list(logging.getLogger().handlers)
    assert "authorization" not in Connection(kubeconfig=kubeconfig(tmp_path, {})).headers()
    assert logging.getLogger().handlers == before


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Connection(kubeconfig=str(tmp_path / "none")).headers()
    assert caught.value.reason == "kubeconfig"
    assert str(tmp_path / "none") in caught.value.message


@pytest.mark.parametrize(("user", "reason"), [("system:anonymous", "login"), ("jane", "forbidden")])
def test_a_stranger_is_asked_to_log_in_and_a_user_for_a_role(user: str, reason: str) -> None:
    message = f'jobs.batch is forbidden: User "{user}" cannot create resource "jobs"'
    found = translated(Refusal(403, {"message": message}), "Job `x`", "submit", "kubernetes")
    assert (found.code, found.reason) == ("AuthError", reason)
