"""One training job: its container is a process of this machine and whatever that starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Protocol

from atoll.testing.bench import processes_with

_TICK_S = 0.01
_MARK = "PEER_CONTAINER"
ROLE_KEY = "role-key"
OVER = ("Completed", "Failed", "Stopped")


class Sink(Protocol):
    """Where output goes."""

    def open(self, stream: str) -> None: ...
    def write(self, stream: str, line: str) -> None: ...


@dataclass(frozen=True)
class Tempo:
    """How long things take."""

    step_s: float = 0.0
    """Each of the states on the way."""
    stop_grace_s: float = 120.0


class Job:
    """InProgress (Starting, Downloading, Training, Uploading), then Completed, Failed or Stopped."""

    def __init__(self, request: Mapping[str, Any], arn: str, sink: Sink, tempo: Tempo) -> None:
        self.request, self.name, self.arn = request, str(request["TrainingJobName"]), arn
        self.tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags", [])}
        self._sink, self._tempo = sink, tempo
        self.status, self.secondary = "InProgress", "Starting"
        self.created_at = time.time()
        self._transitions: list[dict[str, Any]] = []
        self.failure: str | None = None
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._billed_s = 0.0
        self._stop, self._killed, self._interrupted = Event(), Event(), Event()
        self.process: subprocess.Popen[bytes] | None = None
        self.unseen: dict[str, int] = {}
        """Operation -> how many more calls do not see the job."""
        self._stale: dict[str, Any] = {}
        self._stale_lists = 0

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    def stop(self, *, stale_lists: int = 0) -> None:
        """Request the end. The next `stale_lists` lists show the job as it is now."""
        self._stale, self._stale_lists = self.summary(), stale_lists
        self.status = "Stopping"
        self._stop.set()

    def kill(self) -> None:
        """End it now, with the peer."""
        self._killed.set()
        self._stop.set()

    def interrupt(self) -> None:
        """Take the spot machine away; the job goes on with another."""
        self._interrupted.set()

    def summary(self) -> dict[str, Any]:
        known = {
            "TrainingJobName": self.name,
            "TrainingJobArn": self.arn,
            "CreationTime": self.created_at,
            "TrainingEndTime": self._ended_at,
            "LastModifiedTime": self._ended_at or self.created_at,
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary,
        }
        return {name: value for name, value in known.items() if value is not None}

    def listed(self) -> dict[str, Any]:
        """The summary that a list shows."""
        self._stale_lists -= 1
        return self._stale if self._stale_lists >= 0 else self.summary()

    def describe(self) -> dict[str, Any]:
        known = {
            **{name: value for name, value in self.request.items() if name != "Tags"},
            **self.summary(),
            "SecondaryStatusTransitions": list(self._transitions),
            "FailureReason": self.failure,
            "ModelArtifacts": self._artifacts() if self.status == "Completed" else None,
            "TrainingStartTime": self._started_at,
            "TrainingTimeInSeconds": int(self._billed_s) if self.is_over else None,
            "BillableTimeInSeconds": int(self._billed_s) + 1 if self.is_over and self._started_at else None,
        }
        return {name: value for name, value in known.items() if value is not None}

    def _artifacts(self) -> dict[str, str]:
        folder = self.request["OutputDataConfig"]["S3OutputPath"].rstrip("/")
        return {"S3ModelArtifacts": f"{folder}/{self.name}/output/model.tar.gz"}

    # ── its life ────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, admits: Event) -> None:
        """The body of a thread."""
        self._enter("Starting")
        while not admits.wait(_TICK_S):
            if self._stop.is_set():
                break
        status, secondary = "Stopped", "Stopped"
        if self._walk("Downloading"):
            status, secondary = self._train()
        if status == "Completed":
            self._walk("Uploading")
        self._ended_at = time.time()
        self._enter(secondary)
        self.status, self.secondary = status, secondary

    def _train(self) -> tuple[str, str]:
        limit_at = time.monotonic() + float(self.request["StoppingCondition"]["MaxRuntimeInSeconds"])
        while True:
            self._enter("Training")
            began = time.monotonic()
            self._started_at = self._started_at or time.time()
            asked, code = self._contain(limit_at)
            self._billed_s += time.monotonic() - began
            if asked == "Interrupted":
                self._interrupted.clear()
                self._enter("Interrupted")
                if self._walk("Restarting"):
                    continue
                return "Stopped", "Stopped"
            if asked:
                return "Stopped", asked
            if code == 0:
                return "Completed", "Completed"
            self.failure = f"AlgorithmError: , exit code: {code}"
            return "Failed", "Failed"

    def _contain(self, limit_at: float) -> tuple[str, int]:
        """Run the container once: why it was asked to end, if it was, and its exit code."""
        mark = uuid.uuid4().hex
        scratch = tempfile.mkdtemp(prefix="peer-")
        stream = f"{self.name}/algo-1-{time.time_ns() // 1000}"
        self._sink.open(stream)
        process = self.process = self._start(mark, scratch)
        reader = Thread(target=self._ship, args=(process, stream), daemon=True)
        reader.start()
        asked, kill_at = "", float("inf")
        while process.poll() is None:
            now = time.monotonic()
            if not asked and (asked := self._wish(now >= limit_at)):
                process.send_signal(signal.SIGTERM)
                kill_at = now + self._tempo.stop_grace_s
            if now >= kill_at or self._killed.is_set():
                process.kill()
            time.sleep(_TICK_S)
        _clear(mark)
        reader.join()
        shutil.rmtree(scratch, ignore_errors=True)
        code = process.returncode
        return asked, code if code >= 0 else 128 - code

    def _wish(self, is_late: bool) -> str:
        if self._stop.is_set():
            return "Stopped"
        if is_late:
            self.status = "Stopping"
            return "MaxRuntimeExceeded"
        return "Interrupted" if self._interrupted.is_set() else ""

    def _start(self, mark: str, scratch: str) -> subprocess.Popen[bytes]:
        algorithm = self.request["AlgorithmSpecification"]
        words = [*algorithm.get("ContainerEntrypoint", ["python"]), *algorithm.get("ContainerArguments", [])]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "REPLICA_"))}
        own = {"TRAINING_JOB_NAME": self.name, "TRAINING_JOB_ARN": self.arn, _MARK: mark, "TMPDIR": scratch}
        own["AWS_ACCESS_KEY_ID"] = ROLE_KEY  # the role's credentials, not the launcher's
        return subprocess.Popen(
            [sys.executable if word == "python" else word for word in words],
            env={**clean, **self.request.get("Environment", {}), **own},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _ship(self, process: subprocess.Popen[bytes], stream: str) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                # CloudWatch takes no empty message, so an empty line goes with its line end.
                self._sink.write(stream, line.decode("utf-8", "replace").removesuffix("\n") or "\n")

    def _walk(self, secondary: str) -> bool:
        """One state on the way; False if the job was stopped by then."""
        self._enter(secondary)
        return not self._stop.wait(self._tempo.step_s)

    def _enter(self, secondary: str) -> None:
        now = time.time()
        if self._transitions:
            self._transitions[-1]["EndTime"] = now
        self._transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": secondary})
        self.secondary = secondary


def _clear(mark: str) -> None:
    """A container ends with its first process: whatever else it started goes now."""
    while left := processes_with({_MARK: mark}):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.001)
