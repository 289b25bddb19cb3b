"""The proxy in front of the API server, and the end of a cluster whose test run is killed."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kubernetes import build
from services.kubernetes.api import Api, ApiError
from services.kubernetes.authority import Certificate
from services.kubernetes.cluster import TESTS, Cluster
from services.kubernetes.fault_proxy import GONE, TOO_MANY, Fault, FaultProxy
from services.kubernetes.namespace import Namespace


@pytest.fixture
def proxy(namespace: Namespace) -> Iterator[FaultProxy]:
    with FaultProxy(namespace.cluster.plane) as proxy:
        yield proxy


@pytest.fixture
def api(proxy: FaultProxy, namespace: Namespace) -> Iterator[Api]:
    """A client that goes through the proxy."""
    folder = namespace.cluster.plane.authority.folder
    certificate = Certificate(folder / "admin.crt", folder / "admin.key")
    with contextlib.closing(Api(proxy.url, folder / "ca.crt", certificate, agent="me/1")) as api:
        yield api


def config_map(name: str) -> dict[str, object]:
    return {"metadata": {"name": name}}


def test_calls_are_passed_on_and_counted(proxy: FaultProxy, api: Api, namespace: Namespace):
    path = namespace.path("configmaps")
    api.create(path, config_map("mine"))
    assert "mine" in [found["metadata"]["name"] for found in api.items(path, limit=500)]
    (call,) = proxy.counted("GET", path)
    assert (call.query, call.agent, call.status) == ({"limit": "500"}, "me/1", 200)
    assert proxy.counted("POST")[0].status == 201


def test_statuses_before_and_after_the_effect(proxy: FaultProxy, api: Api, namespace: Namespace):
    path = namespace.path("configmaps")
    proxy.faults += [
        Fault("POST", path, **TOO_MANY),
        Fault("POST", path, status=500, is_after_effect=True),
        Fault("GET", f"{path}/.*", skip=1, status=500),
    ]
    answers = []
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            api.create(path, config_map("once"))
        answers.append((caught.value.status, caught.value.reason))
    assert answers == [(429, "TooManyRequests"), (500, "InternalError")]
    assert api.get(f"{path}/once")["metadata"]["name"] == "once"
    with pytest.raises(ApiError):
        api.get(f"{path}/once")
    assert [call.status for call in proxy.counted(path=f"{path}.*")] == [429, 500, 200, 500]


def test_a_lost_answer_and_a_silence(proxy: FaultProxy, api: Api, namespace: Namespace):
    path = namespace.path("configmaps")
    proxy.faults += [Fault("POST", is_dropped=True, is_after_effect=True), Fault("GET", hang_s=0.1)]
    with pytest.raises((http.client.HTTPException, OSError)):
        api.create(path, config_map("lost"))
    with pytest.raises((http.client.HTTPException, OSError)):
        api.get(f"{path}/lost")
    assert api.get(f"{path}/lost")["metadata"]["name"] == "lost"


def test_watches_break_in_three_ways(proxy: FaultProxy, api: Api, namespace: Namespace):
    path = namespace.path("configmaps")
    for number in range(3):
        namespace.make("configmaps", config_map(f"map-{number}"))
    query = "watch=true"
    proxy.faults += [
        Fault("GET", path, query=query, event=GONE),
        Fault("GET", path, query=query, cut_after=1),
        Fault("GET", path, query=query, cut_after=1, is_half_line=True),
    ]
    with pytest.raises(ApiError) as caught:
        list(api.watch(path))
    assert caught.value.status == 410
    seen = []
    for _ in range(2):
        seen.append(b"")
        with contextlib.suppress(http.client.HTTPException, OSError):  # some clients see no error at all
            for line in api.lines(path, watch="true"):
                seen[-1] += line
    assert [lines.count(b"\n") for lines in seen] == [1, 1]
    assert seen[0].endswith(b"\n")
    assert all(call.is_watch and call.status == 200 for call in proxy.counted("GET", path))


def test_a_cluster_ends_with_its_owner_and_so_do_its_pods(cluster: Cluster, tmp_path: Path):
    owner = subprocess.Popen(["sleep", "1000"])
    command = [sys.executable, "-m", "services.kubernetes", "--binary", str(build.control_plane()), "--folder",
               str(tmp_path / "other"), "--owner", str(owner.pid)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert keeper.stdout is not None
    with owner, keeper:
        try:
            assert keeper.stdout.readline().startswith("export KUBECONFIG=")
            other = Cluster.load(tmp_path / "other")
            with contextlib.closing(other.api):
                _start_a_pod(Namespace.create(other, "mine", tmp_path), tmp_path / "file")
            assert len(_processes_that_name(tmp_path)) > 6
        finally:
            owner.kill()
    deadline = time.monotonic() + 60
    while (left := _processes_that_name(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)  # the processes of pods are killed by another process
    assert left == []


def _start_a_pod(namespace: Namespace, file: Path) -> None:
    """A pod that never ends, with a second process that leaves its session."""
    file.touch()
    script = f"setsid tail -f {file} & exec tail -f {file}"
    container = {"name": "main", "image": "busybox", "command": ["sh", "-c", script]}
    namespace.make("pods", {"metadata": {"name": "stray"}, "spec": {"containers": [container]}})
    namespace.until("pods", "stray", lambda found: found is not None and found["status"]["phase"] == "Running")


def _processes_that_name(path: Path) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(path) in line]
