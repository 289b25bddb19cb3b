"""Where the cluster is and who asks: kubeconfig, pod, plug-ins, tokens, proxies and clients of the caller."""

from __future__ import annotations

import json
import socket
import stat
import sys
from pathlib import Path
from threading import Thread

import pytest
from kube_api import Reply, client_of, failure

from atoll.errors import AuthError, BackendUnavailable, ConfigError, InvalidSpec
from atoll.kube import connection as connections
from atoll.kube.connection import Connection, environment_proxy

kubernetes = pytest.importorskip("kubernetes")
EXEC = "client.authentication.k8s.io/v1"
PATH = "/api/v1/namespaces/ns/pods"


@pytest.fixture
def pod(tmp_path, monkeypatch, api):
    """This process seems to run in a pod."""
    import certifi
    from kubernetes.config import incluster_config

    folder = tmp_path / "pod"
    folder.mkdir()
    for name, text in {"token": "of-the-pod", "namespace": "of-the-pod", "ca.crt": "none"}.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(connections, "POD_FOLDER", str(folder))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(folder / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(folder / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (folder / "ca.crt").write_text(Path(certifi.where()).read_text())
    return folder


@pytest.mark.server
def test_a_given_kubeconfig_or_context_comes_before_the_pod_and_the_pod_before_the_default(
    api, pod, tmp_path, monkeypatch
):
    config = str(api.kubeconfig(tmp_path))
    monkeypatch.setenv("KUBECONFIG", config)
    inside = Connection()
    assert (inside.host, inside.place) == ("https://10.0.0.1:443", (None, "of-the-pod"))
    assert inside.headers()["authorization"] == "bearer of-the-pod"
    for explicit in (Connection(kubeconfig=config), Connection(context="here")):
        assert (explicit.host, explicit.place) == (api.url, ("here", "team"))
    (pod / "token").unlink()
    assert Connection().host == api.url


@pytest.mark.server
def test_no_cluster_and_a_wrong_context_are_errors_of_the_configuration(api, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    for wrong in (Connection(), Connection(kubeconfig=str(api.kubeconfig(tmp_path)), context="elsewhere")):
        with pytest.raises(ConfigError) as caught:
            _ = wrong.host
        assert caught.value.reason == "kubeconfig"


@pytest.mark.server
def test_the_global_configuration_is_neither_read_nor_changed(api, tmp_path, monkeypatch):
    client = kubernetes.client
    other = client.Configuration()
    other.host = "https://elsewhere.invalid"
    monkeypatch.setattr(client.Configuration, "_default", other)
    api.replies = [Reply()]
    api.client(tmp_path, token="mine").get(PATH, "x", "status")
    assert client.Configuration._default is other
    assert (other.host, other.api_key) == ("https://elsewhere.invalid", {})
    assert api.requests[0].headers["authorization"] == "Bearer mine"


def plug_in(folder, *tokens):
    """A program for the kubeconfig that prints one token after the other, and the last one from then on."""
    path = folder / "plug-in"
    (folder / "tokens").write_text("\n".join(tokens))
    path.write_text(f"""#!{sys.executable}
import json, os, pathlib
path = pathlib.Path({str(folder / "tokens")!r})
tokens = path.read_text().split()
path.write_text("\\n".join(tokens[1:] or tokens))
assert "KUBERNETES_EXEC_INFO" in os.environ and os.environ["FROM_CONFIG"] == "yes"
kind = {{"apiVersion": {EXEC!r}, "kind": "ExecCredential"}}
print(json.dumps({{**kind, "status": {{"token": tokens[0]}}}}))
""")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    env = [{"name": "FROM_CONFIG", "value": "yes"}]
    return {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": str(path),
        "env": env,
        "interactiveMode": "Never",
    }


@pytest.mark.server
@pytest.mark.process
def test_a_token_that_has_expired_is_read_again_from_the_plug_in(api, tmp_path):
    api.replies = [failure(401, "Unauthorized"), Reply(body={"items": []}), failure(401), Reply(pieces=[b"line\n"])]
    client = api.client(tmp_path, exec=plug_in(tmp_path, "first", "second", "third"))
    assert client.list(PATH, "x", "status") == []
    assert b"".join(client.stream(PATH, "x", "logs", query={}, idle_s=5.0)) == b"line\n"
    sent = [request.headers["authorization"] for request in api.requests]
    assert sent == ["Bearer first", "Bearer second", "Bearer second", "Bearer third"]


@pytest.mark.server
@pytest.mark.process
def test_a_token_that_is_refused_twice_is_an_error(api, tmp_path):
    api.replies = [failure(401, "Unauthorized")]
    with pytest.raises(AuthError) as caught:
        api.client(tmp_path, exec=plug_in(tmp_path, "bad")).get(PATH, "x", "status")
    assert (caught.value.reason, len(api.requests)) == ("login", 2)


@pytest.mark.server
@pytest.mark.process
def test_a_plug_in_that_fails_is_an_error_of_the_configuration_or_of_the_login(api, tmp_path):
    api.replies = [failure(401, "Unauthorized")]
    path = tmp_path / "broken"
    path.write_text("#!/bin/sh\necho no session >&2\nexit 3\n")
    path.chmod(0o755)
    user = {"apiVersion": EXEC, "command": str(path), "interactiveMode": "Never"}
    with pytest.raises((ConfigError, AuthError)):
        api.client(tmp_path, exec=user).get(PATH, "x", "status")


@pytest.mark.server
@pytest.mark.parametrize("made", ["ApiClient", "BatchV1Api", "CoreV1Api"])
def test_requests_go_through_a_given_client_whose_credentials_are_left_alone(api, made):
    client = kubernetes.client
    configuration = client.Configuration()
    configuration.host, configuration.api_key = api.url, {"authorization": "Bearer given"}
    given = client.ApiClient(configuration)
    found = given if made == "ApiClient" else getattr(client, made)(given)
    api.replies = [failure(401, "Unauthorized")]
    with pytest.raises(AuthError):
        client_of(Connection(api_client=found)).get(PATH, "x", "status")
    assert [request.headers["authorization"] for request in api.requests] == ["Bearer given"]


def test_something_else_is_refused_as_a_client():
    with pytest.raises(InvalidSpec) as caught:
        Connection(api_client=object())
    assert "configuration" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("host", "variables", "proxy"),
    [
        ("https://c.example", {"HTTPS_PROXY": "http://p:1", "HTTP_PROXY": "http://q:1"}, "http://p:1"),
        ("https://c.example", {"https_proxy": "http://p:1"}, "http://p:1"),
        ("https://c.example", {"HTTP_PROXY": "http://q:1"}, None),
        ("http://c.example", {"HTTP_PROXY": "http://q:1"}, "http://q:1"),
        ("https://127.0.0.1:6443", {"HTTPS_PROXY": "http://p:1"}, None),
        ("https://localhost:6443", {"HTTPS_PROXY": "http://p:1"}, None),
        ("https://c.example", {}, None),
    ],
)
def test_the_proxy_of_the_environment_is_that_of_the_scheme(host, variables, proxy, monkeypatch):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment_proxy(host) == proxy


@pytest.fixture
def proxy():
    """A proxy that refuses every tunnel, and the addresses that clients asked it for."""
    asked: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                found, _ = listener.accept()
            except OSError:
                return
            with found:
                asked.append(found.recv(4096).split()[1].decode())
                found.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

    thread = Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.mark.server
def test_a_cluster_is_reached_through_the_proxy_of_the_environment_or_of_its_kubeconfig(
    api, proxy, tmp_path, monkeypatch
):
    url, asked = proxy
    server = "https://cluster.invalid:6443"
    monkeypatch.setenv("HTTPS_PROXY", url)
    with pytest.raises(BackendUnavailable) as caught:
        client_of(Connection(kubeconfig=str(api.kubeconfig(tmp_path, server=server)))).get(PATH, "x", "status")
    assert (caught.value.reason, asked) == ("proxy", ["cluster.invalid:6443"])

    monkeypatch.setenv("NO_PROXY", "other.example,.invalid")
    direct = Connection(kubeconfig=str(api.kubeconfig(tmp_path, server=server)))
    assert type(direct.pool).__name__ == "PoolManager"
    named = Connection(kubeconfig=str(api.kubeconfig(tmp_path, server=server, **{"proxy-url": url})))
    with pytest.raises(BackendUnavailable) as caught:
        client_of(named).get(PATH, "x", "status")
    assert (caught.value.reason, len(asked)) == ("proxy", 2)


@pytest.mark.server
def test_several_files_are_read_as_one(api, tmp_path, monkeypatch):
    first = tmp_path / "first"
    first.write_text(json.dumps({"current-context": "here"}))
    monkeypatch.setenv("KUBECONFIG", f"{first}:{api.kubeconfig(tmp_path)}")
    assert (Connection().host, Connection().place) == (api.url, ("here", "team"))
