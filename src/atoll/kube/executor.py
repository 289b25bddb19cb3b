"""ClusterExecutor: what the executors of Kubernetes share. Each starts one object for a run, which makes the pods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self, cast

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import RunContext
from atoll.errors import BackendError, ConfigError, InvalidSpec, RunNotFound, StopFailed, SubmitError, Unsupported
from atoll.executors.base import Capabilities, Executor, Plan, ranks_to_stop
from atoll.executors.undo import submit_or_stop
from atoll.handle import RunHandle
from atoll.kube.bootstrap import with_wheel
from atoll.kube.client import KubeClient
from atoll.kube.connection import EXTRA, Connection, given_client
from atoll.kube.jobs import Jobs, Object
from atoll.kube.links import job_links
from atoll.kube.rules import Seconds
from atoll.kube.settings import plan_hint
from atoll.kube.stopping import name_of, stop_failed
from atoll.kube.wheel import wheel_bytes
from atoll.registry import require
from atoll.validation import CLOCK, OBJECT, check_settings, checks_settings, shown

_ApiClient = Annotated[Any, OBJECT._replace(may_be_none=True)]


class ClusterExecutor(ABC):
    """An executor whose runs have one object each, in a namespace of a cluster.

    The handle has the context and the namespace, so that it means the same object when the current context of the
    kubeconfig has changed.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    settings_class: ClassVar[type[Any]]

    @checks_settings
    def __init__(
        self,
        *,
        api_client: _ApiClient = None,
        timeout_s: Seconds = 30.0,
        patience_s: Seconds = 60.0,
        stop_s: Seconds = 180.0,
        clock: Annotated[Clock, CLOCK] = SYSTEM_CLOCK,
        **job: Any,
    ) -> None:
        if given_client(api_client) is None:
            require("kubernetes", extra=EXTRA)
        self.settings: Any = self.settings_class(**job)
        if api_client is not None:
            self._check_given_client()
        self._api_client, self._clock = api_client, clock
        self._timeout_s, self._patience_s, self._stop_s = timeout_s, patience_s, stop_s
        self._clusters: dict[str | None, Jobs] = {}

    def _check_given_client(self) -> None:
        """Refuse settings that name a cluster: a given client has one already."""
        given = [name for name in ("context", "kubeconfig") if getattr(self.settings, name) is not None]
        rule = "has no effect with api_client, which has a cluster already"
        problems = [f"{name}={shown(getattr(self.settings, name))}: {rule}" for name in given]
        if problems:
            raise InvalidSpec(f"executor `{self.name}`", problems)

    @property
    def command(self) -> tuple[str, ...]:
        """The image's own program; empty if replicas run `python -m atoll.replica`."""
        return tuple(self.settings.command)

    def with_settings(self, **changes: Any) -> Self:
        """A copy of this executor with other settings."""
        check_settings(self.name, changes, type(self), self.settings_class)
        other = copy(self)
        other.settings = replace(self.settings, **changes)
        return other

    @abstractmethod
    def start(self, plan: Plan) -> RunHandle:
        """See `Starter`."""

    def submit(self, plan: Plan) -> RunHandle:
        return submit_or_stop(self, plan)

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        ranks_to_stop(cast("Executor", self), handle, ranks)
        try:
            left = self._left_after_stop(handle)
        except BackendError as exc:
            refusals = {handle.native_id: exc.message}
            raise StopFailed(f"run `{handle.native_id}`", refusals, executor=self.name, hint=exc.hint) from exc
        if left:
            raise stop_failed(handle.native_id, namespace_of(handle), left, self.name)

    @abstractmethod
    def _left_after_stop(self, handle: RunHandle) -> list[Object]:
        """Delete the object of the run unless it is over, and wait until its pods are gone. Returns what is left."""

    def links(self, handle: RunHandle, rank: int) -> dict[str, str]:  # noqa: ARG002  all ranks have one page
        context, _, namespace = handle.scope.rpartition("/")
        return job_links(context, namespace, handle.native_id)

    def _planned(
        self, context: RunContext, replicas: int, request: dict[str, Any], problems: Sequence[str], notes: Sequence[str]
    ) -> Plan:
        """The plan of this request; raises `Unsupported` if there are problems."""
        if problems:
            hint = plan_hint(problems, self.name, self.settings_class)
            raise Unsupported(self.name, context.run_id, problems, hint=hint)
        return Plan(self.name, context.run_id, replicas, {**request, "scope": self._scope}, tuple(notes))

    def _create_extras(self, plan: Plan, jobs: Jobs, owner: Object, *, is_new: bool) -> None:
        """Create what the pods need besides, owned by the object of the run."""
        try:
            for thing in plan.request["extras"]:
                jobs.create_owned(with_wheel(thing, wheel_bytes), owner, str(plan.request["namespace"]))
        except (BackendError, ConfigError) as exc:
            name = name_of(owner)
            message = f"run `{plan.run_id}`: {exc.message}"
            created = [name] if is_new else []
            raise SubmitError(message, left_running=[name], created=created, executor=self.name, hint=exc.hint) from exc

    @property
    def _namespace(self) -> str:
        """The namespace of new runs."""
        return str(self.settings.namespace or self._jobs(None).client.connection.place.namespace)

    @property
    def _scope(self) -> str:
        """The scope in the handles of new runs."""
        context = self._jobs(None).client.connection.place.context
        return self._namespace if context is None else f"{context}/{self._namespace}"

    def _context_of(self, handle: RunHandle) -> str | None:
        """The context of a handle; None for that of this executor."""
        context = handle.scope.rpartition("/")[0] or None
        return None if self._api_client is not None or context == self.settings.context else context

    def _jobs(self, context: str | None) -> Jobs:
        """The cluster of a context."""
        if context not in self._clusters:
            connection = Connection(
                kubeconfig=self.settings.kubeconfig,
                context=context or self.settings.context,
                api_client=self._api_client,
            )
            client = KubeClient(
                connection,
                executor=self.name,
                timeout_s=self._timeout_s,
                patience_s=self._patience_s,
                clock=self._clock,
            )
            self._clusters[context] = Jobs(client, self._clock)
        return self._clusters[context]


def namespace_of(handle: RunHandle) -> str:
    return handle.scope.rpartition("/")[2]


def no_log(executor: str, whose: str) -> RunNotFound:
    return RunNotFound(f"Kubernetes has no log {whose}", executor=executor, operation="logs")
