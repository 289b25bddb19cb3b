"""The training jobs of a run: find them in as few calls as possible, and stop them by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from atoll._time import Clock, Deadline, backoff
from atoll.errors import BackendError, RunNotFound
from atoll.executors.sagemaker.client import AwsClient, Pages
from atoll.executors.sagemaker.errors import EXECUTOR, is_over_already
from atoll.executors.sagemaker.replacement import following_name
from atoll.executors.sagemaker.request import job_name
from atoll.executors.sagemaker.status import is_over, needs_description

_PAGE = 100
_LIST = "list_training_jobs"
_ALWAYS_SENT = frozenset({"TrainingJobArn", "SecondaryStatus", "CreationTime"})
Job = dict[str, Any]
"""A job as a list or a description returns it; both have the same field names."""

log = logging.getLogger("atoll.executors")


class Jobs:
    """Calls about jobs. It caches the descriptions of failed jobs, which cannot change any more."""

    def __init__(self, client: AwsClient, *, clock: Clock, pause_s: float, stop_s: float) -> None:
        self._client, self._clock, self._pause_s, self._stop_s = client, clock, pause_s, stop_s
        self._reasons: dict[tuple[str, str, str], Job] = {}
        self._tries: int | None = None
        self.accepted: set[str] = set()
        """Names of jobs that SageMaker accepted from this process, and that no lookup has found yet."""

    def find_all(self, region: str, label: str, replicas: int, *, with_reasons: bool = False) -> list[Job | None]:
        """Each rank's job, None where SageMaker has none.

        One list call covers a hundred jobs. A describe call follows only for a job that the list does not have (yet)
        and, with `with_reasons`, for a job whose summary does not say why it ended. Then a job that was replaced is
        left out: each rank has its newest job. Without a list, each job is described.
        """
        jobs_of_run = (
            self._list(region, f"jobs of `{label}`", NameContains=label)
            if self._client.has("sagemaker", _LIST)
            else None
        )
        listed = {str(job["TrainingJobName"]): job for job in jobs_of_run or []}
        self.accepted.difference_update(listed)
        names = [job_name(label, rank) for rank in range(replicas)]
        found = {name: listed.get(name) or self.describe(region, name) for name in names}
        missing = [name for name in names if found[name] is None]
        if missing:
            self._clock.sleep(self._pause_s)  # a new job may be visible late: a job is LOST only after two looks
            found |= {name: self.describe(region, name) for name in missing}
        jobs = [found[name] for name in names]
        return [self._newest(region, job, listed)[-1] if with_reasons and job else job for job in jobs]

    def jobs_of(self, region: str, label: str, rank: int) -> list[Job]:
        """The jobs of one rank, each of which replaced the one before it. Empty if SageMaker has none."""
        first = self.describe(region, job_name(label, rank))
        return [] if first is None else self._newest(region, first, {})

    def _newest(self, region: str, job: Job, listed: Mapping[str, Job]) -> list[Job]:
        """The job and those that replaced it. A list may lack the newest one, so it is looked up."""
        jobs = [self._with_reason(region, job)]
        while (name := following_name(jobs[-1])) is not None:
            following = listed.get(name) or self.describe(region, name)
            if following is None or _is_same_answer(following, jobs[-1]):
                break
            jobs.append(self._with_reason(region, following))
        return jobs

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

    def stop_all(self, region: str, names: Sequence[str]) -> dict[str, BackendError]:
        """Stop every job by its name, whether SageMaker lists it or not. Returns those that may still run, and why.

        Every name is looked up: a list may lack a job that was just created. A name that is not found is looked up
        again, because the job may become visible late. A job that has failed may have been replaced: then the job that
        replaced it is stopped in the same way.
        """
        self._tries = None
        problems: dict[str, BackendError] = {}
        earlier: list[Job] = []
        while names:
            over, refused = self._stop(region, names)
            problems |= refused
            new = [job for job in over if not any(_is_same_answer(job, other) for other in earlier)]
            names = [name for job in new if (name := following_name(job)) is not None]
            earlier = over
        return problems

    def _stop(self, region: str, names: Sequence[str]) -> tuple[list[Job], dict[str, BackendError]]:
        """Stop these jobs. Returns those that are over, and why the others may still run."""
        refusals = {name: self._request_stop(region, name) for name in names}
        deadline = Deadline(self._stop_s, self._clock)
        over: list[Job] = []
        problems: dict[str, BackendError] = {}
        unseen = list(names)
        for pause_s in (0.0, self._pause_s, 2 * self._pause_s):
            if unseen and pause_s:
                self._clock.sleep(pause_s)
            found = {name: self._wait_until_over(region, name, deadline, refusals[name]) for name in unseen}
            problems |= {name: error for name, error in found.items() if isinstance(error, BackendError)}
            over += [job for job in found.values() if isinstance(job, dict)]
            unseen = [name for name, job in found.items() if job is None]
        for name in self.accepted.intersection(unseen):
            if refusals[name] is not None and (error := self._stop_when_visible(region, name)):
                problems[name] = error
        return over, problems

    def _stop_when_visible(self, region: str, name: str) -> BackendError | None:
        """Request the stop of a job that SageMaker accepted and does not find. Returns why it may still run."""
        patience = self._client.deadline()
        while (refusal := self._request_stop(region, name)) is not None:
            if patience.is_past:
                return refusal
            patience.sleep(self._pause_s)
        return None

    def _request_stop(self, region: str, name: str) -> BackendError | None:
        """Request the stop of one job. Returns the refusal; None also if the job is over."""
        log.info("stop job `%s`", name)
        try:
            self._call_briefly("stop_training_job", "cancel", name, region)
        except BackendError as exc:
            return None if is_over_already(exc) else exc
        return None

    def _wait_until_over(
        self, region: str, name: str, deadline: Deadline, refusal: BackendError | None
    ) -> BackendError | Job | None:
        """The job when it is over, None if there is no such job, else why the job may still run."""
        pauses = backoff(self._pause_s / 4, cap_s=5 * self._pause_s)
        while True:
            try:
                found = self._call_briefly("describe_training_job", "cancel", name, region)
            except RunNotFound:
                return None
            except BackendError as exc:
                return refusal or exc
            status = str(found["TrainingJobStatus"])
            if is_over(found) or (refusal is None and self._is_constant(found, status)):
                return found
            if isinstance(refusal, RunNotFound) or (refusal is None and status != "Stopping"):
                refusal = self._request_stop(region, name)  # the job was not visible, or the request had no effect
            if refusal is not None and status != "Stopping":
                return refusal
            if deadline.is_past:
                message = f"it is {status} after {self._stop_s:g} s"
                return BackendError(message, executor=EXECUTOR, operation="cancel")
            deadline.sleep(next(pauses))

    def _is_constant(self, job: Job, status: str) -> bool:
        """Whether a client of the caller answered without the fields that SageMaker always sends, as tests do.

        Such a client may return one constant answer: a stop that it accepted is believed, for no lookup would show it.
        A client that answers `Stopping` and more than a status reacts to stops, so the end is awaited.
        """
        missing = _ALWAYS_SENT - job.keys()
        reacts = status == "Stopping" and missing != _ALWAYS_SENT
        return not self._client.may_use_sdk and bool(missing) and not reacts

    def _call_briefly(self, verb: str, operation: str, name: str, region: str) -> Job:
        """A call of `stop_all`. After one job has used up the time for retries, the others do not retry."""
        try:
            return self._call(verb, operation, name, region, tries=self._tries)
        except BackendError as exc:
            self._tries = 1 if exc.retryable else self._tries
            raise

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

    def in_progress(self, region: str | None) -> list[str]:
        """The names of all jobs of the account in this region that run or wait."""
        jobs = self._list(region, "jobs in progress", StatusEquals="InProgress")
        if jobs is None:
            raise unusable(_LIST, "jobs in progress", "TrainingJobSummaries", "status")
        return [str(job["TrainingJobName"]) for job in jobs]

    def _list(self, region: str | None, what: str, **chosen: Any) -> list[Job] | None:
        """The summaries with a name and a status; None if an answer is not a list of jobs."""
        found: list[Job] = []
        more: dict[str, Any] = {}
        pages = Pages(f"the list of {what}", "status")
        while True:
            answer = self._client.call(
                "sagemaker",
                _LIST,
                "status",
                what,
                region=region,
                MaxResults=_PAGE,
                SortBy="Name",
                SortOrder="Ascending",
                **chosen,
                **more,
            )
            summaries = answer.get("TrainingJobSummaries")
            if not isinstance(summaries, list | tuple):
                return None
            found += (dict(job) for job in summaries if _is_job(job) and isinstance(job.get("TrainingJobName"), str))
            token = str(answer.get("NextToken") or "")
            if not token:
                return found
            more = {"NextToken": pages.after(token)}

    def _call(self, verb: str, operation: str, name: str, region: str, *, tries: int | None = None) -> Job:
        what = f"{verb.partition('_')[0]} job `{name}`"
        answer = self._client.call("sagemaker", verb, operation, what, region=region, tries=tries, TrainingJobName=name)
        if verb != "describe_training_job":
            return answer
        if not _is_job(answer):
            raise unusable(verb, what, "TrainingJobStatus", operation)
        self.accepted.discard(name)
        return {**answer, "TrainingJobName": name}


def unusable(verb: str, what: str, field: str, operation: str) -> BackendError:
    """The error for an answer without a field that is needed, such as that of a stand-in for a client."""
    message = f"{what}: the answer of `{verb}` has no `{field}`"
    return BackendError(message, executor=EXECUTOR, operation=operation, reason="no_answer")


def _is_job(answer: Any) -> bool:
    return isinstance(answer, Mapping) and isinstance(answer.get("TrainingJobStatus"), str)


def _is_same_answer(job: Job, other: Job) -> bool:
    """Whether two names have one description, apart from the name: then the service does not tell jobs apart."""
    return {**job, "TrainingJobName": ""} == {**other, "TrainingJobName": ""}
