"""Transcripts of runs in AppWrappers: what the cluster said at each reading, and the rows that Atoll made of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.executors.appwrapper.reading import Snapshot, wrapper_status
from atoll.kube.appwrapper import components_of
from atoll.kube.kueue import Cause, QueueState
from atoll.status import Reason, ReplicaState, RunStatus
from services.kubernetes.transcripts import as_row, small_event, small_job, small_metadata, small_pod

Object = dict[str, Any]


@dataclass
class WrapperTranscript:
    name: str
    replicas: int
    objects: list[Object] = field(default_factory=list)
    rounds: list[Object] = field(default_factory=list)

    def add(self, status: RunStatus, seen: Snapshot) -> None:
        """One reading of the status; left out if it gave the same rows as the one before."""
        rows = [as_row(replica) for replica in status.replicas]
        if self.rounds and self.rounds[-1]["rows"] == rows:
            return
        self.rounds.append({
            "wrapper": None if seen.wrapper is None else self._number(_wrapper(dict(seen.wrapper))),
            "job": None if seen.job is None else self._number(small_job(dict(seen.job))),
            "pods": [self._number(small_pod(dict(pod))) for pod in seen.pods],
            "events": [self._number(small_event(dict(event))) for event in seen.events],
            "tails": dict(seen.log_tails),
            "queue": None if seen.queue is None else dataclasses.asdict(seen.queue),
            "now": seen.now,
            "rows": rows,
        })  # fmt: skip

    def replayed(self) -> Iterator[tuple[list[Object], list[Object]]]:
        """For each round, the rows that were recorded, and those that the answers give now."""
        for each in self.rounds:
            one = {key: None if each[key] is None else self.objects[each[key]] for key in ("wrapper", "job")}
            many = {key: [self.objects[number] for number in each[key]] for key in ("pods", "events")}
            queue = None if each["queue"] is None else _queue(each["queue"])
            seen = Snapshot(**one, **many, log_tails=each["tails"], queue=queue, now=each["now"])
            yield each["rows"], [as_row(row) for row in wrapper_status(seen, replicas=self.replicas).replicas]

    def text(self, private: dict[str, str]) -> str:
        def lines(things: list[Any]) -> str:
            return "[\n" + ",\n".join(json.dumps(each, sort_keys=True) for each in things) + "\n]"

        parts = {"objects": self.objects, "rounds": self.rounds}
        body = ",\n".join(f"{json.dumps(key)}: {lines(value)}" for key, value in parts.items())
        found = f'{{"name": {json.dumps(self.name)}, "replicas": {self.replicas},\n{body}}}\n'
        for text, word in private.items():
            found = found.replace(text, word)
        return found

    @classmethod
    def load(cls, path: Path) -> WrapperTranscript:
        return cls(**json.loads(path.read_text()))

    def _number(self, thing: Object) -> int:
        if thing not in self.objects:
            self.objects.append(thing)
        return self.objects.index(thing)


def _wrapper(wrapper: Object) -> Object:
    """Without what nobody reads of the objects inside."""
    spec = {key: wrapper["spec"][key] for key in ("suspend", "priority") if key in wrapper["spec"]}
    inside = [
        {"kind": each["kind"], "metadata": {"annotations": each["metadata"].get("annotations", {})}}
        for each in components_of(wrapper)
    ]
    spec["components"] = [{"template": each} for each in inside]
    found = {"apiVersion": wrapper["apiVersion"], "metadata": small_metadata(wrapper), "spec": spec}
    return {**found, "status": wrapper.get("status", {})}


def _queue(found: Object) -> QueueState:
    words = {"cause": Cause(found["cause"]), "state": ReplicaState(found["state"]), "reason": Reason(found["reason"])}
    return QueueState(**{**found, **words})
