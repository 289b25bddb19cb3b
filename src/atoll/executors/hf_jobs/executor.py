"""HubJobsExecutor: each replica is a job of Hugging Face with one machine; replicas share only the store.

A run is N jobs with one label. The service chooses their ids and keeps no names distinct, so a job is found by its
labels: the run, the rank and the launch token. The same token is this run's own job and is adopted, another token is a
conflict.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from atoll._threads import Unanswered, answer_within
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import TIMEOUT, RunContext
from atoll.errors import (
    AtollError,
    BackendError,
    BackendUnavailable,
    InvalidSpec,
    RunNotFound,
    StopFailed,
    Unsupported,
)
from atoll.executors.base import Capabilities, Check, Plan, Stray, ranks_to_stop
from atoll.executors.hf_jobs.client import HubClient
from atoll.executors.hf_jobs.doctor import setup_checks
from atoll.executors.hf_jobs.errors import EXECUTOR
from atoll.executors.hf_jobs.jobs import Jobs
from atoll.executors.hf_jobs.logs import JobLog
from atoll.executors.hf_jobs.machines import CPU_FLAVOR, Machine, chosen_machine, machine_of, price_notes
from atoll.executors.hf_jobs.outcomes import stored_failures
from atoll.executors.hf_jobs.request import CAPABILITIES, RUN, job_request
from atoll.executors.hf_jobs.settings import Client, Endpoint, JobSettings, Lag, Seconds, Word, plan_hint
from atoll.executors.hf_jobs.status import Job, chosen, replica_status
from atoll.executors.hf_jobs.submit import Submission, secret_values
from atoll.executors.undo import submit_or_stop
from atoll.handle import RunHandle
from atoll.result import ReplicaOutcome
from atoll.spec import Gpu, Placement
from atoll.status import Reason, ReplicaStatus, RunStatus
from atoll.validation import CLOCK, check_settings, checks_settings

_STORE_S = 10.0
"""How long a status waits for the store."""
log = logging.getLogger("atoll.executors")


class HubJobsExecutor:
    """Runs replicas as Hugging Face Jobs. `job` takes the fields of `JobSettings`."""

    name: ClassVar[str] = EXECUTOR
    capabilities: ClassVar[Capabilities] = CAPABILITIES
    settings_class: ClassVar[type] = JobSettings

    @checks_settings
    def __init__(
        self,
        *,
        client: Client = None,
        endpoint: Endpoint | None = None,
        token: Word | None = None,
        timeout_s: Seconds = 30.0,
        patience_s: Seconds = 60.0,
        stop_s: Seconds = 180.0,
        pause_s: Seconds = 2.0,
        list_lag_s: Lag = 10.0,
        log_quiet_s: Seconds = 1.0,
        clock: Annotated[Clock, CLOCK] = SYSTEM_CLOCK,
        **job: Any,
    ) -> None:
        self.settings, self._given, self._token = JobSettings(**job), client, token
        self._client = HubClient(
            client=client, endpoint=endpoint, token=token, timeout_s=timeout_s, patience_s=patience_s, clock=clock
        )
        self._jobs = Jobs(self._client, pause_s=pause_s, stop_s=stop_s, list_lag_s=list_lag_s)
        self._pause_s, self._log_quiet_s = pause_s, log_quiet_s
        self._hardware: list[Machine] = []
        self._causes: dict[str, ReplicaOutcome] = {}
        """Job id -> how its replica failed, as the store has it."""

    def with_settings(self, **changes: Any) -> HubJobsExecutor:
        """A copy of this executor with other job settings."""
        check_settings(self.name, {"client": self._given, **changes}, type(self), self.settings_class)
        other = copy(self)
        other.settings = replace(self.settings, **changes)
        return other

    # Planning and starting.

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        """Pure, except that a GPU without a flavor is looked up in the hardware list of the service."""
        machine: Machine | str = Machine(self.settings.flavor or CPU_FLAVOR, None, 0, 0, None)
        if placement.gpu is not None and self.settings.flavor is None:
            machine = chosen_machine(placement.gpu, None, self.hardware("plan"))
        flavor = CPU_FLAVOR if isinstance(machine, str) else machine.flavor
        request, problems, notes = job_request(context, placement, self.settings, flavor)
        if isinstance(machine, str):
            problems.append(machine)
        if problems:
            raise Unsupported(self.name, context.run_id, problems, hint=plan_hint(problems))
        return Plan(self.name, context.run_id, placement.replicas, request, tuple(notes))

    def preflight(self, plan: Plan) -> None:
        """The flavor exists and has the GPU of the run, and this process has the secrets.

        Without the hardware list the flavor is not checked: the service refuses a wrong one.
        """
        problems: list[str] = []
        try:
            secret_values(plan.request["secrets"], self._token)
        except InvalidSpec as exc:
            problems += exc.problems
        try:
            machine = self._machine(plan)
        except BackendUnavailable as exc:
            log.warning("run %s: the flavor is not checked: %s", plan.run_id, exc.message)
        else:
            problems += [machine] if isinstance(machine, str) else []
        if problems:
            raise InvalidSpec(f"run `{plan.run_id}`", problems, hint=plan_hint(problems))

    def prices(self, plan: Plan) -> list[str]:
        """What the run costs, from the hardware list."""
        machine = self._machine(plan)
        if isinstance(machine, str):
            return []
        limit_s = float(plan.request["jobs"][0]["env"][TIMEOUT])
        return list(price_notes(machine, _gpu(plan), replicas=plan.replicas, limit_s=limit_s))

    def hourly_usd(self, plan: Plan, placement: Placement) -> float | None:  # noqa: ARG002  the flavor says it
        """The price of the flavor, from the hardware list."""
        machine = self._machine(plan)
        return None if isinstance(machine, str) else machine.hourly_usd

    def _machine(self, plan: Plan) -> Machine | str:
        flavor = str(plan.request["jobs"][0]["flavor"])
        return chosen_machine(_gpu(plan), flavor, self.hardware("plan", tries=2))

    def hardware(self, operation: str, *, tries: int | None = None) -> list[Machine]:
        """The flavors of the service, read once."""
        if not self._hardware:
            found = self._client.call("list_jobs_hardware", operation, "the hardware list", tries=tries)
            self._hardware = [machine_of(each) for each in found]
        return self._hardware

    def whoami(self) -> dict[str, Any]:
        """The identity of the token."""
        found = self._client.call("whoami", "doctor", "the identity of the token")
        if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
            message = "the identity of the token: the answer of `whoami` has no `name`"
            raise BackendError(message, executor=self.name, operation="doctor", reason="no_answer")
        return dict(found)

    def handle(self, plan: Plan) -> RunHandle:
        namespace, label, first = plan.request["namespace"], plan.request["label"], plan.request.get("first_rank", 0)
        return RunHandle(self.name, namespace, label, plan.replicas, first)

    def submit(self, plan: Plan) -> RunHandle:
        return submit_or_stop(self, plan)

    def start(self, plan: Plan) -> RunHandle:
        Submission(self._jobs, plan, secret_values(plan.request["secrets"], self._token)).run()
        return self.handle(plan)

    # After the start.

    def status(self, handle: RunHandle) -> RunStatus:
        found = self._jobs.find_all(handle.scope, handle.native_id, handle.replicas)
        replicas = [replica_status(rank, job) for rank, job in enumerate(found)]
        return RunStatus(tuple(self._with_causes(handle, found, replicas)))

    def _with_causes(
        self, handle: RunHandle, jobs: Sequence[Job | None], replicas: Sequence[ReplicaStatus]
    ) -> list[ReplicaStatus]:
        """The status of jobs whose message does not say how they failed, completed from the store."""
        silent = {
            rank: job
            for rank, job in enumerate(jobs)
            if job is not None and replicas[rank].reason is Reason.USER_ERROR and replicas[rank].exit_code is None
        }
        unread = [rank for rank, job in silent.items() if job.id not in self._causes]
        if unread:
            try:
                found = answer_within(_STORE_S, lambda: self._stored_failures(handle, silent[unread[0]], unread))
            except (AtollError, Unanswered) as exc:
                log.info("run `%s`: the store does not tell how jobs failed: %s", handle.native_id, exc)
            else:
                self._causes |= {silent[rank].id: outcome for rank, outcome in found.items()}
        causes = {rank: self._causes.get(job.id) for rank, job in silent.items()}
        return [
            replica
            if (cause := causes.get(replica.rank)) is None
            else replace(replica, reason=cause.reason, exit_code=cause.exit_code)
            for replica in replicas
        ]

    def _stored_failures(self, handle: RunHandle, job: Job, ranks: Sequence[int]) -> dict[int, ReplicaOutcome]:
        known = _context_of(self._jobs.whole(handle.scope, job))
        return {} if known is None else stored_failures(known[0], ranks)

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        wanted = ranks_to_stop(self, handle, ranks)
        what = f"run `{handle.native_id}`"
        try:
            problems = self._jobs.stop_all(handle.scope, handle.native_id, wanted)
        except BackendError as exc:
            known = self._jobs.known(handle.scope, handle.native_id)
            left = [job_id for job_id, rank in known.items() if rank in wanted] or [str(handle)]
            raise StopFailed(what, dict.fromkeys(left, exc.message), executor=self.name, hint=exc.hint) from exc
        if problems:
            reasons = {job_id: error.message for job_id, error in problems.items()}
            raise StopFailed(what, reasons, executor=self.name) from next(iter(problems.values()))

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        job = self._job(handle, rank)
        if job is None:
            what = f"Hugging Face has no job of rank {rank} of run `{handle.native_id}`"
            raise RunNotFound(what, executor=self.name, operation="logs")
        job_log = JobLog(self._client, handle.scope, job.id, quiet_s=self._log_quiet_s, pause_s=self._pause_s)
        if follow:

            def is_over() -> bool:
                found = self._jobs.inspect(handle.scope, job.id, "logs")
                return found is None or found.is_over

            yield from job_log.follow(tail, is_over)
        elif job.stage != "SCHEDULING":
            yield from job_log.snapshot(tail, is_over=job.is_over)

    def _job(self, handle: RunHandle, rank: int) -> Job | None:
        if not 0 <= rank < handle.replicas:
            return None
        return self._jobs.find_all(handle.scope, handle.native_id, handle.replicas)[rank]

    def origin(self, handle: RunHandle) -> RunContext | None:
        found = chosen(self._jobs.all_of(handle.scope, handle.native_id).values())
        known = None if found is None else _context_of(self._jobs.whole(handle.scope, found))
        return None if known is None else known[0]

    def strays(self) -> list[Stray]:
        """Jobs of Atoll in this namespace that wait or run."""
        namespace = self.settings.namespace or str(self.whoami()["name"])
        found = []
        for job in self._jobs.of_atoll(namespace):
            if (known := _context_of(self._jobs.whole(namespace, job))) is not None:
                context, replicas = known
                label, first = str((job.labels or {}).get(RUN)), context.first_rank
                handle = RunHandle(self.name, namespace, label, replicas, first)
                found.append(Stray(handle, job.id, f"rank {first + job.rank} of run `{context.run_id}`", context))
        return found

    def job_ids(self, handle: RunHandle) -> list[str | None]:
        """The id of each rank's job, None where the service has none."""
        found = self._jobs.find_all(handle.scope, handle.native_id, handle.replicas)
        return [None if job is None else job.id for job in found]

    def links(self, handle: RunHandle, rank: int) -> dict[str, str]:
        """The page of the job, if this process has seen its id."""
        known = self._jobs.known(handle.scope, handle.native_id)
        job_id = next((job_id for job_id, of in known.items() if of == rank), None)
        return {} if job_id is None else {"job": f"{self._client.pages}/jobs/{handle.scope}/{job_id}"}

    def diagnose(self) -> list[Check]:
        return setup_checks(self)

    def count_jobs(self, namespace: str) -> int:
        """How many jobs of Atoll wait or run in a namespace."""
        return len(self._jobs.of_atoll(namespace))

    def details(self, handle: RunHandle, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """For each of these ranks: `job_id`, `running_seconds`, and `cost_usd` by the price of its flavor. None where
        the service does not tell. One list for all ranks."""
        jobs = self._jobs.find_all(handle.scope, handle.native_id, handle.replicas)
        try:
            prices = {each.flavor: each.hourly_usd for each in self.hardware("status", tries=1)}
        except BackendError:
            prices = {}
        return [_details(jobs[rank], prices) for rank in ranks]


def _details(job: Job | None, prices: Mapping[str, float | None]) -> dict[str, Any]:
    if job is None:
        return {"job_id": None, "running_seconds": None, "cost_usd": None}
    price = prices.get(job.flavor)
    cost = None if price is None or job.running_s is None else round(price * job.running_s / 3600, 6)
    return {"job_id": job.id, "running_seconds": job.running_s, "cost_usd": cost}


def _gpu(plan: Plan) -> Gpu | None:
    told = str(plan.request["gpu"] or "")
    return Gpu.parse(told) if told else None


def _context_of(job: Job) -> tuple[RunContext, int] | None:
    """The run of a job and its number of replicas; None if the job is not a replica of Atoll."""
    return RunContext.from_variables(job.environment or {})
