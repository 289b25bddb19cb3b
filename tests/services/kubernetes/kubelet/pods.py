"""The life of one pod on a node: a thread that starts its containers, tells the API server, and ends them.

The thread waits on one queue, through which changes of the pod and ends of processes come. A pod that is
removed or exceeds its deadline interrupts whatever the thread waits for, by an exception.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import signal
import time
import uuid
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from services.kubernetes.api import STRATEGIC_MERGE, ApiError
from services.kubernetes.kubelet.environment import ConfigError, command_line, expand, variables
from services.kubernetes.kubelet.images import full_name
from services.kubernetes.kubelet.logs import Log
from services.kubernetes.kubelet.process import CannotStart, Process
from services.kubernetes.kubelet.status import ContainerStatus, PodStatus
from services.kubernetes.kubelet.volumes import Volumes, substituted

if TYPE_CHECKING:
    from services.kubernetes.kubelet.node import Node

Object = dict[str, Any]
GPU = "nvidia.com/gpu"
_RETRY_S = 1.0
"""After how long a missing image or Secret is looked for again. A real kubelet takes longer and longer."""
_RESTART_S = (0.0, 1.0, 2.0, 4.0)


class _Removed(Exception):
    """The pod has a deletion time, or the kubelet ends it: its containers have `grace_s` to end."""

    def __init__(self, grace_s: float, reason: str = "", message: str = "") -> None:
        self.grace_s, self.reason, self.message = grace_s, reason, message


class _Vanished(Exception):
    """The API server does not have the pod any more."""


class _Waiting(Exception):
    """A container cannot be created yet."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason, self.message = reason, message


class Container:
    """A container of a pod, its process if it runs, and the logs of its starts."""

    def __init__(self, spec: Object) -> None:
        self.spec = spec
        self.status = ContainerStatus(spec["name"], spec["image"])
        self.process: Process | None = None
        self.logs: list[Log] = []
        self.is_out_of_memory = False
        self.restart_at: float | None = None


class Pod(Thread):
    def __init__(self, node: Node, pod: Object) -> None:
        super().__init__(name=f"pod {pod['metadata']['name']}", daemon=True)
        self.node, self.object = node, pod
        self.metadata: Object = pod["metadata"]
        self.spec: Object = pod["spec"]
        self.path = f"/api/v1/namespaces/{self.metadata['namespace']}/pods/{self.metadata['name']}"
        self.folder = node.folder / self.metadata["uid"]
        self.init = [Container(spec) for spec in self.spec.get("initContainers", [])]
        self.containers = [Container(spec) for spec in self.spec["containers"]]
        statuses = [[container.status for container in group] for group in (self.init, self.containers)]
        self.status = PodStatus(statuses[0], statuses[1], node.address)
        self.is_over = False
        self._inbox: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._is_being_removed = False
        self._deadline: float | None = None
        self._gpus: list[int] = []
        self._volumes = Volumes(pod, self.folder, self._get, self._token)
        self._hosts = self.folder / "hosts"

    # What other threads call.

    def change(self, pod: Object) -> None:
        self._inbox.put(("changed", pod))

    def vanish(self) -> None:
        self._inbox.put(("vanished", None))

    def send_signal(self, number: int, *, is_out_of_memory: bool = False) -> None:
        """To the first process of each container that runs."""
        for container in self.containers:
            if container.process is not None and container.status.is_running:
                container.is_out_of_memory = is_out_of_memory
                container.process.send(number)

    def container(self, name: str) -> Container | None:
        return next((one for one in [*self.init, *self.containers] if one.spec["name"] == name), None)

    # The thread.

    def run(self) -> None:
        try:
            self._live()
        except _Vanished:
            self._end_containers(0)
        finally:
            self.node.free_gpus(self._gpus)
            self.node.names.remove(self._hosts)
            self.is_over = True

    def forget(self) -> None:
        """Remove the pod's files; its logs are gone then."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _live(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._see(self.object)
            self._start_pod()
            if all(self._succeeds(container) for container in self.init):
                self._run_containers()
        except _Removed as end:
            self._is_being_removed = True
            self._end_containers(end.grace_s)
            self.status.give_up_containers()
            self.status.reason, self.status.message = end.reason, end.message
        self.status.finish()
        if self.status.reason:
            self.status.phase = "Failed"
        self._send()
        if self.object["metadata"].get("deletionTimestamp"):
            self.node.delete(self.object)

    def _start_pod(self) -> None:
        self._deadline = time.monotonic() + self.spec.get("activeDeadlineSeconds", float("inf"))
        if self.init:
            for container in self.containers:
                container.status.wait("PodInitializing")
        began = time.monotonic()
        while fault := self.node.faults.find("slow-start", self.object):
            self._send()
            left_s = began + fault.seconds - time.monotonic()
            if left_s <= 0:
                break
            self._pause(min(left_s, 0.1))  # the fault may be removed
        wanted = sum(int(one.spec.get("resources", {}).get("limits", {}).get(GPU, 0)) for one in self.containers)
        self._gpus = self.node.take_gpus(wanted)
        self._mount()
        self.status.pod_ip = self.node.new_pod_ip()
        self.object["status"] = {**self.object.get("status", {}), "podIP": self.status.pod_ip,
                                 "hostIP": self.node.address}  # fmt: skip
        if self._has_names():
            self.node.names.add(self._hosts, self.object, self.status.pod_ip)
        self._send()

    def _mount(self) -> None:
        """A kubelet mounts the volumes before it makes the sandbox with the address of the pod."""
        while True:
            try:
                self._volumes.write()
                return
            except ConfigError as exc:
                self.node.event(self.object, "FailedMount", str(exc))
                self._send()
                self._pause(_RETRY_S)

    def _succeeds(self, container: Container) -> bool:
        """Run an init container, and restart it as the pod says; whether it succeeds in the end."""
        while True:
            self._start(container)
            self._send()
            while container.status.exit_code is None:
                self._take(None)
            if container.status.exit_code == 0 or self.spec.get("restartPolicy") == "Never":
                return container.status.exit_code == 0
            self._back_off(container)
            self._send()
            self._pause(max(0.0, (container.restart_at or 0) - time.monotonic()))

    def _run_containers(self) -> None:
        for container in self.containers:
            self._start(container)
        self.status.phase = "Running"
        self._send()
        while True:
            if self._restart_ended() or any(one.restart_at for one in self.containers):
                self._send()
            elif all(one.status.exit_code is not None for one in self.containers):
                return
            waiting = [one.restart_at for one in self.containers if one.restart_at]
            self._take(max(0.0, min(waiting) - time.monotonic()) if waiting else None)

    def _restart_ended(self) -> bool:
        """Look after the containers that have ended; whether something has changed."""
        has_changed = False
        for container in self.containers:
            if container.restart_at and container.restart_at <= time.monotonic():
                self._start(container)
                has_changed = True
            elif container.status.exit_code is not None and not container.restart_at and self._restarts(container):
                self._back_off(container)
                has_changed = True
        return has_changed

    def _restarts(self, container: Container) -> bool:
        policy = self.spec.get("restartPolicy", "Always")
        return policy == "Always" or (policy == "OnFailure" and container.status.exit_code != 0)

    def _back_off(self, container: Container) -> None:
        status = container.status
        pause = _RESTART_S[min(status.restarts, len(_RESTART_S) - 1)]
        status.restart()
        status.wait("CrashLoopBackOff", f"back-off {pause:g}s restarting failed container={status.name}")
        container.restart_at = time.monotonic() + pause

    # One container.

    def _start(self, container: Container) -> None:
        """Wait until the container can be created, and create it."""
        container.restart_at = None
        has_failed = False
        while True:
            try:
                self._create(container, has_failed)
                return
            except _Waiting as problem:
                container.status.wait(problem.reason, problem.message)
                if not has_failed or problem.reason == "ImagePullBackOff":
                    self.node.event(self.object, "Failed", problem.message)
                self._send()
                has_failed = True
                self._pause(_RETRY_S)

    def _create(self, container: Container, has_failed: bool) -> None:
        image = self._pulled(container.spec, has_failed)
        security = {**self.spec.get("securityContext", {}), **container.spec.get("securityContext", {})}
        if security.get("runAsNonRoot") and not security.get("runAsUser", image.user):
            raise _Waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")
        try:
            env = variables(self.object, container.spec, {**self._base_environment(), **image.environment()}, self._get)
            command = command_line(container.spec, image.command, env)
        except ConfigError as exc:
            raise _Waiting("CreateContainerConfigError", str(exc)) from exc
        identity = uuid.uuid4().hex
        mounts = self._volumes.mounts(container.spec)
        if not self.node.can_mount:
            env = {name: substituted(value, mounts) for name, value in env.items()}
            command, mounts = [substituted(word, mounts) for word in command], []
        hostname = ""
        if self._has_names():
            hostname, mounts = env["HOSTNAME"], [*mounts, (str(self._hosts), "/etc/hosts", False)]
        number = container.status.restarts
        log = Log(self.folder / f"{container.spec['name']}-{number}.log")
        container.logs.append(log)
        place = self.folder / f"{container.spec['name']}-files"
        place.mkdir(exist_ok=True)
        folder = Path(expand(container.spec.get("workingDir") or str(place), env))
        try:
            container.process = Process(
                command, env, f"{self.node.kubelet}/{identity}", log, self.node.watcher,
                lambda code: self._inbox.put(("ended", (container, number, code))), folder=folder, mounts=mounts,
                hostname=hostname,
            )  # fmt: skip
        except CannotStart as exc:
            container.status.end(128, "StartError", message=f"failed to start container: {exc}",
                                 started="1970-01-01T00:00:00Z")  # fmt: skip
        else:
            container.status.run(f"test://{identity}")

    def _has_names(self) -> bool:
        """Whether the pod has a host name of its own and knows those of others: only a Service publishes some."""
        return bool(self.spec.get("subdomain")) and self.node.can_mount

    def _pulled(self, spec: Object, has_failed: bool) -> Any:
        """The image. A second failure in a row has the name that a real kubelet gives it."""
        name = full_name(spec["image"])
        image = self.node.images.get(name)
        if self.node.faults.find("image", self.object, spec["image"]):
            image = None
        if image is not None and image.is_private and not self._has_pull_secret():
            image = None
        if image is not None:
            return image
        if spec.get("imagePullPolicy") == "Never":
            raise _Waiting("ErrImageNeverPull", f'Container image "{name}" is not present with pull policy of Never')
        if has_failed:
            raise _Waiting("ImagePullBackOff", f'Back-off pulling image "{name}"')
        raise _Waiting("ErrImagePull", f'failed to pull and unpack image "{name}": not found')

    def _has_pull_secret(self) -> bool:
        return any(self._get("secrets", one["name"]) for one in self.spec.get("imagePullSecrets", []))

    def _base_environment(self) -> dict[str, str]:
        host, port = self.node.api.server.removeprefix("https://").rsplit(":", 1)
        found = {
            "HOME": str(self.folder),
            "HOSTNAME": self.spec.get("hostname") or self.metadata["name"],
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
        }
        if self._gpus:
            devices = ",".join(map(str, self._gpus))
            found |= {"CUDA_VISIBLE_DEVICES": devices, "NVIDIA_VISIBLE_DEVICES": devices}
        return found

    # Waiting.

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._take(left)

    def _take(self, timeout_s: float | None) -> None:
        """Deal with one thing that happened; returns after the time-out if nothing did."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        if self._deadline is not None and not self._is_being_removed:
            limit = min(limit if limit is not None else float("inf"), self._deadline)
        try:
            wait = None if limit in (None, float("inf")) else max(0.0, limit - time.monotonic())
            kind, value = self._inbox.get(timeout=wait)
        except queue.Empty:
            if self._deadline is not None and time.monotonic() >= self._deadline and not self._is_being_removed:
                grace = self.spec.get("terminationGracePeriodSeconds", 30)
                message = "Pod was active on the node longer than the specified deadline"
                raise _Removed(grace, "DeadlineExceeded", message) from None
            return
        if kind == "changed":
            self._see(value)
        elif kind == "vanished":
            raise _Vanished
        else:
            self._ended(*value)

    def _see(self, pod: Object) -> None:
        self.object = {**pod, "status": self.object.get("status", {})}
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp") and not self._is_being_removed:
            raise _Removed(metadata.get("deletionGracePeriodSeconds", 30))

    def _ended(self, container: Container, number: int, code: int) -> None:
        if number != container.status.restarts or container.status.exit_code is not None:
            return
        container.logs[-1].wait_until_closed(2)
        reason = "Completed" if code == 0 else "Error"
        if container.is_out_of_memory:
            reason, container.is_out_of_memory = "OOMKilled", False
        message = ""
        if code and container.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = container.logs[-1].tail(80, 2048)
        container.status.end(code, reason, message=message)

    def _end_containers(self, grace_s: float) -> None:
        """SIGTERM, the grace period, SIGKILL."""
        alive = [one for one in [*self.init, *self.containers] if one.process and one.status.is_running]
        if grace_s and not self.node.faults.find("ignore-sigterm", self.object):
            for container in alive:
                assert container.process is not None
                container.process.send(signal.SIGTERM)
        end = time.monotonic() + grace_s
        with contextlib.suppress(_Vanished):  # it is removed by force
            while any(one.status.is_running for one in alive) and time.monotonic() < end:
                self._take(end - time.monotonic())
        for container in alive:
            if container.status.is_running:
                assert container.process is not None
                container.process.send(signal.SIGKILL)
        end = time.monotonic() + 10
        while any(one.status.is_running for one in alive) and time.monotonic() < end:
            with contextlib.suppress(_Vanished):
                self._take(end - time.monotonic())

    # The API server.

    def _send(self) -> None:
        """Tell the status. The uid is a precondition: a new pod of the same name gets none of it."""
        if fault := self.node.faults.find("delay-status", self.object):
            time.sleep(fault.seconds)
        body = {"metadata": {"uid": self.metadata["uid"]}, "status": self.status.to_object()}
        while True:
            self.node.wait_until_online()
            try:
                self.node.api.patch(f"{self.path}/status", body, kind=STRATEGIC_MERGE)
                return
            except ApiError as exc:
                if exc.status in (404, 409):
                    raise _Vanished from exc
                if exc.status == 422:
                    raise
            except OSError:
                pass
            time.sleep(0.5)

    def _get(self, kind: str, name: str) -> Object | None:
        """An object that the pod refers to. The API server needs a moment to learn that this node may read it."""
        place = "" if kind == "persistentvolumes" else f"namespaces/{self.metadata['namespace']}/"
        end = time.monotonic() + 3
        while True:
            try:
                found: Object = self.node.api.get(f"/api/v1/{place}{kind}/{name}")
                return found
            except ApiError as exc:
                if exc.status == 404 or (exc.status == 403 and time.monotonic() > end):
                    return None
                if exc.status != 403:
                    raise
            time.sleep(0.1)

    def _token(self, source: Object) -> str:
        """A token of the pod's service account."""
        account = self.spec.get("serviceAccountName", "default")
        reference = {"apiVersion": "v1", "kind": "Pod", "name": self.metadata["name"], "uid": self.metadata["uid"]}
        spec = {"expirationSeconds": source.get("expirationSeconds", 3600), "boundObjectRef": reference,
                "audiences": [source["audience"]] if source.get("audience") else []}  # fmt: skip
        place = f"/api/v1/namespaces/{self.metadata['namespace']}/serviceaccounts/{account}/token"
        end = time.monotonic() + 3
        while True:
            try:
                return str(self.node.api.create(place, {"spec": spec})["status"]["token"])
            except ApiError as exc:
                if exc.status != 403 or time.monotonic() > end:
                    raise ConfigError(f"no token of {account}: {exc}") from exc
            time.sleep(0.1)
