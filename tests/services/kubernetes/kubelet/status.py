"""The status of a pod as the API server is told it. Values only; `pods.py` sends them."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


def now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class ContainerStatus:
    """One container: what it does now, and what it did before its last restart."""

    name: str
    image: str
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Object = field(default_factory=dict)
    restarts: int = 0
    container_id: str = ""

    @property
    def exit_code(self) -> int | None:
        """None until it has ended."""
        return self.state["terminated"]["exitCode"] if "terminated" in self.state else None

    @property
    def is_running(self) -> bool:
        return "running" in self.state

    def wait(self, reason: str, message: str = "") -> None:
        self.state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}

    def run(self, container_id: str) -> None:
        self.container_id = container_id
        self.state = {"running": {"startedAt": now()}}

    def end(self, code: int, reason: str, *, message: str = "", started: str | None = None) -> None:
        began = started or self.state.get("running", {}).get("startedAt") or now()
        ended = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}
        if self.container_id:
            ended["containerID"] = self.container_id
        self.state = {"terminated": {**ended, **({"message": message} if message else {})}}

    def restart(self) -> None:
        self.last_state, self.restarts = self.state, self.restarts + 1

    def to_object(self, *, is_init: bool = False) -> Object:
        is_ready = self.exit_code == 0 if is_init else self.is_running
        return {
            "name": self.name,
            "image": self.image,
            "imageID": f"test://{self.image}" if self.container_id else "",
            "containerID": self.container_id,
            "ready": is_ready,
            "started": self.is_running,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last_state,
        }


@dataclass
class PodStatus:
    """The whole status. `to_object` keeps the time of each condition that has not changed."""

    init: list[ContainerStatus]
    containers: list[ContainerStatus]
    host_ip: str
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    pod_ip: str = ""
    start_time: str = field(default_factory=now)
    _conditions: dict[str, Object] = field(default_factory=dict)

    @property
    def is_terminal(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    def finish(self) -> None:
        """Take the terminal phase that the exit codes give."""
        codes = [container.exit_code for container in [*self.init, *self.containers]]
        self.phase = "Succeeded" if all(code == 0 for code in codes) else "Failed"

    def give_up_containers(self) -> None:
        """What a pod says of its containers that never ran, when it is removed."""
        for container in [*self.init, *self.containers]:
            if container.exit_code is None:
                message = "The container could not be located when the pod was terminated"
                container.end(137, "ContainerStatusUnknown", message=message)

    def to_object(self) -> Object:
        found: Object = {
            "phase": self.phase,
            "hostIP": self.host_ip,
            "hostIPs": [{"ip": self.host_ip}],
            "startTime": self.start_time,
            "conditions": self._new_conditions(),
            "containerStatuses": [container.to_object() for container in self.containers],
        }
        if self.init:
            found["initContainerStatuses"] = [container.to_object(is_init=True) for container in self.init]
        if self.pod_ip:
            found |= {"podIP": self.pod_ip, "podIPs": [{"ip": self.pod_ip}]}
        if self.reason:
            found |= {"reason": self.reason, "message": self.message}
        return found

    def _new_conditions(self) -> list[Object]:
        is_initialized = all(container.exit_code == 0 for container in self.init)
        unready = [container.name for container in self.containers if not container.is_running]
        if self.is_terminal:
            why = {"reason": "PodCompleted" if self.phase == "Succeeded" else "PodFailed"}
        else:
            why = {"reason": "ContainersNotReady", "message": f"containers with unready status: {unready}"}
        not_initialized = {"reason": "ContainersNotInitialized"}
        wanted = [
            ("PodReadyToStartContainers", bool(self.pod_ip) and not self.is_terminal, {}),
            ("Initialized", is_initialized, {} if is_initialized else not_initialized),
            ("ContainersReady", not unready, why if unready else {}),
            ("Ready", not unready, why if unready else {}),
        ]
        for kind, is_true, more in wanted:
            before = self._conditions.get(kind, {})
            truth = "True" if is_true else "False"
            since = before["lastTransitionTime"] if before.get("status") == truth else now()
            empty = {"reason": None, "message": None}
            self._conditions[kind] = {"type": kind, "status": truth, "lastTransitionTime": since, **empty, **more}
        return list(self._conditions.values())
