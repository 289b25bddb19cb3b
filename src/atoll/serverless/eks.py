"""EKSExecutor: the replica protocol on Kubernetes, one Indexed Job for each launch."""

# ruff: noqa: ARG002  `keeps_arguments` makes attributes of the arguments

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from atoll.errors import BackendError, InvalidSpec, UnknownName
from atoll.executors.base import Executor
from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.kube.connection import given_client
from atoll.kube.gpus import INSTANCE_TYPE, NVIDIA
from atoll.kube.machines import FIXED, MACHINES
from atoll.kube.quantities import GIB, RULE, is_quantity, parsed
from atoll.runs.prepare import Draft
from atoll.runs.run import Run
from atoll.serverless.facade import Facade, arguments_named, keeps_arguments, renamed
from atoll.serverless.forms import Form
from atoll.serverless.protocol import ReplicaHandle
from atoll.spec import Gpu
from atoll.status import RunStatus
from atoll.validation import shown

_NAMES = {
    "service_account": "service_account_name",
    "runtime_class": "runtime_class_name",
    "ttl_s": "ttl_seconds_after_finished",
    "queue_timeout_s": "queue_timeout",
}
"""Setting of the executor -> argument, where the two names differ."""
_TOLERATION = {name: name for name in ("key", "operator", "value", "effect")}
_TOLERATION["toleration_seconds"] = "tolerationSeconds"
"""Attribute of a `V1Toleration` of any client -> field of the manifest."""
_ROUND_S = 0.5
"""How old a status may be that `poll` uses again, for a rank that was not asked for since."""


class _Reading(NamedTuple):
    """The status of a run that was read for one handle, and that answers for the others of the same round."""

    of: tuple[str, str]
    status: RunStatus
    polled: set[int]
    begun_at: float
    read_at: float


class EKSExecutor(Facade):
    """Replicas are the pods of one Indexed Job. If one fails, all of them end, and `cancel` stops all of them.

    `gpu` of a launch is a name such as `A100` or `H100:8`. A default of `cpu_request` or `memory_request` that the
    machine cannot hold is lowered, with a warning; a value that the caller gives is kept.
    """

    backend_name = "eks"
    mounts_arguments = True
    argument_names: ClassVar[Mapping[str, str]] = {
        **_NAMES,
        "cpus": "cpu_request",
        "memory_gib": "memory_request",
        "max_restarts": "backoff_limit",
        "command_args": "entrypoint_args",
    }
    _jobs: Any
    """The executor: that of Kubernetes, or one with the same methods."""
    _fixed: Mapping[str, str] = {}
    """GPU -> the one machine for it; the executor chooses among all machines for the others."""
    _gpu_settings: Mapping[str, Any] = {}
    """Settings of the executor that only a launch with GPUs has."""
    _reading: _Reading | None = None
    """The newest one: N polls of a round are two requests, and not N times two."""

    image: str
    namespace: str
    service_account_name: str | None
    node_selector: Mapping[str, str] | None
    tolerations: Sequence[Any] | None
    runtime_class_name: str | None
    cpu_request: str
    memory_request: str
    ttl_seconds_after_finished: int | None
    backoff_limit: int
    gpu_resource_key: str
    batch_api: Any
    core_api: Any
    queue_timeout: float | None
    context: str | None
    kubeconfig: str | os.PathLike[str] | None

    @keeps_arguments
    def __init__(
        self,
        image: str,
        *,
        namespace: str = "default",
        service_account_name: str | None = None,
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Any] | None = None,
        runtime_class_name: str | None = None,
        command: Sequence[str] | None = None,
        cpu_request: str = "4",
        memory_request: str = "16Gi",
        ttl_seconds_after_finished: int | None = 3600,
        backoff_limit: int = 0,
        gpu_resource_key: str = NVIDIA,
        run_id: str | None = None,
        batch_api: Any = None,
        core_api: Any = None,
        store: str | os.PathLike[str] | None = None,
        idempotency_key: str | None = None,
        queue_timeout: float | None = None,
        context: str | None = None,
        kubeconfig: str | os.PathLike[str] | None = None,
    ) -> None:
        self._build(KubernetesExecutor, fail_fast=True)

    def _build(self, adapter: type[Any], **more: Any) -> None:
        """Make the executor from the arguments of the constructor, which are attributes, and `more` settings."""
        sizes = {"cpu_request": self.cpu_request, "memory_request": self.memory_request}
        problems = [f"{name}={shown(size)}: {RULE}" for name, size in sizes.items() if not is_quantity(size)]
        apis = {"batch_api": self.batch_api, "core_api": self.core_api}
        problems += _client_problems(apis, self.context, self.kubeconfig)
        if problems:
            raise InvalidSpec(type(self).__name__, problems)
        wanted: dict[str, Any] = {"cpus": parsed(self.cpu_request), "memory_gib": parsed(self.memory_request) / GIB}
        given = {name for name in wanted if self.argument_names[name] in self.given_arguments}
        kubeconfig = self.kubeconfig
        with arguments_named(type(self).__name__, self.argument_names, adapter.name):
            self._jobs = adapter(
                api_client=self.core_api if self.batch_api is None else self.batch_api,
                image=self.image,
                namespace=self.namespace,
                service_account=self.service_account_name,
                node_selector={} if self.node_selector is None else self.node_selector,
                tolerations=() if self.tolerations is None else _manifests(self.tolerations),
                runtime_class=self.runtime_class_name,
                command=() if self.command is None else self.command,
                ttl_s=self.ttl_seconds_after_finished,
                queue_timeout_s=self.queue_timeout,
                context=self.context,
                kubeconfig=os.fspath(kubeconfig) if isinstance(kubeconfig, os.PathLike) else kubeconfig,
                **{f"default_{name}": size for name, size in wanted.items() if name not in given},
                **more,
            )
        self._fixed = FIXED
        if "gpu_resource_key" in self.given_arguments:  # otherwise the executor knows the key of each GPU
            self._gpu_settings = {"gpu_resource_key": self.gpu_resource_key}
        self._placement = {name: wanted[name] for name in given} | {"max_restarts": self.backoff_limit}
        self._use(
            self._jobs,
            store=self.store,
            run_id=self.run_id,
            idempotency_key=self.idempotency_key,
            command=self.command,
        )

    @classmethod
    def over(
        cls,
        jobs: KubernetesExecutor,
        *,
        backoff_limit: int = 0,
        store: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> EKSExecutor:
        """The protocol for an executor with any settings: volumes, gang, spot, a cluster that is not on AWS, …"""
        made, settings = cls.__new__(cls), vars(jobs.settings)
        vars(made).update({_NAMES.get(name, name): value for name, value in settings.items()})
        made._jobs, made._placement = jobs, {"max_restarts": backoff_limit}
        command = jobs.settings.command
        made._use(jobs, store=store, run_id=run_id, idempotency_key=idempotency_key, command=command)
        return made

    def poll(self, handle: ReplicaHandle) -> str:
        """As in the protocol. The polls of all handles of a run, one after the other, read its status once."""
        replica, reading, now = self._replica(handle), self._reading, self._clock.monotonic()
        of = str(replica.run), replica.store
        is_old = reading is None or reading.of != of or now - reading.read_at > _ROUND_S
        if reading is None or is_old or replica.rank in reading.polled:
            status = self._run_status(replica)
            reading = _Reading(of, status, set(), now, self._clock.monotonic())
            newest = self._reading
            if newest is None or newest.of != of or newest.begun_at <= now:
                self._reading = reading  # unless another thread has read the status later
        reading.polled.add(replica.rank)
        return str(reading.status.replicas[replica.rank].state)

    def cancel(self, handle: ReplicaHandle) -> None:
        try:
            super().cancel(handle)
        finally:
            self._reading = None

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        try:
            return super().collect(handles, timeout=timeout)
        finally:
            self._reading = None

    def _for_launch(self, gpu: str | None, form: Form) -> tuple[Executor, dict[str, Any]]:
        changes: dict[str, Any] = {"command_args": form.args} if form.program else {}
        if gpu is not None:
            changes |= self._gpu_settings
        if (machine := self._machine(gpu)) is not None:
            changes["instance_type"] = machine
        return self._jobs.with_settings(**changes), {"gpu": gpu, **self._placement}

    def _machine(self, gpu: object) -> str | None:
        """The machine of a GPU; None if there is no fixed one, if it has too few GPUs, or if the caller names one."""
        try:
            asked = Gpu.parse(gpu) if isinstance(gpu, str) else None
        except (ValueError, UnknownName):  # the placement says what is wrong
            return None
        name = None if asked is None else self._fixed.get(asked.name)
        if asked is None or name is None or INSTANCE_TYPE in self._jobs.settings.node_selector:
            return None
        return name if MACHINES[name].gpus >= asked.count else None

    def _warnings(self, draft: Draft) -> list[str]:
        mark = "warning: "
        found = [note.removeprefix(mark) for note in draft.plan.notes if note.startswith(mark)]
        return [renamed(text, self.argument_names) for text in found]

    def _native(self, run: Run, ranks: Sequence[int]) -> list[dict[str, Any]]:
        context, _, namespace = run.handle.scope.rpartition("/")
        uid = None
        with suppress(BackendError):  # the replicas run already, and handles work without it
            uid = self._jobs.uid(run.handle)
        names = {"job_name": run.handle.native_id, "namespace": namespace, "context": context or None, "uid": uid}
        return [dict(names) for _ in ranks]


def _client_problems(apis: Mapping[str, Any], context: object, kubeconfig: object) -> Iterator[str]:
    """What is wrong with given clients: all requests are sent through the one `ApiClient` that they have."""
    hosts = {}
    for name, api in apis.items():
        try:
            if (client := given_client(api)) is not None:
                hosts[name] = client.configuration.host
        except InvalidSpec as exc:
            yield from (renamed(problem, {"api_client": name}) for problem in exc.problems)
    if len(set(hosts.values())) > 1:
        yield f"core_api: it asks `{hosts['core_api']}`, but batch_api asks `{hosts['batch_api']}`; use one cluster"
    for name, value in (("context", context), ("kubeconfig", kubeconfig)):
        if hosts and value is not None:
            yield f"{name}={shown(value)}: has no effect with {' and '.join(hosts)}, which have a cluster already"


def _manifests(tolerations: Any) -> Any:
    """Tolerations as in a manifest: given as `V1Toleration`, or as dicts in the style of either."""
    return [_manifest(each) for each in tolerations] if isinstance(tolerations, list | tuple) else tolerations


def _manifest(toleration: Any) -> Any:
    if isinstance(toleration, Mapping):
        found = {_TOLERATION.get(name, name): value for name, value in toleration.items()}
    elif any(hasattr(toleration, name) for name in _TOLERATION):
        found = {field: getattr(toleration, name, None) for name, field in _TOLERATION.items()}
    else:
        return toleration  # the rule of the setting refuses it
    return {field: value for field, value in found.items() if value is not None}
