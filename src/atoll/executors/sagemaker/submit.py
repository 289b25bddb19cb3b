"""One submit: create a job for each rank in turn.

A create whose answer was lost is retried. If the first try did create the job, the retry finds the name taken and
recognizes the job by its launch token. From the moment a create is sent until SageMaker has surely refused it, the job
counts as possibly created, also if a retry is refused. If a rank cannot be created, the error names all such jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from atoll.errors import AtollError, BackendError, ConfigError, Conflict, RunNotFound, SubmitError
from atoll.executors.base import Plan
from atoll.executors.sagemaker.client import AwsClient
from atoll.executors.sagemaker.errors import EXECUTOR, is_taken, is_throttled
from atoll.executors.sagemaker.jobs import Job, Jobs
from atoll.executors.sagemaker.request import LAUNCH, TOKEN_TAG, launch_token, parsed_name

_COMPARED = ("AlgorithmSpecification", "ResourceConfig", "StoppingCondition", "Environment")

log = logging.getLogger("atoll.executors")


class Submission:
    """Remembers which jobs this submit may have created, and which it found and adopted."""

    def __init__(self, jobs: Jobs, client: AwsClient, plan: Plan) -> None:
        self._jobs, self._client, self._plan = jobs, client, plan
        self._region = str(plan.request["region"])
        self._created: list[str] = []
        self._adopted: list[str] = []

    def run(self) -> None:
        """Return when SageMaker has every job."""
        try:
            for body in self._plan.request["jobs"]:
                is_new = self.start(body)
                log.info("%s job `%s`", "created" if is_new else "adopted", body["TrainingJobName"])
        except AtollError as exc:
            left = [*self._created, *self._adopted]
            if not left:
                raise
            raise SubmitError(
                f"run `{self._plan.run_id}`: {exc.message}",
                left_running=left,
                created=self._created,
                executor=EXECUTOR,
                hint=exc.hint,
            ) from exc
        self._wait_until_visible()

    def _wait_until_visible(self) -> None:
        """Wait until SageMaker finds every job, so that no status says LOST. A failure here is not an error."""
        region, label = self._region, str(self._plan.request["label"])
        deadline = self._client.deadline()
        with suppress(BackendError):
            while None in self._jobs.find_all(region, label, self._plan.replicas) and not deadline.is_past:
                continue

    def start(self, body: dict[str, Any]) -> bool:
        """Create one job. False if it existed before. A job that an unanswered try may have created counts as new."""
        name = str(body["TrainingJobName"])
        deadline, pauses = self._client.deadline(), self._client.pauses()
        maybe_created = False
        while True:
            try:
                self._create(body, name)
                self._jobs.accepted.add(name)
                return True
            except (BackendError, ConfigError) as exc:
                is_retryable = isinstance(exc, BackendError) and exc.retryable
                maybe_created = maybe_created or (is_retryable and not is_throttled(exc))
                if not maybe_created:
                    self._created.remove(name)
                if is_taken(exc):
                    self._check_ours(body, exc)
                    if not maybe_created:
                        self._adopted.append(name)
                    return maybe_created
                if not is_retryable:
                    raise
                if deadline.is_past:
                    if maybe_created and self._is_ours(body, self._describe(body)):
                        return True
                    raise
            deadline.sleep(next(pauses))

    def _create(self, body: dict[str, Any], name: str) -> None:
        if name not in self._created:
            self._created.append(name)  # before the call: an interrupt may come right after it
        parts = parsed_name(name)
        what = f"create job `{name}`{f' of rank {parts.rank}' if parts else ''}"
        try:
            self._client.call("sagemaker", "create_training_job", "submit", what, region=self._region, tries=1, **body)
        except RunNotFound as exc:  # something that the request names, such as a role, does not exist
            raise BackendError(exc.message, executor=EXECUTOR, operation="submit") from exc

    def _check_ours(self, body: dict[str, Any], taken: AtollError) -> None:
        """Return if the job of this name is ours. Another job raises `Conflict`."""
        deadline, pauses = self._client.deadline(), self._client.pauses()
        while (found := self._describe(body)) is None:
            if deadline.is_past:
                raise taken
            deadline.sleep(next(pauses))
        if not self._is_ours(body, found):
            raise Conflict(self._plan.run_id, list(_differences(body, found))) from taken

    def _is_ours(self, body: dict[str, Any], found: Job | None) -> bool:
        """Whether the job has the launch token of this plan, in its variables or else in its tags."""
        if found is None:
            return False
        variables = found.get("Environment") or {}
        if LAUNCH in variables:
            return bool(variables[LAUNCH] == launch_token(body))
        if "TrainingJobArn" not in found:
            return False
        tags = self._jobs.tags(self._region, str(found["TrainingJobArn"]))
        return tags.get(TOKEN_TAG) == launch_token(body)

    def _describe(self, body: dict[str, Any]) -> Job | None:
        return self._jobs.describe(self._region, str(body["TrainingJobName"]))


def _differences(body: dict[str, Any], found: Job) -> Iterator[str]:
    """One line for each field in which the existing job differs from the requested one."""
    name, parts = body["TrainingJobName"], [part for part in _COMPARED if part in body and part in found]
    differing = [(part, key) for part in parts for key in sorted(body[part]) if key != LAUNCH]
    lines = [
        f"`{name}` {part}.{key}: there {_shown(found[part], key)}, here `{body[part][key]}`"
        for part, key in differing
        if found[part].get(key) != body[part][key]
    ]
    yield from lines or [f"`{name}` was created by another request"]


def _shown(part: dict[str, Any], key: str) -> str:
    return f"`{part[key]}`" if key in part else "absent"
