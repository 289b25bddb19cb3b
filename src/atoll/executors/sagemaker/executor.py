"""SageMakerTrainingExecutor: each replica is a training job with one machine; replicas share only the store.

A run is N jobs whose names begin with one label. The name is the idempotency key, because SageMaker accepts each name
once. If a create finds the name taken, the launch token decides: the same token is this run's own job and is adopted,
another token is a conflict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import RunContext
from atoll.errors import RunNotFound, StopFailed, Unsupported
from atoll.executors.base import Capabilities, Check, Plan, Stray, ranks_to_stop
from atoll.executors.sagemaker.client import AwsClient
from atoll.executors.sagemaker.doctor import setup_checks
from atoll.executors.sagemaker.errors import EXECUTOR
from atoll.executors.sagemaker.jobs import Jobs
from atoll.executors.sagemaker.links import job_links
from atoll.executors.sagemaker.logs import JobLog, follow_lines, no_log
from atoll.executors.sagemaker.machines import hourly_price
from atoll.executors.sagemaker.replacement import replacement_body
from atoll.executors.sagemaker.request import CAPABILITIES, job_name, parsed_name, training_request
from atoll.executors.sagemaker.settings import Client, JobSettings, Lag, Rate, Region, Seconds, plan_hint
from atoll.executors.sagemaker.status import is_over, replica_status
from atoll.executors.sagemaker.submit import Submission
from atoll.executors.undo import submit_or_stop
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import RunStatus
from atoll.validation import CLOCK, check_settings, checks_settings


class SageMakerTrainingExecutor:
    """Runs replicas as SageMaker training jobs. `job` takes the fields of `JobSettings`."""

    name: ClassVar[str] = EXECUTOR
    capabilities: ClassVar[Capabilities] = CAPABILITIES
    settings_class: ClassVar[type] = JobSettings

    @checks_settings
    def __init__(
        self,
        *,
        region: Region | None = None,
        sagemaker_client: Client = None,
        logs_client: Client = None,
        timeout_s: Seconds = 30.0,
        patience_s: Seconds = 60.0,
        stop_s: Seconds = 900.0,
        pause_s: Seconds = 2.0,
        log_lag_s: Lag = 10.0,
        list_calls_per_s: Rate = 1.8,
        calls_per_s: Rate = 8.0,
        clock: Annotated[Clock, CLOCK] = SYSTEM_CLOCK,
        **job: Any,
    ) -> None:
        self.settings, self._given = JobSettings(**job), sagemaker_client
        self._client = AwsClient(
            region=region,
            timeout_s=timeout_s,
            patience_s=patience_s,
            list_calls_per_s=list_calls_per_s,
            calls_per_s=calls_per_s,
            clock=clock,
            clients={"sagemaker": sagemaker_client, "logs": logs_client},
        )
        self._jobs = Jobs(self._client, clock=clock, pause_s=pause_s, stop_s=stop_s)
        self._clock, self._pause_s, self._log_lag_s = clock, pause_s, log_lag_s

    @property
    def command(self) -> tuple[str, ...]:
        """The image's own program; empty if replicas run `python -m atoll.replica`."""
        return tuple(self.settings.command)

    def with_settings(self, **changes: Any) -> SageMakerTrainingExecutor:
        """A copy of this executor with other job settings."""
        fixed = {"prices": self.settings.prices, "sagemaker_client": self._given}
        check_settings(self.name, {**fixed, **changes}, type(self), self.settings_class)
        other = copy(self)
        other.settings = replace(self.settings, **changes)
        return other

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        request, problems, notes = training_request(context, placement, self.settings, self._client.region)
        if problem := self._client.region_problem():
            problems.insert(0, problem)
        if problems:
            raise Unsupported(self.name, context.run_id, problems, hint=plan_hint(problems))
        return Plan(self.name, context.run_id, placement.replicas, request, tuple(notes))

    def hourly_usd(self, plan: Plan, placement: Placement) -> float | None:  # noqa: ARG002  the machine says it
        """The price of a machine: your own, or the list price."""
        return hourly_price(plan.request["jobs"][0]["ResourceConfig"]["InstanceType"], self.settings.prices)

    def handle(self, plan: Plan) -> RunHandle:
        region, label, first = plan.request["region"], plan.request["label"], plan.request.get("first_rank", 0)
        return RunHandle(self.name, region, label, plan.replicas, first)

    def submit(self, plan: Plan) -> RunHandle:
        return submit_or_stop(self, plan)

    def start(self, plan: Plan) -> RunHandle:
        Submission(self._jobs, self._client, plan).run()
        return self.handle(plan)

    def replace(self, plan: Plan, rank: int, ended: str) -> str | None:
        region = str(plan.request["region"])
        failed = self._jobs.describe(region, ended)
        body = None if failed is None else replacement_body(plan.request["jobs"][rank], failed)
        if body is None:
            return None
        Submission(self._jobs, self._client, plan).start(body)
        return str(body["TrainingJobName"])

    def status(self, handle: RunHandle) -> RunStatus:
        found = self._jobs.find_all(handle.scope, handle.native_id, handle.replicas, with_reasons=True)
        return RunStatus(tuple(replica_status(rank, job) for rank, job in enumerate(found)))

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        names = [job_name(handle.native_id, rank) for rank in ranks_to_stop(self, handle, ranks)]
        if problems := self._jobs.stop_all(handle.scope, names):
            reasons = {name: error.message for name, error in problems.items()}
            raise StopFailed(f"run `{handle.native_id}`", reasons, executor=self.name) from next(
                iter(problems.values())
            )

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        if not 0 <= rank < handle.replicas:
            raise RunNotFound(f"run `{handle.native_id}` has no rank {rank}", executor=self.name, operation="logs")
        job = job_name(handle.native_id, rank)
        log = JobLog(self._client, job, region=handle.scope)
        streams = log.streams()
        found = [] if streams else self._jobs.jobs_of(handle.scope, handle.native_id, rank)
        if not streams and (not found or (is_over(found[-1]) and not follow)):
            raise no_log(job)
        if follow:

            def is_job_over() -> bool:
                found = self._jobs.jobs_of(handle.scope, handle.native_id, rank)
                return not found or is_over(found[-1])

            yield from follow_lines(
                log,
                tail=tail,
                is_over=is_job_over,
                pause_s=self._pause_s,
                lag_s=self._log_lag_s,
                clock=self._clock,
            )
        else:
            yield from log.new_lines(streams) if tail is None else log.last_lines(streams, tail)

    def origin(self, handle: RunHandle) -> RunContext | None:
        found = self._context_of(self._jobs.describe(handle.scope, job_name(handle.native_id, 0)))
        return None if found is None else found[0]

    def _context_of(self, job: Mapping[str, Any] | None) -> tuple[RunContext, int] | None:
        """The run of a described job and its number of replicas; None if it is not a replica of Atoll."""
        return RunContext.from_variables({} if job is None else job.get("Environment") or {})

    def strays(self) -> list[Stray]:
        """Jobs in progress in this region whose variables are those of a replica. One describe call for each run."""
        found: list[Stray] = []
        contexts: dict[str, tuple[RunContext, int] | None] = {}
        for name in self._jobs.in_progress(self._client.region):
            parts = parsed_name(name)
            if parts is None:
                continue
            label = parts.label
            if label not in contexts:
                contexts[label] = self._context_of(self._jobs.describe(self._client.region or "", name))
            if (known := contexts[label]) is not None:
                context, replicas = known
                handle = RunHandle(self.name, self._client.region or "", label, replicas, context.first_rank)
                rank = context.first_rank + parts.rank
                found.append(Stray(handle, name, f"rank {rank} of run `{context.run_id}`", context))
        return found

    def links(self, handle: RunHandle, rank: int) -> dict[str, str]:
        return job_links(handle.scope, job_name(handle.native_id, rank))

    def diagnose(self) -> list[Check]:
        return setup_checks(self._client, self.settings)

    def details(self, handle: RunHandle, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """For each of these ranks: `training_job_name` of its newest job and `billable_seconds` of all its jobs, None
        where SageMaker does not report them yet; and `model_artifacts`, the S3 address, if there are some. One call
        for each job.
        """
        return [self._details(handle, rank) for rank in ranks]

    def _details(self, handle: RunHandle, rank: int) -> dict[str, Any]:
        jobs = self._jobs.jobs_of(handle.scope, handle.native_id, rank)
        if not jobs:
            return {"training_job_name": job_name(handle.native_id, rank), "billable_seconds": None}
        artifacts = (jobs[-1].get("ModelArtifacts") or {}).get("S3ModelArtifacts")
        return {
            "training_job_name": str(jobs[-1]["TrainingJobName"]),
            "billable_seconds": _billed(jobs),
            **({"model_artifacts": str(artifacts)} if artifacts else {}),
        }


def _billed(jobs: Sequence[Mapping[str, Any]]) -> int | None:
    known = [int(job["BillableTimeInSeconds"]) for job in jobs if job.get("BillableTimeInSeconds") is not None]
    return sum(known) if known and len(known) == len(jobs) else None
