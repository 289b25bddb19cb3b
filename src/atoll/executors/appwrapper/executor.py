"""AppWrapperExecutor: the replicas of a run are the pods of one Indexed Job inside an AppWrapper; they share only the
store.

The name of the AppWrapper is the idempotency key, and the name of its Job; see `KubernetesExecutor`. The controller
deletes an object of somebody else that has the name of something inside, so that a launch looks for such objects first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

import atoll
from atoll._time import Deadline
from atoll.context import RunContext
from atoll.executors.appwrapper.checks import check_cluster, setup_checks
from atoll.executors.appwrapper.reading import attempt_of, kept_number, kept_tail, wrapper_status
from atoll.executors.appwrapper.request import CAPABILITIES, in_dialect, wrapper_request
from atoll.executors.appwrapper.restart import restarted
from atoll.executors.appwrapper.role import role, role_text
from atoll.executors.appwrapper.settings import EXECUTOR, AppWrapperSettings
from atoll.executors.appwrapper.watching import WrapperWatch
from atoll.executors.appwrapper.wrappers import Wrappers, fixed_dialect
from atoll.executors.base import Capabilities, Check, Permissions, Plan, Stray
from atoll.handle import RunHandle
from atoll.kube.appwrapper import Phase, WrapperView, components_of
from atoll.kube.bootstrap import with_wheel
from atoll.kube.executor import ClusterExecutor, namespace_of, no_log
from atoll.kube.jobs import Object
from atoll.kube.logs import Seen, follow_lines, last_lines
from atoll.kube.names import context_of, first_rank_of
from atoll.kube.pod_state import age_key, rank_of
from atoll.kube.reading import queue_left_s, queue_limit_s
from atoll.kube.request import needs_wheel
from atoll.kube.stopping import is_alive, name_of
from atoll.kube.wheel import wheel_bytes, wheel_or_why
from atoll.spec import Placement
from atoll.status import RunStatus
from atoll.validation import OBJECT

_ApiClient = Annotated[Any, OBJECT._replace(may_be_none=True)]
_OVER = (Phase.SUCCEEDED, Phase.FAILED, Phase.ENDED)


class AppWrapperExecutor(ClusterExecutor):
    """Runs replicas as one Indexed Job in an AppWrapper. `job` takes the fields of `AppWrapperSettings`."""

    name: ClassVar[str] = EXECUTOR
    capabilities: ClassVar[Capabilities] = CAPABILITIES
    settings_class: ClassVar[type] = AppWrapperSettings
    settings: AppWrapperSettings

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        wheel = wheel_or_why() if needs_wheel(self.settings.job_settings()) else ""
        request, problems, notes = wrapper_request(
            context, placement, self.settings, namespace=self._namespace, version=atoll.__version__, wheel=wheel
        )
        return self._planned(context, placement.replicas, request, problems, notes)

    def preflight(self, plan: Plan) -> None:
        extras = [with_wheel(thing, wheel_bytes) for thing in plan.request["extras"]]
        check_cluster(self._of(self.handle(plan)), {**plan.request, "extras": extras}, plan.run_id, self.settings)

    def handle(self, plan: Plan) -> RunHandle:
        wrapper = plan.request["appwrapper"]
        return RunHandle(self.name, plan.request["scope"], name_of(wrapper), plan.replicas, first_rank_of(wrapper))

    def start(self, plan: Plan) -> RunHandle:
        handle = self.handle(plan)
        wrappers, namespace = self._of(handle), str(plan.request["namespace"])
        sent = in_dialect(plan.request["appwrapper"], wrappers.dialect("submit"))
        wrapper, is_new = wrappers.create(sent, namespace, plan.run_id)
        self._create_extras(plan, wrappers.jobs, wrapper, is_new=is_new)
        if is_new and self.settings.queue is not None:
            wrappers.jobs.queues.check_fits(wrapper, plan.run_id)
        return handle

    def status(self, handle: RunHandle) -> RunStatus:
        wrappers = self._of(handle)
        return wrappers.status_of(wrappers.look(namespace_of(handle), handle.native_id), handle.replicas)

    def watch(self, handle: RunHandle) -> WrapperWatch:
        return WrapperWatch(self._of(handle), namespace_of(handle), handle.native_id, handle.replicas, self._clock)

    def restart(self, handle: RunHandle, *, is_cancelled: Callable[[], bool] | None = None) -> bool:
        """Start all replicas again after a failure, where MCAD cannot: by delete and re-create. See `Restarter`."""
        limit = Deadline(self._stop_s, self._clock)
        return restarted(self._of(handle), namespace_of(handle), handle, limit, is_cancelled)

    def is_cancelled(self, handle: RunHandle) -> bool:
        """Whether the AppWrapper is being deleted, or its pods are after it. An eviction or a reset is no cancel."""
        wrappers = self._of(handle)
        wrapper = wrappers.find(namespace_of(handle), handle.native_id)
        found = wrappers.jobs.orphans(namespace_of(handle), handle.native_id) if wrapper is None else [wrapper]
        return any(each["metadata"].get("deletionTimestamp") for each in found)

    def _left_after_stop(self, handle: RunHandle) -> list[Object]:
        wrappers, namespace, name = self._of(handle), namespace_of(handle), handle.native_id
        seen = wrappers.look(namespace, name, "cancel")
        if seen.wrapper is not None:
            is_deleted = bool(seen.wrapper["metadata"].get("deletionTimestamp"))
            is_over = wrapper_status(seen, replicas=handle.replicas).is_terminal
            is_over = is_over and not WrapperView.of(seen.wrapper).starts_again
            if is_over and not is_deleted and not any(map(is_alive, seen.pods)):
                return []
            wrappers.delete(seen.wrapper)
        elif seen.job is not None:  # somebody has deleted the AppWrapper without its Job, or it is about to go
            wrappers.jobs.delete(seen.job)
        elif not any(map(is_alive, seen.pods)):
            return []
        limit = Deadline(self._stop_s, self._clock)
        return wrappers.wait_until_gone(seen.wrapper, namespace, name, limit)

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        wrappers, namespace = self._of(handle), namespace_of(handle)
        wrapper, first, attempt = self._seen(handle, rank)
        if wrapper is None:
            raise no_log(self.name, f"of rank {rank} of AppWrapper `{handle.native_id}`")
        if follow and not (first.is_over and not first.pods):
            known = [first]
            look = lambda: known.pop() if known else self._seen(handle, rank)[1]  # noqa: E731
            return follow_lines(wrappers.jobs.client, namespace, look, tail=tail, clock=self._clock)
        if first.pods:
            return last_lines(wrappers.jobs.client, namespace, name_of(first.pods[-1]), tail)
        if not attempt and not first.is_over:
            return iter(())  # its first pod is not there yet
        return self._kept_lines(wrapper, handle, rank, attempt_of(wrapper), tail)

    def attempt_logs(self, handle: RunHandle, rank: int, attempt: int, *, tail: int | None = None) -> Iterator[str]:
        wrapper, seen, current = self._seen(handle, rank)
        if wrapper is None:
            raise no_log(self.name, f"of rank {rank} of AppWrapper `{handle.native_id}`")
        if attempt == current and seen.pods:
            return last_lines(self._of(handle).jobs.client, namespace_of(handle), name_of(seen.pods[-1]), tail)
        return self._kept_lines(wrapper, handle, rank, kept_number(wrapper, attempt), tail)

    def _kept_lines(
        self, wrapper: Mapping[str, Any], handle: RunHandle, rank: int, number: int | None, tail: int | None
    ) -> Iterator[str]:
        """The last lines that were kept when the controller deleted the pods."""
        lines = None if number is None else kept_tail(wrapper, number, rank)
        if lines is None:
            raise no_log(
                self.name, f"of this attempt of rank {rank} of AppWrapper `{handle.native_id}`: its pods are gone"
            )
        return iter(lines if tail is None else lines[len(lines) - min(tail, len(lines)) :])

    def _seen(self, handle: RunHandle, rank: int) -> tuple[Mapping[str, Any] | None, Seen, int]:
        """The AppWrapper, the pods of a rank, whether it is over, and its attempt; None if there is no such AppWrapper
        or rank."""
        if not 0 <= rank < handle.replicas:
            return None, Seen((), True), 0
        seen = self._of(handle).look(namespace_of(handle), handle.native_id, "logs")
        of_rank = sorted((pod for pod in seen.pods if rank_of(pod) == rank), key=age_key)
        is_over = wrapper_status(seen, replicas=handle.replicas).replicas[rank].state.is_terminal
        count = 0 if seen.wrapper is None else attempt_of(seen.wrapper, seen.queue)
        return seen.wrapper, Seen(of_rank, is_over), count

    def origin(self, handle: RunHandle) -> RunContext | None:
        wrapper = self._of(handle).find(namespace_of(handle), handle.native_id)
        return None if wrapper is None else context_of(wrapper)

    def uid(self, handle: RunHandle) -> str | None:
        """The UID of the AppWrapper; None if there is no such AppWrapper."""
        wrapper = self._of(handle).find(namespace_of(handle), handle.native_id)
        return None if wrapper is None else str(wrapper["metadata"]["uid"])

    def strays(self) -> list[Stray]:
        """AppWrappers of Atoll in this namespace that are not over."""
        wrappers = self._cluster(None)
        scope = self._scope
        dialect = wrappers.dialect("sweep")
        found = []
        for each in wrappers.of_atoll(self._namespace):
            wrapper = {**each, "apiVersion": dialect.api_version}  # the items of a list do not say it
            context, jobs = context_of(wrapper), [job for job in components_of(wrapper) if job.get("kind") == "Job"]
            view = WrapperView.of(wrapper)
            is_over = view.phase in _OVER and not view.starts_again
            if context is not None and jobs and not is_over:
                replicas = int(jobs[0]["spec"].get("completions") or 1)
                handle = RunHandle(self.name, scope, name_of(wrapper), replicas, context.first_rank)
                message = f"AppWrapper `{name_of(wrapper)}` of run `{context.run_id}`"
                found.append(Stray(handle, name_of(wrapper), message, context))
        return found

    def queue_left_s(self, handle: RunHandle) -> float:
        wrappers = self._of(handle)
        seen = wrappers.look(namespace_of(handle), handle.native_id)
        if seen.wrapper is None:
            return float("inf")
        if seen.queue is not None and seen.queue.is_hopeless:
            return float("-inf")
        limit_s = queue_limit_s(seen.wrapper)
        if limit_s is None:
            return float("inf")
        status = wrapper_status(seen, replicas=handle.replicas)
        return queue_left_s(seen.wrapper, status, seen.job_pods, self._clock.time(), limit_s)

    def diagnose(self) -> list[Check]:
        return setup_checks(self._cluster(None), self.settings)

    def permissions(self) -> Permissions:
        return Permissions(role(self._namespace, self.settings), role_text(self._namespace, self.settings))

    @cached_property
    def _wrappers(self) -> dict[tuple[str | None, str], Wrappers]:
        """Context and dialect -> the AppWrappers there."""
        return {}

    def _of(self, handle: RunHandle) -> Wrappers:
        return self._cluster(self._context_of(handle))

    def _cluster(self, context: str | None) -> Wrappers:
        key = (context, self.settings.dialect)
        if key not in self._wrappers:
            self._wrappers[key] = Wrappers(self._jobs(context), self._clock, fixed_dialect(self.settings.dialect))
        return self._wrappers[key]
