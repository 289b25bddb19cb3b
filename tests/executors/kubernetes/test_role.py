"""The Role of a launcher is what the executor really does: nothing is missing, and nothing is too much."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from atoll.context import RunContext
from atoll.errors import AuthError
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.kube.role import ALWAYS, LOCAL_QUEUES, LOOKS, OPTIONAL, PENDING, WORKLOADS, Right, rights, role, role_text
from atoll.kube.settings import KubernetesSettings
from atoll.runs.prepare import prepare
from atoll.spec import Placement
from atoll.status import Reason, ReplicaState
from repository import DOCS
from services.kubernetes.control_plane import certificate_of
from services.kubernetes.controllers.queues import QueueNamespace
from services.kubernetes.fault_proxy import Call, Fault, FaultProxy
from services.kubernetes.namespace import Namespace

JOBS = "atoll.testing.contract_jobs"
LIMIT_S = 60.0
SETTINGS: dict[str, Any] = {"image": "atoll-test", "store_is_mounted": True}
_RESOURCE = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/[^/]+(?P<place>/namespaces/[^/]+)?/(?P<kind>[a-z]+)(?P<name>/[^/]+)?(?P<part>/[a-z]+)?"
)
_CLUSTER_WIDE = "cluster-wide "
_ACT = tuple[str, str, str]
"""A verb, a group and a resource."""


def act(call: Call) -> _ACT | None:
    """What RBAC calls this request; None if every user may do it, such as asking for permissions."""
    found = _RESOURCE.fullmatch(call.path)
    if found is None or found["group"] == "authorization.k8s.io":
        return None
    place = "" if found["place"] or found["kind"] == "namespaces" else _CLUSTER_WIDE
    verbs = {"POST": "create", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}
    reading = "get" if found["name"] else "watch" if call.is_watch else "list"
    return verbs.get(call.method, reading), found["group"] or "", f"{place}{found['kind']}{found['part'] or ''}"


def acts(of: tuple[Right, ...]) -> set[_ACT]:
    return {(verb, right.group, right.resource) for right in of for verb in right.verbs}


@contextmanager
def launcher(namespace: Namespace, **settings: Any) -> Iterator[tuple[KubernetesExecutor, FaultProxy]]:
    """An executor of a user who has only the Role of these settings, and the record of its requests."""
    made = {**SETTINGS, "namespace": namespace.name, **settings}
    config = namespace.user("launcher", role(namespace.name, KubernetesSettings(**made))["rules"])
    with FaultProxy(namespace.cluster.plane, certificate_of(config)) as proxy:
        yield KubernetesExecutor(kubeconfig=str(proxy.kubeconfig(namespace.folder)), **made), proxy


def recorded(proxy: FaultProxy) -> set[_ACT]:
    return {found for call in list(proxy.calls) if (found := act(call)) is not None}


@pytest.mark.process
@pytest.mark.server
def test_a_whole_life_needs_exactly_the_role(namespace: Namespace, store: str) -> None:
    with launcher(namespace) as (executor, proxy):
        assert [check.name for check in executor.diagnose() if not check.ok] == []
        held = namespace.fault("slow-start", seconds=3600)
        run = prepare(f"{JOBS}:say", on=executor, store=store, replicas=2, args={"lines": ["a"]}).submit()
        assert {row.state for row in run.status().replicas} == {ReplicaState.PENDING}
        release = Fault(
            "GET", ".*/pods", "watch=", action=lambda: namespace.cluster.kubelet("remove_fault", number=held)
        )
        proxy.faults.append(release)
        assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
        assert (list(run.logs(0, follow=True)), list(run.logs(1))) == (["a"], ["a"])
        other = prepare(f"{JOBS}:hold", on=executor, store=store, replicas=1).submit()
        deadline = time.monotonic() + LIMIT_S
        while run.handle in (found := [stray.handle for stray in executor.strays()]):
            assert time.monotonic() < deadline, "Kubernetes never counted the pods that have ended"
            time.sleep(0.1)
        assert found == [other.handle]
        other.cancel()
        assert executor.strays() == []
        refused = {found for call in proxy.calls if call.status == 403 and (found := act(call)) is not None}
        needed = recorded(proxy) - refused
    others = {each for each in refused if not each[2].startswith(_CLUSTER_WIDE)}
    assert others <= acts(LOOKS), "doctor and the checks before a launch ask for more, and go on without it"
    assert needed == acts(ALWAYS)


@pytest.mark.process
@pytest.mark.server
def test_a_file_of_arguments_needs_one_more_permission(namespace: Namespace, store: str) -> None:
    settings = {"command": ["true"], "command_args": {"a": 1}}
    with launcher(namespace, **settings) as (executor, proxy):
        handle = executor.submit(executor.plan(RunContext("own", store), Placement(replicas=1)))
        executor.cancel(handle)
        assert not [call.path for call in proxy.calls if call.status == 403]
        assert ("create", "", "configmaps") in recorded(proxy)


def test_a_queue_of_kueue_needs_exactly_its_lines(queue_namespace: QueueNamespace, store: str) -> None:
    queue = queue_namespace.queue(cpu="600m")
    settings = {"command": ["sleep", "600"], "gang": f"kueue:{queue.name}", "default_cpus": 0.5}
    with launcher(queue_namespace, **settings) as (executor, proxy):
        assert [check.name for check in executor.diagnose() if not check.ok] == []
        plans = [executor.plan(RunContext(name, store), Placement(replicas=1)) for name in ("first", "second")]
        first, second = map(executor.submit, plans)
        row = executor.status(second).replicas[0]
        assert (row.state, row.reason) == (ReplicaState.PENDING, Reason.QUOTA)
        executor.cancel(second)
        executor.cancel(first)
        refused = {found for call in proxy.calls if call.status == 403 and (found := act(call)) is not None}
    assert {each for each in refused if not each[2].startswith(_CLUSTER_WIDE)} <= acts(LOOKS)
    assert {each for each in recorded(proxy) if "kueue" in each[1]} == acts((WORKLOADS, PENDING, LOCAL_QUEUES))


@pytest.mark.process
@pytest.mark.server
def test_waiting_works_without_the_permission_to_watch(namespace: Namespace, store: str) -> None:
    rules = role(namespace.name, KubernetesSettings())["rules"]
    config = namespace.user("asker", [rule for rule in rules if rule["verbs"] != ["watch"]])
    executor = KubernetesExecutor(kubeconfig=str(config), **SETTINGS)
    [permissions] = [check for check in executor.diagnose() if check.name == "permissions"]
    assert permissions.ok
    assert "watch pods" in permissions.message
    run = prepare(f"{JOBS}:say", on=executor, store=store, replicas=2, args={"lines": ["a"]}).submit()
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED


@pytest.mark.process
@pytest.mark.server
def test_doctor_names_what_is_missing_and_a_run_is_refused(namespace: Namespace, store: str) -> None:
    config = namespace.user("reader", [{"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list"]}])
    executor = KubernetesExecutor(kubeconfig=str(config), **SETTINGS)
    [permissions] = [check for check in executor.diagnose() if check.name == "permissions"]
    missing = acts(ALWAYS) - {("get", "batch", "jobs"), ("list", "batch", "jobs")}
    assert not permissions.ok
    assert all(f"{verb} {resource}" in permissions.message for verb, _, resource in missing)
    with pytest.raises(AuthError) as caught:
        prepare(f"{JOBS}:say", on=executor, store=store, replicas=1).submit()
    assert caught.value.reason == "forbidden"
    assert "--permissions" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, ()),
        ({"bootstrap": "pip"}, ("configmaps",)),
        ({"bootstrap": "pip", "pip_index": "https://packages.invalid/simple"}, ()),
        ({"gang": "coscheduling:co"}, ("podgroups",)),
        ({"gang": "kueue:q"}, ("workloads", "localqueues/pendingworkloads", "localqueues")),
    ],
)
def test_settings_decide_what_is_needed(settings: dict[str, Any], more: tuple[str, ...]) -> None:
    found = rights(KubernetesSettings(**settings))
    assert found[: len(ALWAYS)] == ALWAYS
    assert tuple(right.resource for right in found[len(ALWAYS) :]) == more


def test_the_text_is_the_role_and_the_page_has_it() -> None:
    yaml = pytest.importorskip("yaml")
    settings = KubernetesSettings()
    text = role_text("team-a", settings)
    assert yaml.safe_load(text) == role("team-a", settings)
    every = re.sub(r"^#(  - )", r"\1", text, flags=re.M)
    assert len(yaml.safe_load(every)["rules"]) == len((*ALWAYS, *OPTIONAL, *LOOKS))
    assert f"```yaml\n{text}\n```" in (DOCS / "kubernetes.md").read_text()
