"""One submit: create a job for each rank in turn, all of them or none.

A create whose answer was lost is retried. If the first try did create the job, the retry finds the name taken and
recognizes the job by its launch token. If a rank cannot be created, the submit stops the jobs that it created, and its
error names the jobs that could not be stopped.
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
from atoll.executors.sagemaker.request import LAUNCH, TOKEN_TAG, launch_token
from atoll.executors.sagemaker.status import is_over, replica_status
from atoll.status import ReplicaState

_COMPARED = ("AlgorithmSpecification", "ResourceConfig", "StoppingCondition", "Environment")

log = logging.getLogger("atoll.executors")


class Submission:
    """Remembers which jobs this submit created, and which it found and adopted."""

    def __init__(self, jobs: Jobs, client: AwsClient, plan: Plan) -> None:
        self._jobs, self._client, self._plan = jobs, client, plan
        self._region, self._label = str(plan.request["region"]), str(plan.request["label"])
        self._created: list[str] = []
        self._adopted: list[str] = []
        self._current: str | None = None
        self._complete = False

    def run(self) -> None:
        """Return when SageMaker has every job. On failure stop the created jobs, and name those that are left."""
        try:
            for body in self._plan.request["jobs"]:
                self._current = body["TrainingJobName"]
                is_new = self._start(body)
                log.info("%s job `%s`", "created" if is_new else "adopted", self._current)
                (self._created if is_new else self._adopted).append(body["TrainingJobName"])
                self._current = None
            self._confirm()
        except BaseException as exc:
            self._roll_back(exc)
            raise

    # ── starting ────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, body: dict[str, Any]) -> bool:
        """Create the job. False if it existed before. A job that an unanswered try may have created counts as new."""
        deadline, pauses = self._client.deadline(), self._client.pauses()
        maybe_created = False
        while True:
            try:
                self._create(body)
                return True
            except BackendError as exc:
                if is_taken(exc):
                    if self._adopt(body, exc):
                        return maybe_created
                    continue
                if not exc.retryable:
                    raise
                maybe_created = maybe_created or not is_throttled(exc)
                if deadline.is_past:
                    if maybe_created and self._is_ours(body, self._describe(body)):
                        return True
                    raise
            deadline.sleep(next(pauses))

    def _create(self, body: dict[str, Any]) -> None:
        what = f"create job `{body['TrainingJobName']}`"
        try:
            self._client.call("sagemaker", "create_training_job", "submit", what, region=self._region, tries=1, **body)
        except RunNotFound as exc:  # something that the request names, such as a role, does not exist
            raise BackendError(exc.message, executor=EXECUTOR, operation="submit") from exc

    def _adopt(self, body: dict[str, Any], taken: BackendError) -> bool:
        """True if the job of this name is ours; False if the name became free. Another job raises `Conflict`."""
        deadline, pauses = self._client.deadline(), self._client.pauses()
        while (found := self._describe(body)) is None:
            if deadline.is_past:
                raise taken
            deadline.sleep(next(pauses))
        if found["TrainingJobStatus"] == "Deleting":
            self._jobs.wait_until_deleted(self._region, str(body["TrainingJobName"]))
            return False
        if not self._is_ours(body, found):
            raise Conflict(self._plan.run_id, list(_differences(body, found))) from taken
        if self._was_rolled_back(found):
            self._free(str(body["TrainingJobName"]), taken)
            return False
        return True

    def _was_rolled_back(self, found: Job) -> bool:
        """Whether an earlier submit stopped the job because it could not start every rank."""
        was_stopped = replica_status(0, found).state is ReplicaState.CANCELLED
        return was_stopped and not self._is_complete()

    def _is_complete(self) -> bool:
        """Whether every rank has a job. Once true, it stays true without further calls."""
        self._complete = self._complete or None not in self._find_all()
        return self._complete

    def _free(self, name: str, taken: BackendError) -> None:
        try:
            self._jobs.delete(self._region, name)
        except BackendError as exc:
            raise BackendError(
                f"an earlier submit of run `{self._plan.run_id}` was rolled back, and the name of its job "
                f"`{name}` is still taken: {exc.message}",
                executor=EXECUTOR,
                operation="submit",
                reason="taken",
                hint="choose another run id, or delete the job (`aws sagemaker delete-training-job`)",
            ) from taken

    def _is_ours(self, body: dict[str, Any], found: Job | None) -> bool:
        """Whether the job has the launch token of this plan, in its variables or else in its tags."""
        if found is None:
            return False
        variables = found.get("Environment") or {}
        if LAUNCH in variables:
            return bool(variables[LAUNCH] == launch_token(body))
        tags = self._jobs.tags(self._region, str(found["TrainingJobArn"]))
        return tags.get(TOKEN_TAG) == launch_token(body)

    def _describe(self, body: dict[str, Any]) -> Job | None:
        return self._jobs.describe(self._region, str(body["TrainingJobName"]))

    def _confirm(self) -> None:
        """Wait until SageMaker lists every job, so that the next status finds them. A failure here is not an error."""
        deadline = self._client.deadline()
        with suppress(BackendError):
            while not self._is_complete() and not deadline.is_past:
                continue

    def _find_all(self) -> list[Job | None]:
        return self._jobs.find_all(self._region, self._label, self._plan.replicas)

    # ── rolling back ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _roll_back(self, why: BaseException) -> None:
        """Stop the jobs that this submit created or may have created. Raises `SubmitError` if there are or were any."""
        mine = [*self._created, *([self._current] if self._current and not _is_definite(why) else [])]
        left = self._stop(mine) if mine else []
        left += self._still_running(self._adopted)
        if isinstance(why, AtollError) and (mine or left):
            raise SubmitError(
                f"run `{self._plan.run_id}`: {why.message}", left_running=left, executor=EXECUTOR, hint=why.hint
            ) from why
        if left:
            raise SubmitError(f"run `{self._plan.run_id}`: interrupted", left_running=left, executor=EXECUTOR) from why

    def _stop(self, names: list[str]) -> list[str]:
        """Stop these jobs, and return those that did not stop; after another interrupt, all that may still run."""
        try:
            refused = self._jobs.stop_all(self._region, lambda: self._known(names))
        except (BackendError, KeyboardInterrupt):
            return list(names)
        return sorted(refused)

    def _still_running(self, names: list[str]) -> list[str]:
        """Those of another launcher's jobs that are not over. This submit does not stop them."""
        if not names:
            return []
        try:
            return [str(job["TrainingJobName"]) for job in self._known(names) if not is_over(job)]
        except (BackendError, KeyboardInterrupt):
            return list(names)

    def _known(self, names: list[str]) -> list[Job]:
        wanted = set(names)
        return [job for job in self._find_all() if job is not None and job["TrainingJobName"] in wanted]


def _is_definite(why: BaseException) -> bool:
    """Whether a create that failed with this error has surely created nothing."""
    return isinstance(why, ConfigError) or (isinstance(why, BackendError) and not why.retryable)


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
