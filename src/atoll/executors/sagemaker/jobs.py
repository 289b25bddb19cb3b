"""Jobs at the service: look at those of a run in as few calls as can be, and stop them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from atoll._time import Clock, Deadline, backoff
from atoll.errors import BackendError, RunNotFound
from atoll.executors.sagemaker.client import Gateway
from atoll.executors.sagemaker.errors import EXECUTOR, is_over_already
from atoll.executors.sagemaker.request import job_name
from atoll.executors.sagemaker.status import is_over, needs_description

_PAGE = 100
Job = dict[str, Any]
"""What a list or a description says about a job; both use the same words."""


class Jobs:
    """Asks and stops. All it remembers is why jobs that are over have failed, which cannot change."""

    def __init__(self, gateway: Gateway, *, clock: Clock, pause_s: float, stop_s: float) -> None:
        self._gateway, self._clock, self._pause_s, self._stop_s = gateway, clock, pause_s, stop_s
        self._explained: dict[tuple[str, str, str], Job] = {}

    def look(self, region: str, label: str, replicas: int, *, explained: bool = False) -> list[Job | None]:
        """Each rank's job, None where the service knows none.

        One list for a hundred jobs. A description only where the list says too little: a job it does not have (yet),
        and with `explained`, one that failed.
        """
        listed = {str(job["TrainingJobName"]): job for job in self._list(region, label)}
        names = [job_name(label, rank) for rank in range(replicas)]
        found = {name: listed.get(name) or self.described(region, name) for name in names}
        missing = [name for name in names if found[name] is None]
        if missing:
            self._clock.sleep(self._pause_s)  # what was just made may be seen late; "lost" is said only after two looks
            found |= {name: self.described(region, name) for name in missing}
        jobs = [found[name] for name in names]
        return [self._explain(region, job) if explained and job else job for job in jobs]

    def described(self, region: str, name: str) -> Job | None:
        """All that is known of one job; None if the service has none of that name."""
        try:
            return self._ask("describe_training_job", "status", name, region)
        except RunNotFound:
            return None

    def tags(self, region: str, arn: str) -> dict[str, str]:
        answer = self._gateway.ask(
            "sagemaker", "list_tags", "submit", f"tags of `{arn}`", region=region, ResourceArn=arn
        )
        return {str(tag["Key"]): str(tag["Value"]) for tag in answer.get("Tags", [])}

    def delete(self, region: str, name: str) -> None:
        """Have the service forget a job that is over; its name is free again when this returns."""
        try:
            self._ask("delete_training_job", "submit", name, region)
        except RunNotFound:
            return  # gone already, perhaps by an earlier try whose answer was lost
        except AttributeError as exc:
            raise BackendError("this boto3 cannot delete jobs", executor=EXECUTOR, operation="submit") from exc
        self.await_gone(region, name)

    def await_gone(self, region: str, name: str) -> None:
        """Returns when the service knows no job of that name."""
        deadline, pauses = Deadline(self._stop_s, self._clock), backoff(self._pause_s, cap_s=5 * self._pause_s)
        while self.described(region, name) is not None:
            if deadline.is_past:
                raise BackendError(f"job `{name}` is not deleted", executor=EXECUTOR, operation="submit")
            deadline.sleep(next(pauses))

    def stop_all(self, region: str, look: Callable[[], Iterable[Job]]) -> dict[str, BackendError]:
        """Ask whatever is not over to stop, and watch until it is. Returns what could not be stopped, and why."""
        refused: dict[str, BackendError] = {}
        deadline, pauses = Deadline(self._stop_s, self._clock), backoff(self._pause_s / 4, cap_s=5 * self._pause_s)
        while True:
            going = [job for job in look() if not is_over(job) and job["TrainingJobName"] not in refused]
            if not going:
                return refused
            for job in going:
                name = str(job["TrainingJobName"])
                if deadline.is_past:
                    message = f"job `{name}` does not stop: it is {job['TrainingJobStatus']} after {self._stop_s:g} s"
                    refused[name] = BackendError(message, executor=EXECUTOR, operation="cancel")
                elif job["TrainingJobStatus"] != "Stopping" and (error := self._stop(region, name)):
                    refused[name] = error
            self._clock.sleep(next(pauses))

    def _stop(self, region: str, name: str) -> BackendError | None:
        """Ask one job to stop. Quiet if it is over or gone; what else was in the way is returned."""
        try:
            self._ask("stop_training_job", "cancel", name, region)
        except RunNotFound as exc:
            found = self.described(region, name)
            return exc if found is not None and not is_over(found) else None
        except BackendError as exc:
            return None if is_over_already(exc) else exc
        return None

    def _explain(self, region: str, job: Job) -> Job:
        if not needs_description(job):
            return job
        key = (region, str(job["TrainingJobName"]), str(job.get("CreationTime")))
        if key not in self._explained:
            found = self.described(region, key[1])
            if found is None or not is_over(found):
                return job
            self._explained[key] = found
        return self._explained[key]

    def _list(self, region: str, label: str) -> list[Job]:
        found: list[Job] = []
        more: dict[str, Any] = {}
        while True:
            answer = self._gateway.ask(
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
            more = {"NextToken": str(answer["NextToken"])}

    def _ask(self, verb: str, operation: str, name: str, region: str) -> Job:
        what = f"{verb.partition('_')[0]} job `{name}`"
        return self._gateway.ask("sagemaker", verb, operation, what, region=region, TrainingJobName=name)
