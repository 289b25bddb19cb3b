"""KubernetesExecutor: the replicas of a run are the pods of one Indexed Job; they share only the store.

The name of the Job is the idempotency key. If a create finds the name taken, the token decides: the same token is this
run's own Job and is adopted, another token is a conflict. The handle has the context and the namespace, so that it
means the same Job when the current context of the kubeconfig has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import atoll
from atoll._time import Deadline
from atoll.context import RunContext
from atoll.executors.base import Capabilities, Check, Permissions, Plan, Stray
from atoll.handle import RunHandle
from atoll.kube.bootstrap import with_wheel
from atoll.kube.doctor import setup_checks
from atoll.kube.executor import ClusterExecutor, namespace_of, no_log
from atoll.kube.gang import Gang, job_for
from atoll.kube.job_watch import JobWatch, status_of
from atoll.kube.jobs import Jobs, Object
from atoll.kube.kueue import QueueState
from atoll.kube.logs import Seen, follow_lines, last_lines
from atoll.kube.looks import server_version
from atoll.kube.names import context_of, first_rank_of
from atoll.kube.pod_state import age_key, attempt_of, rank_of
from atoll.kube.preflight import check_server
from atoll.kube.reading import JobView, may_have_pods, queue_left_s, queue_limit_s, run_status
from atoll.kube.request import CAPABILITIES, job_request, needs_wheel
from atoll.kube.role import role, role_text
from atoll.kube.settings import KubernetesSettings
from atoll.kube.stopping import is_alive, is_orphan, name_of
from atoll.kube.wheel import wheel_bytes, wheel_or_why
from atoll.spec import Placement
from atoll.status import RunStatus
from atoll.validation import OBJECT

_ApiClient = Annotated[Any, OBJECT._replace(may_be_none=True)]
EXECUTOR = "kubernetes"


class KubernetesExecutor(ClusterExecutor):
    """Runs replicas as one Indexed Job. `job` takes the fields of `KubernetesSettings`."""

    name: ClassVar[str] = EXECUTOR
    capabilities: ClassVar[Capabilities] = CAPABILITIES
    settings_class: ClassVar[type] = KubernetesSettings
    settings: KubernetesSettings

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        wheel = wheel_or_why() if needs_wheel(self.settings) else ""
        request, problems, notes = job_request(
            context, placement, self.settings, namespace=self._namespace, version=atoll.__version__, wheel=wheel
        )
        return self._planned(context, placement.replicas, request, problems, notes)

    def preflight(self, plan: Plan) -> None:
        sent = {**plan.request, "extras": [with_wheel(thing, wheel_bytes) for thing in plan.request["extras"]]}
        check_server(self._of(self.handle(plan)), sent, plan.run_id, Gang.parse(self.settings.gang))

    def handle(self, plan: Plan) -> RunHandle:
        job = plan.request["job"]
        return RunHandle(self.name, plan.request["scope"], name_of(job), plan.replicas, first_rank_of(job))

    def start(self, plan: Plan) -> RunHandle:
        handle = self.handle(plan)
        jobs, namespace = self._of(handle), str(plan.request["namespace"])
        version = server_version(jobs) if plan.request.get("by_version") else (0, 0)
        job, is_new = jobs.create(job_for(plan.request, version), namespace, plan.run_id)
        self._create_extras(plan, jobs, job, is_new=is_new)
        if is_new:
            jobs.queues.check_fits(job, plan.run_id)
        return handle

    def status(self, handle: RunHandle) -> RunStatus:
        jobs = self._of(handle)
        job = jobs.of_run(namespace_of(handle), handle.native_id)
        if job is None:
            pods = jobs.orphans(namespace_of(handle), handle.native_id)
        else:
            pods = jobs.pods(job) if may_have_pods(job) else []
        return status_of(jobs, job, pods, handle.replicas)

    def watch(self, handle: RunHandle) -> JobWatch:
        return JobWatch(self._of(handle), namespace_of(handle), handle.native_id, handle.replicas, self._clock)

    def is_cancelled(self, handle: RunHandle) -> bool:
        """Whether the Job is being deleted, or its pods are. An eviction or a suspended Job is no cancel."""
        jobs = self._of(handle)
        job = jobs.find(namespace_of(handle), handle.native_id)
        found = jobs.orphans(namespace_of(handle), handle.native_id) if job is None else [job]
        return any(each["metadata"].get("deletionTimestamp") for each in found)

    def _left_after_stop(self, handle: RunHandle) -> list[Object]:
        jobs = self._of(handle)
        job = jobs.of_run(namespace_of(handle), handle.native_id, "cancel")
        if job is None:
            return self._left_orphans(jobs, handle)
        pods = jobs.pods(job, "cancel")
        is_deleted = bool(job["metadata"].get("deletionTimestamp"))
        is_over = run_status(job, pods, replicas=handle.replicas).is_terminal
        if is_over and not is_deleted and not any(map(is_alive, pods)):
            return []
        jobs.delete(job)
        return jobs.wait_until_gone(job, Deadline(self._stop_s, self._clock))

    def _left_orphans(self, jobs: Jobs, handle: RunHandle) -> list[Object]:
        """The Job is gone: wait for pods that are ending or will be ended, and return those that run on."""
        deadline, pauses = Deadline(self._stop_s, self._clock), jobs.client.pauses()
        while left := [*filter(is_alive, jobs.orphans(namespace_of(handle), handle.native_id, "cancel"))]:
            if deadline.is_past or any(map(is_orphan, left)):
                break
            deadline.sleep(next(pauses))
        return left

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        jobs, namespace = self._of(handle), namespace_of(handle)
        job, first = self._seen(handle, rank)
        if job is None:
            raise no_log(self.name, f"of rank {rank} of Job `{handle.native_id}`")
        if follow:
            known = [first]
            look = lambda: known.pop() if known else self._seen(handle, rank)[1]  # noqa: E731
            return follow_lines(jobs.client, namespace, look, tail=tail, clock=self._clock)
        if first.pods:
            return last_lines(jobs.client, namespace, name_of(first.pods[-1]), tail)
        if first.is_over or jobs.queues.evictions(job):
            raise no_log(self.name, f"of rank {rank} of Job `{handle.native_id}`, which has no pod")
        return iter(())  # its first pod is not there yet

    def attempt_logs(self, handle: RunHandle, rank: int, attempt: int, *, tail: int | None = None) -> Iterator[str]:
        jobs = self._of(handle)
        job, seen = self._seen(handle, rank)
        before = 0 if job is None else jobs.queues.evictions(job)  # the pods before an eviction are gone
        pods = [pod for pod in seen.pods if attempt_of(pod) + before == attempt]
        if not pods:
            raise no_log(self.name, f"of attempt {attempt} of rank {rank} of Job `{handle.native_id}`")
        return last_lines(jobs.client, namespace_of(handle), name_of(pods[-1]), tail)

    def _seen(self, handle: RunHandle, rank: int) -> tuple[Object | None, Seen]:
        """The Job, the pods of a rank, and whether it is over; None if there is no such Job or rank."""
        jobs = self._of(handle)
        job = jobs.of_run(namespace_of(handle), handle.native_id, "logs") if 0 <= rank < handle.replicas else None
        if job is None:
            return None, Seen((), True)
        pods = jobs.pods(job, "logs", rank=rank)
        status = run_status(job, pods, replicas=handle.replicas, queue=_queue(jobs, job))
        of_rank = sorted((pod for pod in pods if rank_of(pod) == rank), key=age_key)
        return job, Seen(of_rank, status.replicas[rank].state.is_terminal)

    def origin(self, handle: RunHandle) -> RunContext | None:
        job = self._of(handle).of_run(namespace_of(handle), handle.native_id)
        return None if job is None else context_of(job)

    def uid(self, handle: RunHandle) -> str | None:
        """The UID of the Job, which Kubernetes gives to no other object; None if there is no such Job."""
        job = self._of(handle).of_run(namespace_of(handle), handle.native_id)
        return None if job is None else str(job["metadata"]["uid"])

    def strays(self) -> list[Stray]:
        """Jobs of Atoll in this namespace that are not over."""
        jobs, scope = self._jobs(None), self._scope
        found = []
        for job in jobs.of_atoll(self._namespace):
            context, replicas = context_of(job), int(job["spec"].get("completions") or 1)
            if context is not None and not JobView.of(job, replicas).is_over:
                handle = RunHandle(self.name, scope, name_of(job), replicas, context.first_rank)
                message = f"Job `{name_of(job)}` of run `{context.run_id}`"
                found.append(Stray(handle, name_of(job), message, context))
        return found

    def queue_left_s(self, handle: RunHandle) -> float:
        jobs = self._of(handle)
        job = jobs.of_run(namespace_of(handle), handle.native_id)
        limit_s = None if job is None else queue_limit_s(job)
        if job is None:
            return float("inf")
        queue = _queue(jobs, job)
        if queue is not None and queue.is_hopeless:
            return float("-inf")
        if limit_s is None:
            return float("inf")
        pods = jobs.pods(job)
        status = run_status(job, pods, replicas=handle.replicas, queue=queue)
        return queue_left_s(job, status, pods, self._clock.time(), limit_s)

    def diagnose(self) -> list[Check]:
        return setup_checks(self._jobs(None), self.settings)

    def permissions(self) -> Permissions:
        return Permissions(role(self._namespace, self.settings), role_text(self._namespace, self.settings))

    def _of(self, handle: RunHandle) -> Jobs:
        return self._jobs(self._context_of(handle))


def _queue(jobs: Jobs, job: Object) -> QueueState | None:
    """Why the queue of the Job holds it back; None if none does."""
    return jobs.queues.state(job, with_position=False) if JobView.of(job, 0).is_suspended else None
