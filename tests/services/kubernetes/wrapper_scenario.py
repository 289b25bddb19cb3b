"""A scenario of runs in AppWrappers; see `scenario.py`. Its transcripts have AppWrapper, Job, pods and queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.executors.appwrapper.executor import AppWrapperExecutor
from atoll.runs.run import Run
from atoll.status import RunStatus
from services.kubernetes.fault_proxy import FaultProxy
from services.kubernetes.namespace import Namespace
from services.kubernetes.scenario import Scenario
from services.kubernetes.wrapper_transcripts import WrapperTranscript

Object = dict[str, Any]
FOLDER = Path(__file__).parents[2] / "executors" / "appwrapper" / "transcripts"
QUICK = {
    "admission_s": 10.0,
    "warmup_s": 60.0,
    "failure_grace_s": 5.0,
    "retry_pause_s": 1.0,
    "forceful_deletion_s": 5.0,
    "keep_failed_s": 0.0,
}
"""Short waits of the controller, so that a test does not take minutes."""


class WrapperScenario(Scenario):
    """Runs of the AppWrapper executor in one namespace. `settings` are those of every run."""

    settings: Object
    wrapper_transcripts: dict[str, WrapperTranscript]

    @classmethod
    @contextmanager
    def of(cls, folder: Path, name: str, namespace: Namespace, **settings: Any) -> Iterator[WrapperScenario]:
        with FaultProxy(namespace.cluster.plane, keeps_answers=True) as proxy:
            found = cls(name, namespace, proxy, folder)
            found.settings, found.wrapper_transcripts = settings, {}
            yield found

    def executor(self, **settings: Any) -> AppWrapperExecutor:  # type: ignore[override]
        given = {
            "kubeconfig": str(self.proxy.kubeconfig(self._folder)),
            "namespace": self.namespace.name,
            "image": "busybox",
            "store_is_mounted": True,
            "patience_s": 10.0,
            "stop_s": 60.0,
            **QUICK,
            **self.settings,
        }
        return AppWrapperExecutor(**{**given, **settings})

    def status(self, run: Run) -> RunStatus:
        executor: Any = run.executor
        wrappers = executor._of(run.handle)
        seen = wrappers.look(run.handle.scope.rpartition("/")[2], run.handle.native_id)
        seen = wrappers.explained(seen, run.handle.replicas)
        status: RunStatus = wrappers.status_of(seen, run.handle.replicas)
        transcript = self.wrapper_transcripts.setdefault(run.id, WrapperTranscript(run.id, run.handle.replicas))
        transcript.add(status, seen)
        self._check_ends(run, status)
        return status

    def wrapper(self, run: Run) -> Object:
        return self.namespace.get("appwrappers", run.handle.native_id)

    def annotations(self, run: Run) -> dict[str, str]:
        found: dict[str, str] = self.wrapper(run)["metadata"]["annotations"]
        return found

    def until_phase(self, run: Run, *phases: str, timeout_s: float = 90.0) -> Object:
        """Read the status until the AppWrapper is in one of these phases."""
        deadline = time.monotonic() + timeout_s
        while (found := self.wrapper(run)).get("status", {}).get("phase") not in phases:
            assert time.monotonic() < deadline, found.get("status")
            self.status(run)
            time.sleep(0.1)
        return found

    def check(self) -> None:
        for transcript in self.wrapper_transcripts.values():
            for recorded, found in transcript.replayed():
                assert found == recorded

    def record(self) -> None:
        FOLDER.mkdir(exist_ok=True)
        private = {
            self.namespace.name: "namespace",
            str(self._folder): "/folder",
            self.proxy.url: "https://cluster",
        }
        for name, transcript in self.wrapper_transcripts.items():
            (FOLDER / f"{name}.json").write_text(transcript.text(private))
