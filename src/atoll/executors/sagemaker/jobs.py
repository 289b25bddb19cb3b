"""The training jobs of a run: find them in as few calls as possible, and stop or delete them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from atoll._time import Clock, Deadline, backoff
from atoll.errors import BackendError, RunNotFound
from atoll.executors.sagemaker.client import AwsClient, Pages
from atoll.executors.sagemaker.errors import EXECUTOR, is_over_already
from atoll.executors.sagemaker.request import job_name
from atoll.executors.sagemaker.status import is_over, needs_description

_PAGE = 100
Job = dict[str, Any]
"""A job as a list or a description returns it; both have the same field names."""

log = logging.getLogger("atoll.executors")


class Jobs:
    """Calls about jobs. It caches the descriptions of failed jobs, which cannot change any more."""

    def __init__(self, client: AwsClient, *, clock: Clock, pause_s: float, stop_s: float) -> None:
        self._client, self._clock, self._pause_s, self._stop_s = client, clock, pause_s, stop_s
        self._reasons: dict[tuple[str, str, str], Job] = {}

    def find_all(self, region: str, label: str, replicas: int, *, with_reasons: bool = False) -> list[Job | None]:
        """Each rank's job, None where SageMaker has none.

        One list call covers a hundred jobs. A describe call follows only for a job that the list does not have (yet)
        and, with `with_reasons`, for a job whose summary does not say why it ended.
        """
        listed = {str(job["TrainingJobName"]): job for job in self._list(region, label)}
        names = [job_name(label, rank) for rank in range(replicas)]
        found = {name: listed.get(name) or self.describe(region, name) for name in names}
        missing = [name for name in names if found[name] is None]
        if missing:
            self._clock.sleep(self._pause_s)  # a new job may be visible late: a job is LOST only after two looks
            found |= {name: self.describe(region, name) for name in missing}
        jobs = [found[name] for name in names]
        return [self._with_reason(region, job) if with_reasons and job else job for job in jobs]

    def describe(self, region: str, name: str) -> Job | None:
        """The description of one job; None if SageMaker has no job of that name."""
        try:
            return self._call("describe_training_job", "status", name, region)
        except RunNotFound:
            return None

    def tags(self, region: str, arn: str) -> dict[str, str]:
        answer = self._client.call(
            "sagemaker", "list_tags", "submit", f"tags of `{arn}`", region=region, ResourceArn=arn
        )
        return {str(tag["Key"]): str(tag["Value"]) for tag in answer.get("Tags", [])}

    def delete(self, region: str, name: str) -> None:
        """Delete a job that is over; its name is free again when this returns."""
        try:
            self._call("delete_training_job", "submit", name, region)
        except RunNotFound:
            return  # already deleted, perhaps by an earlier try whose answer was lost
        except AttributeError as exc:
            raise BackendError("this boto3 is too old to delete jobs", executor=EXECUTOR, operation="submit") from exc
        self.wait_until_deleted(region, name)

    def wait_until_deleted(self, region: str, name: str) -> None:
        """Wait until SageMaker has no job of that name."""
        deadline, pauses = Deadline(self._stop_s, self._clock), backoff(self._pause_s, cap_s=5 * self._pause_s)
        while self.describe(region, name) is not None:
            if deadline.is_past:
                raise BackendError(f"job `{name}` is not deleted", executor=EXECUTOR, operation="submit")
            deadline.sleep(next(pauses))

    def stop_all(self, region: str, find: Callable[[], Iterable[Job]]) -> dict[str, BackendError]:
        """Stop every job that is not over, and wait until all are. Returns the jobs that did not stop, and why."""
        refused: dict[str, BackendError] = {}
        deadline, pauses = Deadline(self._stop_s, self._clock), backoff(self._pause_s / 4, cap_s=5 * self._pause_s)
        while True:
            running = [job for job in find() if not is_over(job) and job["TrainingJobName"] not in refused]
            if not running:
                return refused
            for job in running:
                name = str(job["TrainingJobName"])
                if deadline.is_past:
                    message = f"job `{name}` does not stop: it is {job['TrainingJobStatus']} after {self._stop_s:g} s"
                    refused[name] = BackendError(message, executor=EXECUTOR, operation="cancel")
                elif job["TrainingJobStatus"] != "Stopping" and (error := self._stop(region, name)):
                    refused[name] = error
            self._clock.sleep(next(pauses))

    def _stop(self, region: str, name: str) -> BackendError | None:
        """Request the stop of one job. Returns the error, or None also if the job is over or deleted."""
        log.info("stop job `%s`", name)
        try:
            self._call("stop_training_job", "cancel", name, region)
        except RunNotFound as exc:
            found = self.describe(region, name)
            return exc if found is not None and not is_over(found) else None
        except BackendError as exc:
            return None if is_over_already(exc) else exc
        return None

    def _with_reason(self, region: str, job: Job) -> Job:
        if not needs_description(job):
            return job
        key = (region, str(job["TrainingJobName"]), str(job.get("CreationTime")))
        if key not in self._reasons:
            found = self.describe(region, key[1])
            if found is None or not is_over(found):
                return job
            self._reasons[key] = found
        return self._reasons[key]

    def _list(self, region: str, label: str) -> list[Job]:
        found: list[Job] = []
        more: dict[str, Any] = {}
        pages = Pages(f"the list of jobs of `{label}`", "status")
        while True:
            answer = self._client.call(
                "sagemaker",
                "list_training_jobs",
                "status",
                f"jobs of `{label}`",
                region=region,
                NameContains=label,
                MaxResults=_PAGE,
                SortBy="Name",
                SortOrder="Ascending",
                **more,
            )
            found += answer.get("TrainingJobSummaries", [])
            if not answer.get("NextToken"):
                return found
            more = {"NextToken": pages.after(str(answer["NextToken"]))}

    def _call(self, verb: str, operation: str, name: str, region: str) -> Job:
        what = f"{verb.partition('_')[0]} job `{name}`"
        return self._client.call("sagemaker", verb, operation, what, region=region, TrainingJobName=name)
