"""Fixtures: clusters that all workers of a test run share, and a namespace for each test.

- `cluster`, `namespace` and `scenario`: the plain control plane.
- `queue_cluster`, `queue_namespace` and `queue_scenario`: a control plane with AppWrapper and Kueue.
- `mcad_cluster` and `mcad_namespace`: one with MCAD, where AppWrappers are of version v1beta1.
- `coscheduling_cluster` and `coscheduling_scenario`: one with a second scheduler, `coscheduling`. Its tests have the
  marker `coscheduling` and run under `make test-coscheduling` only, outside CI.

A test that uses a cluster with controllers gets the marker `controllers`, and so runs under `make test-controllers`,
not under `make test`. An example:

    def test_a_job_waits_for_quota(queue_namespace: QueueNamespace):
        queue = queue_namespace.queue(cpu="1")            # a LocalQueue with a ClusterQueue of its own
        high = queue_namespace.priority_class("high", 100)  # the name of a WorkloadPriorityClass
        made = queue_namespace.make("jobs", job(..., labels={"kueue.x-k8s.io/queue-name": queue.name}))
        workload = queue_namespace.until_workload(made["metadata"]["uid"], "Admitted")
        queue.hold(); queue.release(); queue.set_quota(cpu="4"); queue.pending()

A test that stops a controller or gives it other settings is marked `alone`: no other test uses the cluster meanwhile,
and all controllers run as before at its end:

    @pytest.mark.alone
    def test_kueue_is_down(queue_namespace: QueueNamespace):
        queue_namespace.controllers("stop", name="kueue")
        queue_namespace.controllers("start", name="kueue", settings={"waitForPodsReady": {"timeout": "5s"}})
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.kubernetes import build

if TYPE_CHECKING:
    from services.kubernetes.cluster import Cluster
    from services.kubernetes.controllers.queues import QueueNamespace
    from services.kubernetes.namespace import Namespace
    from services.kubernetes.scenario import Scenario

QUEUE_CONTROLLERS = (build.APPWRAPPER, build.KUEUE)
MCAD_CONTROLLERS = (build.MCAD,)
COSCHEDULING_CONTROLLERS = (build.COSCHEDULING,)
_NEEDS = {
    "cluster": (build.CONTROL_PLANE,),
    "shared_cluster": (build.CONTROL_PLANE,),
    "queue_cluster": (build.CONTROL_PLANE, *QUEUE_CONTROLLERS),
    "shared_queue_cluster": (build.CONTROL_PLANE, *QUEUE_CONTROLLERS),
    "mcad_cluster": (build.CONTROL_PLANE, *MCAD_CONTROLLERS),
    "coscheduling_cluster": (build.CONTROL_PLANE, *COSCHEDULING_CONTROLLERS),
}
"""The programs of each fixture."""
_builder: subprocess.Popen[bytes] | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="write what the control plane answers in each scenario as a transcript"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build in the background from now on if a test needs a cluster: it waits until the build is there."""
    global _builder
    if session.config.option.collectonly or _builder is not None:
        return
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    needed = {program.name: program for fixture in fixtures & _NEEDS.keys() for program in _NEEDS[fixture]}
    if missing := [name for name, program in needed.items() if not build.is_built(program)]:
        command = [sys.executable, build.__file__, *missing]
        _builder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                    stderr=subprocess.DEVNULL)  # fmt: skip


def pytest_sessionfinish() -> None:
    if _builder is not None:
        _builder.terminate()
        _builder.wait()


@pytest.fixture(scope="session")
def cluster_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder that all workers of this test run share."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if hasattr(request.config, "workerinput") else base) / "cluster"


@pytest.fixture
def cluster(cluster_folder: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The real control plane, with nodes that run pods as processes."""
    with _loaded(cluster_folder, request.config) as found:
        yield found


@pytest.fixture(scope="class")
def shared_cluster(cluster_folder: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The same for fixtures that serve all tests of a class."""
    with _loaded(cluster_folder, request.config) as found:
        yield found


@contextmanager
def _loaded(folder: Path, config: pytest.Config, controllers: tuple[build.Program, ...] = ()) -> Iterator[Cluster]:
    from services.kubernetes.cluster import Cluster

    if not (folder / "ready").exists():
        _start(folder, config, controllers)
    found = Cluster.load(folder)
    yield found
    found.api.close()


def _start(folder: Path, config: pytest.Config, controllers: tuple[build.Program, ...]) -> None:
    """Start the cluster of this test run, or wait until another worker has started it."""
    from services.kubernetes.cluster import start_shared

    missing = folder / "missing"
    with _unlimited_time():
        try:
            if missing.exists():
                raise build.CannotFetch(missing.read_text())
            binary = build.control_plane(_speaker(config))
            for program in controllers:
                build.built(program, _speaker(config))
        except build.CannotFetch as exc:
            folder.mkdir(parents=True, exist_ok=True)
            missing.write_text(str(exc))  # no other test tries again, and waits for the network again
            pytest.skip(f"the programs of a Kubernetes cluster cannot be built: {exc}")
        owner = os.getppid() if hasattr(config, "workerinput") else os.getpid()
        start_shared(folder, owner, binary, [f"--controller={program.name}" for program in controllers])


@pytest.fixture
def queue_cluster(cluster_folder: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A control plane with AppWrapper and Kueue."""
    with _with_controllers(cluster_folder.with_name("queue-cluster"), request, QUEUE_CONTROLLERS) as found:
        yield found


@pytest.fixture(scope="class")
def shared_queue_cluster(cluster_folder: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The same for fixtures that serve all tests of a class."""
    with _with_controllers(cluster_folder.with_name("queue-cluster"), request, QUEUE_CONTROLLERS) as found:
        yield found


@pytest.fixture
def mcad_cluster(cluster_folder: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A control plane with MCAD."""
    with _with_controllers(cluster_folder.with_name("mcad-cluster"), request, MCAD_CONTROLLERS) as found:
        yield found


@pytest.fixture
def coscheduling_cluster(cluster_folder: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A control plane with a second scheduler, which places pods in groups."""
    folder = cluster_folder.with_name("coscheduling-cluster")
    with _with_controllers(folder, request, COSCHEDULING_CONTROLLERS) as found:
        yield found


@contextmanager
def _with_controllers(
    folder: Path, request: pytest.FixtureRequest, controllers: tuple[build.Program, ...]
) -> Iterator[Cluster]:
    is_alone = request.node.get_closest_marker("alone") is not None
    with _loaded(folder, request.config, controllers) as found, _used(folder, is_alone=is_alone):
        try:
            yield found
        finally:
            if is_alone:
                assert found.controllers is not None
                found.controllers("restore")


@contextmanager
def _used(folder: Path, *, is_alone: bool) -> Iterator[None]:
    """Keep tests that are marked `alone` apart from all others. The turnstile keeps them from waiting for ever."""
    with (folder / "use.lock").open("w") as use, (folder / "turnstile.lock").open("w") as turnstile:
        with _unlimited_time():
            fcntl.flock(turnstile, fcntl.LOCK_EX)
            fcntl.flock(use, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
            fcntl.flock(turnstile, fcntl.LOCK_UN)
        yield


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Namespace]:
    """A namespace for this test alone."""
    from services.kubernetes.namespace import Namespace

    found = Namespace.create(cluster, _namespace_name(request), tmp_path)
    yield found
    found.remove()


@pytest.fixture
def queue_namespace(queue_cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QueueNamespace]:
    """A namespace for this test alone, on the cluster with AppWrapper and Kueue."""
    from services.kubernetes.controllers.queues import QueueNamespace

    found = QueueNamespace.create(queue_cluster, _namespace_name(request), tmp_path)
    yield found
    found.remove()


@pytest.fixture
def mcad_namespace(mcad_cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Namespace]:
    """A namespace for this test alone, on the cluster with MCAD."""
    from services.kubernetes.namespace import MCAD_GROUPS, Namespace

    found = Namespace.create(mcad_cluster, _namespace_name(request), tmp_path, groups=MCAD_GROUPS)
    yield found
    found.remove()


def _namespace_name(request: pytest.FixtureRequest) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:40].strip("-")
    return f"{words}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def scenario(namespace: Namespace, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scenario]:
    """Runs of the executor in a namespace of their own. Their run id is the name of the test."""
    with _scenario(namespace, request, tmp_path) as found:
        yield found


@pytest.fixture
def queue_scenario(
    queue_namespace: QueueNamespace, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Scenario]:
    """The same on the cluster with AppWrapper and Kueue."""
    with _scenario(queue_namespace, request, tmp_path) as found:
        yield found


@pytest.fixture
def coscheduling_scenario(
    coscheduling_cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Scenario]:
    """The same on the cluster with a scheduler that places pods in groups."""
    from services.kubernetes.namespace import Namespace

    namespace = Namespace.create(coscheduling_cluster, _namespace_name(request), tmp_path)
    with _scenario(namespace, request, tmp_path) as found:
        yield found
    namespace.remove()


@contextmanager
def _scenario(namespace: Namespace, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scenario]:
    from services.kubernetes.scenario import Scenario

    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
    with Scenario.below(tmp_path, name, namespace) as found:
        yield found
        found.check()
        if request.config.getoption("--record"):
            found.record()


@contextmanager
def _unlimited_time() -> Iterator[None]:
    """Stop the clock of pytest-timeout: a first build takes longer than any test may."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)


def _speaker(config: pytest.Config) -> Callable[[str], None]:
    """Writes past the capturing of output, so that a person sees that something goes on."""
    capture = config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", file=sys.stderr, flush=True)

    return say
