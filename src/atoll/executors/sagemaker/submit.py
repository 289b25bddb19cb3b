"""One submit: a job for each rank in turn, all of them or none.

A create whose answer was lost is tried again; the taken name then leads to our own job, known by its token. What is
made here and cannot be completed is stopped again; what cannot be stopped is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from atoll._time import Deadline
from atoll.errors import AtollError, BackendError, ConfigError, Conflict, RunNotFound, SubmitError
from atoll.executors.base import Plan
from atoll.executors.sagemaker.client import Gateway
from atoll.executors.sagemaker.errors import EXECUTOR, is_taken, is_throttled
from atoll.executors.sagemaker.jobs import Job, Jobs
from atoll.executors.sagemaker.request import LAUNCH, TOKEN_TAG, launch_token
from atoll.executors.sagemaker.status import is_over, replica_status
from atoll.status import ReplicaState

_COMPARED = ("AlgorithmSpecification", "ResourceConfig", "StoppingCondition", "Environment")


class Launch:
    """Keeps account of what this submit has made, and what it found."""

    def __init__(self, jobs: Jobs, gateway: Gateway, plan: Plan) -> None:
        self._jobs, self._gateway, self._plan = jobs, gateway, plan
        self._region, self._label = str(plan.request["region"]), str(plan.request["label"])
        self._made: list[str] = []
        self._adopted: list[str] = []
        self._current: str | None = None
        self._complete = False

    def run(self) -> None:
        """Returns when the service has every job; raises when none of ours is left, or with the names of those."""
        try:
            for body in self._plan.request["jobs"]:
                self._current = body["TrainingJobName"]
                is_new = self._start(body)
                (self._made if is_new else self._adopted).append(body["TrainingJobName"])
                self._current = None
            self._confirm()
        except BaseException as exc:
            self._undo(exc)
            raise

    # ── starting ────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, body: dict[str, Any]) -> bool:
        """Create the job. False if it was there before; one that an unanswered try of ours may have made is new."""
        deadline, pauses = self._gateway.deadline(), self._gateway.pauses()
        maybe_made = False
        while True:
            try:
                self._create(body)
                return True
            except BackendError as exc:
                if is_taken(exc):
                    if self._adopt(body, exc):
                        return maybe_made
                    continue
                if not exc.retryable:
                    raise
                maybe_made = maybe_made or not is_throttled(exc)
                if deadline.is_past:
                    if maybe_made and self._is_ours(body, self._described(body)):
                        return True
                    raise
            deadline.sleep(next(pauses))

    def _create(self, body: dict[str, Any]) -> None:
        what = f"create job `{body['TrainingJobName']}`"
        try:
            self._gateway.ask("sagemaker", "create_training_job", "submit", what, region=self._region, tries=1, **body)
        except RunNotFound as exc:  # not the job, of course: something that the request names
            raise BackendError(exc.message, executor=EXECUTOR, operation="submit") from exc

    def _adopt(self, body: dict[str, Any], taken: BackendError) -> bool:
        """True if the name belongs to our own job; False if it was freed. Another's is a `Conflict`."""
        deadline, pauses = self._gateway.deadline(), self._gateway.pauses()
        while (found := self._described(body)) is None:
            if deadline.is_past:
                raise taken
            deadline.sleep(next(pauses))
        if found["TrainingJobStatus"] == "Deleting":
            self._jobs.await_gone(self._region, str(body["TrainingJobName"]))
            return False
        if not self._is_ours(body, found):
            raise Conflict(self._plan.run_id, list(_differences(body, found))) from taken
        if self._was_undone(found):
            self._free(str(body["TrainingJobName"]), taken)
            return False
        return True

    def _was_undone(self, found: Job) -> bool:
        """Whether the job was stopped by an earlier submit that could not start every rank."""
        was_stopped = replica_status(0, found).state is ReplicaState.CANCELLED
        return was_stopped and not self._is_complete()

    def _is_complete(self) -> bool:
        """Whether every rank has a job. Once it is so it stays so, and is not asked again."""
        self._complete = self._complete or None not in self._look()
        return self._complete

    def _free(self, name: str, taken: BackendError) -> None:
        try:
            self._jobs.delete(self._region, name)
        except BackendError as exc:
            raise BackendError(
                f"run `{self._plan.run_id}` was stopped half-way when it was first started, and the name of its job "
                f"`{name}` stays taken: {exc.message}",
                executor=EXECUTOR,
                operation="submit",
                reason="taken",
                hint="choose another run id, or delete the job (`aws sagemaker delete-training-job`)",
            ) from taken

    def _is_ours(self, body: dict[str, Any], found: Job | None) -> bool:
        """Whether the job there has the launch token of this plan, in its variables or else in its tags."""
        if found is None:
            return False
        variables = found.get("Environment") or {}
        if LAUNCH in variables:
            return bool(variables[LAUNCH] == launch_token(body))
        tags = self._jobs.tags(self._region, str(found["TrainingJobArn"]))
        return tags.get(TOKEN_TAG) == launch_token(body)

    def _described(self, body: dict[str, Any]) -> Job | None:
        return self._jobs.described(self._region, str(body["TrainingJobName"]))

    def _confirm(self) -> None:
        """See that the service shows every job, so that whoever asks next finds them. They are made in any case."""
        deadline: Deadline = self._gateway.deadline()
        with suppress(BackendError):
            while not self._is_complete() and not deadline.is_past:
                continue

    def _look(self) -> list[Job | None]:
        return self._jobs.look(self._region, self._label, self._plan.replicas)

    # ── undoing ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _undo(self, why: BaseException) -> None:
        """Stop what this submit made, or may have made. Raises `SubmitError` if there was something, or is still."""
        mine = [*self._made, *([self._current] if self._current and not _is_definite(why) else [])]
        left = self._stop(mine) if mine else []
        left += self._still_going(self._adopted)
        if isinstance(why, AtollError) and (mine or left):
            raise SubmitError(
                f"run `{self._plan.run_id}`: {why.message}", left_running=left, executor=EXECUTOR, hint=why.hint
            ) from why
        if left:
            raise SubmitError(f"run `{self._plan.run_id}`: interrupted", left_running=left, executor=EXECUTOR) from why

    def _stop(self, names: list[str]) -> list[str]:
        """Stop these jobs, and return those that could not be; interrupted again, all that may still run."""
        try:
            refused = self._jobs.stop_all(self._region, lambda: self._known(names))
        except (BackendError, KeyboardInterrupt):
            return list(names)
        return sorted(refused)

    def _still_going(self, names: list[str]) -> list[str]:
        """Those of another launcher's jobs that are not over. They are not ours to stop."""
        if not names:
            return []
        try:
            return [str(job["TrainingJobName"]) for job in self._known(names) if not is_over(job)]
        except (BackendError, KeyboardInterrupt):
            return list(names)

    def _known(self, names: list[str]) -> list[Job]:
        wanted = set(names)
        return [job for job in self._look() if job is not None and job["TrainingJobName"] in wanted]


def _is_definite(why: BaseException) -> bool:
    """Whether a create that ended so has surely made nothing."""
    return isinstance(why, ConfigError) or (isinstance(why, BackendError) and not why.retryable)


def _differences(body: dict[str, Any], found: Job) -> Iterator[str]:
    """One line for each part in which the job there is not the one we would have made."""
    name, parts = body["TrainingJobName"], [part for part in _COMPARED if part in body and part in found]
    differing = [(part, key) for part in parts for key in sorted(body[part]) if key != LAUNCH]
    lines = [
        f"`{name}` {part}.{key}: there {_said(found[part], key)}, here `{body[part][key]}`"
        for part, key in differing
        if found[part].get(key) != body[part][key]
    ]
    yield from lines or [f"`{name}` was made by another request"]


def _said(part: dict[str, Any], key: str) -> str:
    return f"`{part[key]}`" if key in part else "absent"
