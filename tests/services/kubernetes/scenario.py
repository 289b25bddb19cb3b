"""A scenario: runs of the executor in one namespace of the cluster, each reading of their status checked and recorded.

All requests go through a proxy, which keeps the answers. A terminal state that changes fails the test.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.kube.jobs import Jobs
from atoll.kube.kueue import queue_of, queue_state, workload_of
from atoll.kube.pod_state import seconds
from atoll.runs.prepare import prepare
from atoll.runs.run import Run
from atoll.status import Reason, ReplicaState, ReplicaStatus, RunStatus
from services.kubernetes.fault_proxy import Call, FaultProxy
from services.kubernetes.namespace import Namespace
from services.kubernetes.transcripts import FOLDER, LogReading, Transcript, small_answer

Object = dict[str, Any]
ENTRIES = "atoll.testing.contract_jobs"
LIMIT_S = 90.0
HOLD = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"
"""A program that runs until it is told to end, and then ends with code 9."""
_PLACEMENT = {"gpu", "image", "timeout_s", "grace_s", "max_restarts", "env", "secrets", "cpus", "memory_gib"}


class Scenario:
    def __init__(self, name: str, namespace: Namespace, proxy: FaultProxy, folder: Path) -> None:
        self.name, self.namespace, self.proxy, self._folder = name, namespace, proxy, folder
        self.store = (folder / "store").as_uri()
        self.transcripts: dict[str, Transcript] = {}
        self._seen: dict[tuple[str, int], ReplicaState] = {}

    @classmethod
    @contextmanager
    def below(cls, folder: Path, name: str, namespace: Namespace) -> Iterator[Scenario]:
        with FaultProxy(namespace.cluster.plane, keeps_answers=True) as proxy:
            yield cls(name, namespace, proxy, folder)

    # Starting runs.

    def executor(self, **settings: Any) -> KubernetesExecutor:
        given = {
            "kubeconfig": str(self.proxy.kubeconfig(self._folder)),
            "namespace": self.namespace.name,
            "image": "busybox",
            "store_is_mounted": True,
            "patience_s": 10.0,
            "stop_s": 60.0,
        }
        return KubernetesExecutor(**{**given, **settings})

    def program(
        self,
        script: str | list[str],
        replicas: int = 2,
        *,
        run_id: str | None = None,
        store: str | None = None,
        **options: Any,
    ) -> Run:
        """Start a run whose replicas execute a shell script, or a command line."""
        command = tuple(["sh", "-c", script] if isinstance(script, str) else script)
        placement = {key: options.pop(key) for key in _PLACEMENT & options.keys()}
        executor = self.executor(command=command, **options)
        given: Object = {"grace_s": 2.0, **placement, "program": command, "replicas": replicas}
        return prepare("", on=executor, store=store or self.store, run_id=run_id or self.name, **given).submit()

    def entry(self, function: str, replicas: int = 2, *, run_id: str | None = None, **options: Any) -> Run:
        """Start a run of an entry point of the contract suite."""
        placement = {key: options.pop(key) for key in _PLACEMENT & options.keys()}
        given: Object = {"grace_s": 2.0, **placement, "args": options.pop("args", {}), "replicas": replicas}
        executor = self.executor(**{"image": "atoll-test", **options})
        entry = f"{ENTRIES}:{function}"
        return prepare(entry, on=executor, store=self.store, run_id=run_id or self.name, **given).submit()

    # Watching them.

    def status(self, run: Run) -> RunStatus:
        """The status that the executor reads, recorded together with what the cluster answered."""
        first = len(self.proxy.calls)
        status = run.executor.status(run.handle)
        calls = self.proxy.calls[first:]
        job = _body(calls, r".*/jobs/[^/]+")
        pods = _items(calls, r".*/pods")
        # Executors keep events and positions for a while, so those of this one may be older than the last answer.
        _, events = _jobs(run)._events.get((job or {}).get("metadata", {}).get("uid", ""), (0.0, []))
        is_waiting = any(r.state is ReplicaState.PENDING for r in status.replicas)
        tails = {call.path.split("/")[-2]: call.answer.decode() for call in calls if call.path.endswith("/log")}
        transcript = self.transcripts.setdefault(run.id, Transcript(run.id, run.handle.replicas))
        queue, evictions = self._queue(run, job, calls)
        transcript.add(status, job, pods, events if is_waiting else [], tails, queue, evictions)
        self._check_ends(run, status)
        return status

    def _queue(self, run: Run, job: Object | None, calls: list[Call]) -> tuple[Object | None, int]:
        """What Kueue has said about a suspended Job, and how often it has stopped one that runs."""
        if job is None or not queue_of(job):
            return None, 0
        if not job["spec"].get("suspend"):
            if asked := _items(calls, r".*/workloads"):
                return None, queue_state(asked[-1], queue=queue_of(job)).evictions
            return None, _jobs(run).queues.evictions(job, may_ask=False)
        created = seconds(job["metadata"]["creationTimestamp"]) or 0.0
        workloads = {each["metadata"]["uid"]: each for each in _items(self.proxy.calls, r".*/workloads")}
        wanted = [each for each in workloads.values() if _is_about(each, self._uids(job, workloads.values()))]
        _, pending = _jobs(run).queues._positions.get((self.namespace.name, queue_of(job)), (0.0, ()))
        return {"workloads": wanted, "pending": list(pending), "waited_s": time.time() - created}, 0

    @staticmethod
    def _uids(job: Object, workloads: Iterable[Object]) -> set[str]:
        """Those of a Job and of the one that Kueue stopped it for."""
        own = workload_of(workloads, job["metadata"]["uid"])
        preemptor = queue_state(own, queue=queue_of(job)).preemptor_uid
        return {job["metadata"]["uid"], *([preemptor] if preemptor else [])}

    def until(self, run: Run, is_so: Callable[[RunStatus], bool], *, timeout_s: float = LIMIT_S) -> RunStatus:
        """Read the status until it is so."""
        deadline = time.monotonic() + timeout_s
        while not is_so(status := self.status(run)):
            assert time.monotonic() < deadline, "\n".join(map(str, status.replicas))
            time.sleep(0.1)
        return status

    def ended(self, run: Run) -> RunStatus:
        """The status after the end of every rank."""
        return self.until(run, lambda status: status.is_terminal)

    def running(self, run: Run) -> RunStatus:
        """The status when every rank runs and its program has printed something."""
        status = self.until(run, lambda found: {r.state for r in found.replicas} == {ReplicaState.RUNNING})
        for row in status.replicas:  # not every pod of the Job: one of an earlier attempt may be on its way out
            path = f"{self.namespace.path('pods', str(row.native_id))}/log"
            assert next(self.namespace.api.lines(path, follow="true"))
        return status

    def with_reason(self, run: Run, reason: Reason, rank: int = 0) -> ReplicaStatus:
        """The row of a rank when it has this reason."""
        return self.until(run, lambda status: status.replicas[rank].reason is reason).replicas[rank]

    def logs(self, run: Run, rank: int, **options: Any) -> list[str]:
        """Every line of a rank, recorded together with the answers that they came from."""
        first = len(self.proxy.calls)
        lines = list(run.executor.logs(run.handle, rank, **options))
        calls = [call for call in self.proxy.calls[first:] if not call.path.endswith("/events")]
        answers = [
            {"method": call.method, "path": call.path, "status": call.status,
             "text": small_answer(call.path, call.answer.decode())}
            for call in calls
        ]  # fmt: skip
        transcript = self.transcripts.setdefault(run.id, Transcript(run.id, run.handle.replicas))
        transcript.logs.append(LogReading(rank, options, answers, lines))
        return lines

    def job(self, run: Run) -> Object:
        return self.namespace.get("jobs", run.handle.native_id)

    def pod(self, run: Run, rank: int = 0) -> str:
        """The name of the only pod of a rank."""
        status = self.status(run)
        assert status.replicas[rank].native_id is not None
        return str(status.replicas[rank].native_id)

    def _check_ends(self, run: Run, status: RunStatus) -> None:
        for row in status.replicas:
            before = self._seen.get((run.id, row.rank))
            is_kept = before is None or not before.is_terminal or before is row.state
            assert is_kept or row.state is ReplicaState.LOST, f"rank {row.rank} was {before} and is {row}"
            self._seen[run.id, row.rank] = row.state

    # Recording.

    def check(self) -> None:
        """What was recorded gives the same rows without the cluster."""
        for transcript in self.transcripts.values():
            for number, (recorded, found) in enumerate(transcript.replayed()):
                seen = json.dumps(transcript.rounds[number])
                assert found == recorded, f"\nfound    {found}\nrecorded {recorded}\nin round {number}: {seen}"

    def record(self) -> None:
        FOLDER.mkdir(exist_ok=True)
        private = {
            self.namespace.name: "namespace",
            str(self._folder): "/folder",
            self.proxy.url: "https://cluster",
            sys.prefix: "/usr",
            sys.base_prefix: "/usr",
        }
        for name, transcript in self.transcripts.items():
            (FOLDER / f"{name}.json").write_text(transcript.text(private))


def rows(status: RunStatus) -> list[tuple[ReplicaState, Reason, int | None, int]]:
    """State, reason, exit code and attempt of each rank."""
    return [(row.state, row.reason, row.exit_code, row.attempt) for row in status.replicas]


def _is_about(workload: Object, uids: set[str]) -> bool:
    return any(workload_of([workload], uid) is not None for uid in uids)


def _jobs(run: Run) -> Jobs:
    jobs: Jobs = run.executor._of(run.handle)  # type: ignore[attr-defined]
    return jobs


def _of(calls: list[Call], path: str) -> list[Call]:
    return [call for call in calls if call.method == "GET" and call.status == 200 and re.fullmatch(path, call.path)]


def _body(calls: list[Call], path: str) -> Object | None:
    found = _of(calls, path)
    body: Object | None = json.loads(found[-1].answer) if found else None
    return body


def _items(calls: list[Call], path: str) -> list[Object]:
    return [item for call in _of(calls, path) for item in json.loads(call.answer)["items"] or []]
