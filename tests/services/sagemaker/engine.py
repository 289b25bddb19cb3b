"""The service in memory: training-job operations on plain dictionaries, with names that stay taken."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from enum import Enum, auto
from threading import Event, Lock, Thread
from typing import Any

from services.sagemaker.faults import Refusal
from services.sagemaker.job import Job, Sink, Tempo
from services.sagemaker.validation import message, problems

ACCOUNT = "123456789012"


class Listing(Enum):
    """How a list of jobs ends."""

    USUAL = auto()
    REPEATS = auto()
    """Every page leads to the same page."""
    ENDLESS = auto()
    """Every page leads to another, and those after the last job are empty."""


class Engine:
    """Jobs of one account and region. `close` ends whatever runs."""

    def __init__(self, sink: Sink, *, region: str, tempo: Tempo | None = None) -> None:
        self.admits = Event()
        """While clear, jobs wait for a machine."""
        self.admits.set()
        self.unseen_looks: Mapping[str, int] = {}
        """Operation -> how many calls do not see a new job: eventual consistency, counted and not timed."""
        self.stale_lists = 0
        """How many lists show a job as it was before it was stopped."""
        self.listing = Listing.USUAL
        self.quota: int | None = None
        self.shows_environment = True
        self.jobs: dict[str, Job] = {}
        self.tempo = tempo or Tempo()
        self._sink, self._region = sink, region
        self._threads: list[Thread] = []
        self._started: list[Job] = []
        """Every job that has a thread, forgotten ones too."""
        self._lock = Lock()

    def answer(self, operation: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """One call. Refused like the service if the request breaks its model."""
        if found := problems(operation, request):
            raise Refusal("ValidationException", message(found))
        handler = getattr(self, f"_{operation}", None)
        if handler is None:
            raise Refusal("UnknownOperationException", f"{operation} is not modelled")
        return dict(handler(request))

    def seed(self, request: Mapping[str, Any], status: str, secondary: str, *, failure: str | None = None) -> Job:
        """Put a job there that never runs, in a state of choice."""
        name = str(request["TrainingJobName"])
        job = self.jobs[name] = Job(request, self._arn(name), self._sink, self.tempo)
        job.status, job.secondary, job.failure = status, secondary, failure
        return job

    def hide(self, name: str, **looks: int) -> None:
        """Hide the jobs with this part in their names: `hide(label, ListTrainingJobs=1)` from one list only."""
        with self._lock:
            for job in self.jobs.values():
                if name in job.name:
                    job.unseen |= looks

    def forget(self, label: str) -> None:
        """Lose every trace of the jobs whose names begin so."""
        with self._lock:
            self.jobs = {name: job for name, job in self.jobs.items() if not name.startswith(label)}

    def close(self) -> None:
        self.admits.set()
        for job in self._started:
            job.kill()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._started.clear()
        self.jobs.clear()

    # ── the operations, by AWS's names ──────────────────────────────────────────────────────────────────────────

    def _CreateTrainingJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = str(request["TrainingJobName"])
        arn = self._arn(name)
        with self._lock:
            if name in self.jobs:
                text = "Training job names must be unique within an AWS account and region, and a training job with "
                raise Refusal("ResourceInUse", f"{text}this name already exists ({arn})")
            if self.quota is not None and sum(not job.is_over for job in self.jobs.values()) >= self.quota:
                kind = request["ResourceConfig"]["InstanceType"]
                text = f"The account-level service limit '{kind} for training job usage' is {self.quota} Instances"
                raise Refusal("ResourceLimitExceeded", text)
            job = self.jobs[name] = Job(request, arn, self._sink, self.tempo)
            job.unseen = dict(self.unseen_looks)
        thread = Thread(target=job.run, args=(self.admits,), daemon=True)
        self._threads.append(thread)
        self._started.append(job)
        thread.start()
        return {"TrainingJobArn": arn}

    def _DescribeTrainingJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        found = self._job(request, "DescribeTrainingJob").describe()
        return found if self.shows_environment else {k: v for k, v in found.items() if k != "Environment"}

    def _ListTrainingJobs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            jobs = [job for job in self.jobs.values() if request.get("NameContains", "") in job.name]
        jobs = [job for job in jobs if self._is_seen(job, "ListTrainingJobs")]
        if wanted := request.get("StatusEquals"):
            jobs = [job for job in jobs if job.status == wanted]
        jobs.sort(key=lambda job: job.name if request.get("SortBy") == "Name" else job.created_at)
        if request.get("SortOrder", "Descending") == "Descending":
            jobs.reverse()
        start, size = int(request.get("NextToken") or 0), int(request.get("MaxResults", 10))
        more = {"NextToken": str(start + size)} if start + size < len(jobs) else {}
        if self.listing is Listing.REPEATS:
            start, more = 0, {"NextToken": "7"}
        elif self.listing is Listing.ENDLESS:
            more = {"NextToken": str(start + size)}
        return {"TrainingJobSummaries": [job.listed() for job in jobs[start : start + size]], **more}

    def _StopTrainingJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job(request, "StopTrainingJob")
        with self._lock:
            if job.status != "InProgress":
                text = f"The request was rejected because the training job is in status {job.status}."
                raise Refusal("ValidationException", text)
            job.stop(stale_lists=self.stale_lists)
        return {}

    def _DeleteTrainingJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job(request)
        if not job.is_over:
            raise Refusal("ValidationException", f"The training job is in status {job.status} and cannot be deleted.")
        with self._lock:
            del self.jobs[job.name]
        return {}

    def _ListTags(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"Tags": [{"Key": key, "Value": value} for key, value in self._by_arn(request).tags.items()]}

    def _AddTags(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = self._by_arn(request)
        job.tags |= {tag["Key"]: tag["Value"] for tag in request["Tags"]}
        return {"Tags": [{"Key": key, "Value": value} for key, value in job.tags.items()]}

    def _arn(self, name: str) -> str:
        return f"arn:aws:sagemaker:{self._region}:{ACCOUNT}:training-job/{name}"

    def _by_arn(self, request: Mapping[str, Any]) -> Job:
        return self._job({"TrainingJobName": request["ResourceArn"].rpartition("/")[2]})

    def _job(self, request: Mapping[str, Any], look: str | None = None) -> Job:
        with self._lock:
            job = self.jobs.get(str(request["TrainingJobName"]))
        if job is None or (look is not None and not self._is_seen(job, look)):
            raise Refusal("ValidationException", "Requested resource not found.")
        return job

    @staticmethod
    def _is_seen(job: Job, look: str) -> bool:
        job.unseen[look] = job.unseen.get(look, 0) - 1
        return job.unseen[look] < 0


def from_wire(body: bytes) -> dict[str, Any]:
    return dict(json.loads(body or b"{}"))


def now_ms() -> int:
    return int(time.time() * 1000)
