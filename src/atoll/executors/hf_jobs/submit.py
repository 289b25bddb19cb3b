"""One submit: create a job for each rank in turn, unless the label of the run shows that it exists.

The service has no names that are taken and no idempotency key. A create whose answer was lost is repeated only after a
list by label shows no such job. A second job can still come to be, if two launchers create one rank at the same moment
or a list is late for longer: each container claims its rank in the store, so one of them runs it and the other ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from atoll.errors import AtollError, BackendError, ConfigError, Conflict, InvalidSpec, RunNotFound, SubmitError
from atoll.executors.base import Plan
from atoll.executors.hf_jobs.client import EXTRA
from atoll.executors.hf_jobs.errors import EXECUTOR, is_throttled, retry_after_s
from atoll.executors.hf_jobs.jobs import Jobs
from atoll.executors.hf_jobs.request import TOKEN, job_name
from atoll.executors.hf_jobs.status import Job, job_of
from atoll.registry import require

log = logging.getLogger("atoll.executors")


class Submission:
    """Remembers which jobs this submit may have created, and which it found and adopted."""

    def __init__(self, jobs: Jobs, plan: Plan, secrets: Mapping[str, str]) -> None:
        self._jobs, self._plan, self._secrets = jobs, plan, secrets
        self._namespace, self._label = str(plan.request["namespace"]), str(plan.request["label"])
        self._created: list[str] = []
        self._adopted: list[str] = []

    def run(self) -> None:
        """Return when the service has a job for every rank."""
        found = self._jobs.by_rank(self._jobs.all_of(self._namespace, self._label, "submit"), self._plan.replicas)
        for rank, job in enumerate(found):
            if job is not None:
                self._check_ours(rank, job)
                self._adopted.append(job.id)
        try:
            for rank, job in enumerate(found):
                if job is None:
                    self._start(rank)
        except AtollError as exc:
            left = [*self._created, *self._adopted]
            if not left:
                raise
            message = f"run `{self._plan.run_id}`: {exc.message}"
            raise SubmitError(
                message, left_running=left, created=self._created, executor=EXECUTOR, hint=exc.hint
            ) from exc
        self._wait_until_listed()

    def _start(self, rank: int) -> None:
        """Create the job of one rank. After a lost answer, look for it before each further try."""
        client = self._jobs.client
        deadline, pauses = client.deadline(), client.pauses()
        maybe_created = False
        while True:
            try:
                job = self._create(rank)
                self._created.append(job.id)
                log.info("created job `%s` of rank %d", job.id, rank)
                return
            except BackendError as exc:
                asked_s = retry_after_s(exc.__cause__)
                maybe_created = maybe_created or (exc.retryable and not is_throttled(exc))
                if maybe_created and self._found_after_all(rank):
                    return
                if not exc.retryable or deadline.is_past:
                    if maybe_created:
                        self._created.append(job_name(self._label, rank))
                    raise
            deadline.sleep(max(next(pauses), asked_s))

    def _found_after_all(self, rank: int) -> bool:
        """Whether a create without an answer has made the job. If the list fails, the name of the job is left."""
        try:
            job = self._jobs.until_seen(self._namespace, self._label, rank)
        except AtollError:
            self._created.append(job_name(self._label, rank))
            raise
        if job is None:
            return False
        self._check_ours(rank, job)
        self._created.append(job.id)
        log.info("found job `%s` of rank %d, whose create was not answered", job.id, rank)
        return True

    def _create(self, rank: int) -> Job:
        body = self._plan.request["jobs"][rank]

        def keep(answer: Any) -> Job:
            job = job_of(answer)
            self._jobs.remember(self._namespace, self._label, {job.id: job})
            return job

        what = f"run the job of rank {rank}"
        secrets = {"secrets": dict(self._secrets)} if self._secrets else {}
        try:
            return self._jobs.client.create(what, keep, **body, **secrets, namespace=self._namespace)
        except RunNotFound as exc:  # something that the request names, such as a Space, does not exist
            raise BackendError(exc.message, executor=EXECUTOR, operation="submit") from exc

    def _check_ours(self, rank: int, job: Job) -> None:
        wanted = self._plan.request["jobs"][rank]
        if job.token != wanted["labels"][TOKEN]:
            raise Conflict(self._plan.run_id, list(_differences(wanted, job)))

    def _wait_until_listed(self) -> None:
        """Wait until a list shows every rank, so that no other process finds one LOST. A failure here is no error."""
        client = self._jobs.client
        deadline, pauses = client.deadline(), client.pauses()
        with suppress(BackendError):
            while None in self._jobs.by_rank(
                self._jobs.listed(self._namespace, self._label, "submit"), self._plan.replicas
            ):
                if deadline.is_past:
                    return
                deadline.sleep(next(pauses))


def secret_values(references: Mapping[str, str], token: str | None) -> dict[str, str]:
    """The value of each secret, from the variables of this process; `InvalidSpec` names every missing one."""
    values, problems = {}, []
    for name, reference in references.items():
        variable = reference.partition(":")[2]
        value = os.environ.get(variable) or (_own_token(token) if variable == "HF_TOKEN" else None)
        if value is None:
            problems.append(f"secrets.{name}=`{reference}`: this process has no variable `{variable}`")
        else:
            values[name] = value
    if problems:
        raise InvalidSpec("the secrets of this run", problems)
    return values


def _own_token(token: str | None) -> str | None:
    """The token of the launch: the given one, or the one that `hf auth login` has stored."""
    if token is not None:
        return token
    with suppress(ConfigError):
        found: str | None = require("huggingface_hub", extra=EXTRA).get_token()
        return found
    return None


def _differences(body: Mapping[str, Any], job: Job) -> Iterator[str]:
    """One line for each variable or label in which the existing job differs from the requested one."""
    name = body["labels"]["name"]
    pairs = (("env", body["env"], job.environment or {}), ("labels", body["labels"], job.labels or {}))
    lines = [
        f"`{name}` {part}.{key}: there {f'`{there[key]}`' if key in there else 'absent'}, here `{here[key]}`"
        for part, here, there in pairs
        for key in sorted(here)
        if key != TOKEN and there.get(key) != here[key]
    ]
    yield from lines or [f"`{name}` was created by another request"]
