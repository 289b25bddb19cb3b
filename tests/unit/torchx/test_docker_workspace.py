"""The docker path of workspaces, against the answers that a Docker engine gives to these requests."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

import pytest

from atoll.errors import ConfigError
from atoll.torchx import kubernetes_mcad_scheduler as module
from torchx_apps import app, role

pytestmark = pytest.mark.server

IMAGE = "sha256:" + "ab" * 32
BUILD = [{"stream": "Step 1/3 : ARG IMAGE"}, {"aux": {"ID": IMAGE}}, {"stream": f"Successfully built {IMAGE[7:19]}\n"}]
PUSH = [{"status": "The push refers to repository [example.com/team]"}, {"id": "1", "status": "Pushed"}]
FAILED_BUILD = [{"errorDetail": {"message": "no such file"}, "error": "COPY failed: no such file"}]


class Engine(BaseHTTPRequestHandler):
    """Answers as Docker Engine 27 (API 1.47) does."""

    protocol_version = "HTTP/1.1"
    requests: list[tuple[str, str, bytes]]
    build: list[dict]

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _serve(self) -> None:
        path = urlsplit(self.path).path.partition("/v1.47")[2]
        self.requests.append((self.command, self.path, self._body()))
        if path == "/build":
            self._stream(self.build)
        elif path.endswith("/push"):
            self._stream(PUSH)
        elif path.endswith("/tag"):
            self._send(201, b"")
        elif path == "/images/create":
            self._send(404, b'{"message":"manifest unknown"}')
        elif path == "/images/json":
            self._send(200, b"[]")
        else:
            self._send(200, json.dumps({"Id": IMAGE, "RepoTags": []}).encode())

    do_GET = do_POST = _serve  # noqa: N815

    def _stream(self, events: list[dict]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in (json.dumps(each).encode() + b"\r\n" for each in events):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def engine() -> Iterator[type[Engine]]:
    handler = type("Recorded", (Engine,), {"requests": [], "build": BUILD})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.port = server.server_port
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def scheduler(engine):
    import docker

    client = docker.DockerClient(base_url=f"tcp://127.0.0.1:{engine.port}", version="1.47")
    yield module.create_scheduler("test", docker_client=client, dialect="v1beta2")
    client.close()


CFG = {"image_repo": "example.com/team", "namespace": "ns"}


def test_the_workspace_becomes_an_image_that_is_pushed(scheduler, engine, tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / ".dockerignore").write_text("secret.txt\n")
    made = app(role(image="example.com/base:1"))
    scheduler.build_workspace_and_update_role(made.roles[0], str(tmp_path), CFG)
    assert made.roles[0].image == IMAGE
    body = next(body for _, path, body in engine.requests if "/build?" in path)
    with tarfile.open(fileobj=io.BytesIO(body)) as context:
        names = context.getnames()
    assert {"train.py", "Dockerfile.torchx"} <= set(names)
    assert "secret.txt" not in names

    info = scheduler.submit_dryrun(made, CFG)
    assert made.roles[0].image == IMAGE
    remote = f"example.com/team:{IMAGE[7:]}"
    job = info.request.resource["spec"]["components"][0]["template"]
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == remote
    scheduler.push_images(info.request.images_to_push)
    paths = [urlsplit(path).path for _, path, _ in engine.requests]
    assert f"/v1.47/images/{IMAGE}/tag" in paths
    assert "/v1.47/images/example.com/team/push" in paths


def test_an_image_without_a_repository_is_refused(scheduler):
    with pytest.raises(KeyError, match="image_repo"):
        scheduler.submit_dryrun(app(role(image=IMAGE)), {"namespace": "ns"})


def test_a_build_that_fails_says_why(scheduler, engine, tmp_path):
    from docker.errors import BuildError

    engine.build = FAILED_BUILD
    with pytest.raises(BuildError, match="COPY failed"):
        scheduler.build_workspace_and_update_role(role(), str(tmp_path), CFG)


def test_a_missing_docker_names_the_ways_without_it(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(ConfigError) as caught:
        module.create_scheduler("test").build_workspace_and_update_role(role(), str(tmp_path), CFG)
    assert caught.value.reason == "no_docker"
    assert "code_store" in (caught.value.hint or "")


def test_code_store_needs_no_docker(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)\n")
    made = role()
    given = {**CFG, "code_store": str(tmp_path / "store")}
    module.create_scheduler("test").build_workspace_and_update_role(made, str(tmp_path / "code"), given)
    assert made.image == "example.com/train:1"
    assert made.args[1] == "atoll.torchx.unpack"
