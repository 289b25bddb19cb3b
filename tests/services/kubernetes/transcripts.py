"""Transcripts: what a real control plane answered while a run was watched, and the rows that Atoll made of it.

A scenario test records one with `pytest --record`; the tests without a cluster read it again. Each object is kept once;
rounds refer to it by its number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atoll.kube.kueue import QueueState, queue_of, queue_state, with_position, with_preemptor, workload_of
from atoll.kube.reading import run_status
from atoll.status import RunStatus

Object = dict[str, Any]
FOLDER = Path(__file__).parents[2] / "executors" / "kubernetes" / "transcripts"
_METADATA = ("name", "namespace", "uid", "labels", "annotations", "creationTimestamp", "deletionTimestamp",
             "deletionGracePeriodSeconds", "finalizers")  # fmt: skip
_POD_SPEC = ("nodeName", "restartPolicy", "priority", "schedulingGates", "terminationGracePeriodSeconds")
_EVENT = ("involvedObject", "reason", "message", "type", "count", "firstTimestamp", "lastTimestamp", "eventTime",
          "series")  # fmt: skip


@dataclass
class LogReading:
    """One call of `logs`: every answer that it got, in order, and the lines that came out."""

    rank: int
    options: Object
    answers: list[Object]
    lines: list[str]


@dataclass
class Transcript:
    name: str
    replicas: int
    objects: list[Object] = field(default_factory=list)
    rounds: list[Object] = field(default_factory=list)
    logs: list[LogReading] = field(default_factory=list)

    def add(
        self,
        status: RunStatus,
        job: Object | None,
        pods: list[Object],
        events: list[Object],
        tails: dict[str, str],
        queue: Object | None = None,
        evictions: int = 0,
    ) -> None:
        """One reading of the status; left out if it gave the same rows as the one before."""
        rows = [as_row(replica) for replica in status.replicas]
        if self.rounds and self.rounds[-1]["rows"] == rows:
            return
        self.rounds.append({
            "job": None if job is None else self._number(small_job(job)),
            "pods": [self._number(small_pod(pod)) for pod in pods],
            "events": [self._number(small_event(event)) for event in events],
            "tails": tails,
            "rows": rows,
            **({} if queue is None else {"queue": {**queue, "workloads": [self._number(small_workload(each))
                                                                          for each in queue["workloads"]]}}),
            **({"evictions": evictions} if evictions else {}),
        })  # fmt: skip

    def replayed(self) -> Iterator[tuple[list[Object], list[Object]]]:
        """For each round, the rows that were recorded, and those that the answers give now."""
        for each in self.rounds:
            job = None if each["job"] is None else self.objects[each["job"]]
            status = run_status(
                job,
                [self.objects[number] for number in each["pods"]],
                replicas=self.replicas,
                events=[self.objects[number] for number in each["events"]],
                log_tails=each["tails"],
                queue=self._queue(each.get("queue"), job),
                evictions=each.get("evictions", 0),
            )
            yield each["rows"], [as_row(replica) for replica in status.replicas]

    def _queue(self, found: Object | None, job: Object | None) -> QueueState | None:
        """What Kueue said in a round."""
        if found is None or job is None:
            return None
        workloads = [self.objects[number] for number in found["workloads"]]
        workload = workload_of(workloads, job["metadata"]["uid"])
        state = queue_state(workload, queue=queue_of(job), waited_s=found["waited_s"])
        state = with_position(state, workload, found["pending"])
        uid = state.preemptor_uid
        return state if uid is None else with_preemptor(state, workload_of(workloads, uid))

    def text(self, private: dict[str, str]) -> str:
        """As JSON, one object in each line, with `private` texts of this machine replaced."""

        def lines(things: list[Any]) -> str:
            return "[\n" + ",\n".join(json.dumps(each, sort_keys=True) for each in things) + "\n]"

        parts = {"objects": self.objects, "rounds": self.rounds, "logs": [vars(each) for each in self.logs]}
        body = ",\n".join(f"{json.dumps(key)}: {lines(value)}" for key, value in parts.items())
        found = f'{{"name": {json.dumps(self.name)}, "replicas": {self.replicas},\n{body}}}\n'
        for text, word in private.items():
            found = found.replace(text, word)
        return found

    @classmethod
    def load(cls, path: Path) -> Transcript:
        found = json.loads(path.read_text())
        return cls(**{**found, "logs": [LogReading(**each) for each in found["logs"]]})

    def _number(self, thing: Object) -> int:
        if thing not in self.objects:
            self.objects.append(thing)
        return self.objects.index(thing)


class Answers:
    """Stands in for the official client: gives recorded answers, those of each path in their order."""

    def __init__(self, answers: list[Object]) -> None:
        self._left = [*answers]
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and body of each request so far."""
        self.configuration = self
        self.rest_client = self
        self.pool_manager = self
        self.host = "https://cluster"

    def auth_settings(self) -> Object:
        return {}

    def request(self, method: str, url: str, *, body: bytes | None = None, **_: Any) -> _Response:
        """The next recorded answer for this path. The last one holds for every further request."""
        path = urlsplit(url).path
        self.asked.append((method, path, (body or b"").decode()))
        found = [each for each in self._left if (each["method"], each["path"]) == (method, path)]
        assert found, f"the transcript has no answer to {method} {path}"
        if len(found) > 1:
            self._left.remove(found[0])
        return _Response(found[0])


class _Response:
    """As much of urllib3's response as Atoll reads."""

    def __init__(self, answer: Object) -> None:
        self.status, self.headers = answer["status"], dict[str, str]()
        self._text = answer["text"].encode()

    def read(self) -> bytes:
        return self.read1()

    def read1(self, _: int = 0) -> bytes:
        found, self._text = self._text, b""
        return found

    def close(self) -> None: ...

    def release_conn(self) -> None: ...


def small_answer(path: str, text: str) -> str:
    """The answer to a request that is not one for a log, without what nobody reads."""
    if path.endswith("/log") or not text.startswith("{"):
        return text
    found = json.loads(text)
    if found.get("kind") == "Job":
        return json.dumps(small_job(found))
    kinds = {"PodList": small_pod, "EventList": small_event}
    if found.get("kind") in kinds:
        found["items"] = [kinds[found["kind"]](item) for item in found["items"] or []]
    return json.dumps(found)


def as_row(replica: Any) -> Object:
    row: Object = json.loads(json.dumps(replica.to_json()))
    return {key: value for key, value in row.items() if key not in ("progress", "warnings", "backend")}


def small_metadata(thing: Object) -> Object:
    return {key: thing["metadata"][key] for key in _METADATA if key in thing["metadata"]}


def small_job(job: Object) -> Object:
    spec = {key: value for key, value in job["spec"].items() if key not in ("template", "selector")}
    return {"metadata": small_metadata(job), "spec": spec, "status": job.get("status", {})}


def small_pod(pod: Object) -> Object:
    containers = [{key: one[key] for key in ("name", "image", "terminationMessagePolicy") if key in one}
                  for one in pod["spec"]["containers"]]  # fmt: skip
    spec = {key: pod["spec"][key] for key in _POD_SPEC if key in pod["spec"]}
    return {
        "metadata": small_metadata(pod),
        "spec": {**spec, "containers": containers},
        "status": pod.get("status", {}),
    }


def small_workload(workload: Object) -> Object:
    metadata = {**small_metadata(workload), "ownerReferences": workload["metadata"].get("ownerReferences", [])}
    spec = {key: value for key, value in workload["spec"].items() if key != "podSets"}
    return {"metadata": metadata, "spec": spec, "status": workload.get("status", {})}


def small_event(event: Object) -> Object:
    return {"metadata": small_metadata(event), **{key: event[key] for key in _EVENT if event.get(key) is not None}}
