"""The jobs of a run: find them by label in as few requests as possible, and stop them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from threading import Lock

from atoll._time import Deadline, backoff
from atoll.errors import BackendError, RunNotFound
from atoll.executors.hf_jobs.client import HubClient
from atoll.executors.hf_jobs.errors import EXECUTOR, is_conflict
from atoll.executors.hf_jobs.request import MANAGED_BY, RUN
from atoll.executors.hf_jobs.status import Job, chosen, job_of

log = logging.getLogger("atoll.executors")
_ids: dict[tuple[str, str, str], dict[str, int]] = {}
"""(endpoint, namespace, label) -> the ids of jobs that this process has seen, with their ranks. A list may lack a new
job, and only its id finds it then. A cache: another process works without it."""
_lock = Lock()
_CONFLICT_PAUSES = 15
"""A job whose stop the service refuses with 409 has its grace and so many pauses to end by an earlier stop."""


class Jobs:
    """Calls about jobs. A list shows all jobs of a run, and may lack a new one for `list_lag_s`."""

    def __init__(self, client: HubClient, *, pause_s: float, stop_s: float, list_lag_s: float) -> None:
        self.client, self._clock = client, client.clock
        self._pause_s, self._stop_s, self._list_lag_s = pause_s, stop_s, list_lag_s

    # Finding.

    def listed(self, namespace: str, label: str, operation: str = "status") -> dict[str, Job]:
        """The jobs of a run that the list shows, by id."""
        try:
            found = self.client.jobs(namespace, operation, f"jobs of `{label}`", labels={RUN: label})
        except RunNotFound:  # the service has no such namespace any more
            return {}
        jobs = {job.id: job for job in map(job_of, found) if job.has_label(RUN, label)}
        self.remember(namespace, label, jobs)
        return jobs

    def all_of(self, namespace: str, label: str, operation: str = "status") -> dict[str, Job]:
        """The jobs of a run that the list shows, and those whose ids are known here and that a lookup finds."""
        jobs = self.listed(namespace, label, operation)
        for job_id in self.known(namespace, label).keys() - jobs.keys():
            if (found := self.inspect(namespace, job_id, operation)) is not None:
                jobs[job_id] = found
        return jobs

    def find_all(self, namespace: str, label: str, replicas: int) -> list[Job | None]:
        """Each rank's job, None where the service has none. A rank is missing only if two looks do not show it."""
        found = self.by_rank(self.listed(namespace, label), replicas)
        if None in found:
            found = self.by_rank(self.all_of(namespace, label), replicas)
        if None in found:
            self._clock.sleep(self._pause_s)
            found = self.by_rank(self.all_of(namespace, label), replicas)
        return found

    @staticmethod
    def by_rank(jobs: Mapping[str, Job], replicas: int) -> list[Job | None]:
        ranks: dict[int, list[Job]] = {}
        for job in jobs.values():
            ranks.setdefault(job.rank, []).append(job)
        return [chosen(ranks.get(rank, ())) for rank in range(replicas)]

    def inspect(self, namespace: str, job_id: str, operation: str = "status") -> Job | None:
        try:
            found = self.client.call("inspect_job", operation, f"job `{job_id}`", job_id=job_id, namespace=namespace)
        except RunNotFound:
            return None
        return job_of(found)

    def whole(self, namespace: str, job: Job) -> Job:
        """The job with its variables, which a list may leave out."""
        return job if job.environment else self.inspect(namespace, job.id) or job

    def of_atoll(self, namespace: str) -> list[Job]:
        """Every job of Atoll in the namespace that waits or runs."""
        labels, stages = {MANAGED_BY: "atoll"}, ("SCHEDULING", "RUNNING")
        found = self.client.jobs(namespace, "sweep", "jobs of Atoll", labels=labels, stages=stages)
        return [job for job in map(job_of, found) if not job.is_over and job.has_label(MANAGED_BY, "atoll")]

    def known(self, namespace: str, label: str) -> dict[str, int]:
        """The ids of jobs of this run that this process has seen, with their ranks."""
        with _lock:
            return dict(_ids.get((self.client.endpoint, namespace, label), {}))

    def remember(self, namespace: str, label: str, jobs: Mapping[str, Job]) -> None:
        with _lock:
            ids = _ids.setdefault((self.client.endpoint, namespace, label), {})
            ids.update({job.id: job.rank for job in jobs.values()})

    def until_seen(self, namespace: str, label: str, rank: int) -> Job | None:
        """The job of a rank whose create was not answered. A list may show it late, so the look is repeated."""
        deadline, pauses = Deadline(self._list_lag_s, self._clock), backoff(self._pause_s / 4, cap_s=self._pause_s)
        while True:
            found = chosen(job for job in self.all_of(namespace, label, "submit").values() if job.rank == rank)
            if found is not None or deadline.is_past:
                return found
            deadline.sleep(next(pauses))

    # Stopping.

    def stop_all(self, namespace: str, label: str, ranks: Sequence[int]) -> dict[str, BackendError]:
        """Stop every job of these ranks. Returns those that may still run, and why.

        A rank without a job is looked up again for `list_lag_s`: its job may become visible late. Returns when a look
        shows that each job is over.
        """
        deadline, lag = Deadline(self._stop_s, self._clock), Deadline(self._list_lag_s, self._clock)
        pauses = backoff(self._pause_s / 4, cap_s=2 * self._pause_s)
        requested: dict[str, BackendError | None] = {}
        at: dict[str, float] = {}
        refused: dict[str, BackendError] = {}  # and ran at a later look; one that ends by itself after that stays
        tries: int | None = None
        while True:
            jobs = [job for job in self.all_of(namespace, label, "cancel").values() if job.rank in ranks]
            alive = [job for job in jobs if not job.is_over and job.id not in refused]
            waiting = [job for job in alive if requested.get(job.id) is None or not self._has_ended(namespace, job)]
            refused |= {job.id: why for job in waiting if (why := self._refusal(job, requested, at)) is not None}
            waiting = [job for job in waiting if job.id not in refused]
            for job in waiting:
                if job.id not in requested:
                    requested[job.id] = why = self._request_stop(namespace, job, tries)
                    at[job.id] = self._clock.monotonic()
                    tries = 1 if why is not None and why.retryable else tries  # the others do not retry as long
            if not waiting and (lag.is_past or {job.rank for job in jobs} >= set(ranks)):
                return refused
            if deadline.is_past:
                return {**refused, **{job.id: requested.get(job.id) or self._still(job) for job in waiting}}
            deadline.sleep(next(pauses))

    def _refusal(
        self, job: Job, requested: Mapping[str, BackendError | None], at: Mapping[str, float]
    ) -> BackendError | None:
        """Why the service does not stop this job. With 409 it may refuse a second stop, so the first one has time."""
        why = requested.get(job.id)
        if why is None or not is_conflict(why):
            return why
        passed_s = self._clock.monotonic() - at[job.id]
        return why if passed_s > job.grace_s + _CONFLICT_PAUSES * self._pause_s else None

    def _has_ended(self, namespace: str, job: Job) -> bool:
        """Whether a job is over although the list does not show it yet."""
        found = self.inspect(namespace, job.id, "cancel")
        return found is None or found.is_over

    def _request_stop(self, namespace: str, job: Job, tries: int | None) -> BackendError | None:
        """Request the stop of one job. Returns the refusal."""
        log.info("stop job `%s` of rank %d", job.id, job.rank)
        what = f"cancel job `{job.id}` of rank {job.rank}"
        try:
            self.client.call("cancel_job", "cancel", what, tries=tries, job_id=job.id, namespace=namespace)
        except BackendError as exc:
            return exc
        return None

    def _still(self, job: Job) -> BackendError:
        return BackendError(f"it is {job.stage} after {self._stop_s:g} s", executor=EXECUTOR, operation="cancel")
