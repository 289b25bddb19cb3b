"""Addresses and names of pods, in place of a pod network and a cluster DNS.

As root, the kubelet makes a block of addresses local to this machine (`Addresses`), so that a connection to a pod's
address reaches the pod's process. A pod with a subdomain has a hosts file of its own (`Names`): it has the pod's own
name and the names that the EndpointSlices of its namespace publish, as a cluster DNS does, and is rewritten when they
change. All pods share the ports of this machine.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from services.kubernetes.api import Api, ApiError

Object = dict[str, Any]
_SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
_SERVICE = "kubernetes.io/service-name"
_BLOCK = 1024
"""Addresses of one kubelet. Its later pods get those of earlier ones again."""


class Addresses:
    """A block of 198.18.0.0/15, a range for tests: neither loopback, which Services refuse, nor a usual network."""

    def __init__(self) -> None:
        self._first = random.SystemRandom().randrange(2 * 65536 // _BLOCK) * _BLOCK
        self._numbers = itertools.count()
        self.block = f"{self._address(0)}/22"
        self.lead_here = os.geteuid() == 0 and _run_ip("route", "add", "local", self.block, "dev", "lo")

    def new(self) -> str:
        return self._address(1 + next(self._numbers) % (_BLOCK - 2))

    def _address(self, number: int) -> str:
        high, low = divmod(self._first + number, 256)
        return f"198.{18 + high // 256}.{high % 256}.{low}"


def release(block: str) -> None:
    """Undo what `Addresses` did."""
    _run_ip("route", "del", "local", block, "dev", "lo")


def _run_ip(*words: str) -> bool:
    program = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    return program is not None and subprocess.run([program, *words], capture_output=True).returncode == 0


class Names:
    """Keeps the hosts files of pods as the EndpointSlices say. `client` makes a client that may watch these."""

    def __init__(self, client: Callable[[], Api]) -> None:
        self._client = client
        self._files: dict[Path, tuple[str, str]] = {}
        """The namespace of each hosts file, and the lines that it always has."""
        self._slices: dict[str, Object] = {}
        self._lock = Lock()
        self._thread: Thread | None = None

    def add(self, path: Path, pod: Object, address: str) -> None:
        """Write the hosts file of a pod, and keep it up to date."""
        namespace, spec = pod["metadata"]["namespace"], pod["spec"]
        own = spec.get("hostname") or pod["metadata"]["name"]
        full = f"{own}.{spec['subdomain']}.{namespace}.svc.cluster.local"
        with self._lock:
            self._files[path] = (namespace, f"127.0.0.1 localhost\n::1 localhost\n{address} {full} {own}\n")
            self._write(path)
            if self._thread is None:
                self._thread = Thread(target=self._follow, name="names", daemon=True)
                self._thread.start()

    def remove(self, path: Path) -> None:
        with self._lock:
            self._files.pop(path, None)

    def _follow(self) -> None:
        api = self._client()
        while True:
            with contextlib.suppress(ApiError, OSError, http.client.HTTPException, ValueError):
                listed = api.get(_SLICES)
                with self._lock:
                    self._slices = {each["metadata"]["uid"]: each for each in listed["items"]}
                    for path in self._files:
                        self._write(path)
                version = listed["metadata"]["resourceVersion"]
                for kind, each in api.watch(_SLICES, resourceVersion=version, timeoutSeconds=240):
                    self._see(kind, each)
            time.sleep(0.2)

    def _see(self, kind: str, found: Object) -> None:
        with self._lock:
            if kind == "DELETED":
                self._slices.pop(found["metadata"]["uid"], None)
            else:
                self._slices[found["metadata"]["uid"]] = found
            for path, (namespace, _) in self._files.items():
                if namespace == found["metadata"]["namespace"]:
                    self._write(path)

    def _write(self, path: Path) -> None:
        """Overwrite the file itself, which the pod has mounted. It is never shorter than its first lines."""
        namespace, own = self._files[path]
        published = [line for each in self._slices.values() if each["metadata"]["namespace"] == namespace
                     for line in _lines(each)]  # fmt: skip
        content = (own + "".join(sorted(published))).encode()
        with contextlib.suppress(FileNotFoundError):  # the pod has just been removed
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, content, 0)
                os.ftruncate(descriptor, len(content))
            finally:
                os.close(descriptor)


def _lines(found: Object) -> list[str]:
    """The names of the pods behind a Service, and of the Service itself."""
    service, namespace = found["metadata"].get("labels", {}).get(_SERVICE), found["metadata"]["namespace"]
    lines = []
    for endpoint in found.get("endpoints") or []:
        if endpoint.get("conditions", {}).get("ready") is False:
            continue
        hosts = [f"{endpoint['hostname']}.{service}", service] if endpoint.get("hostname") else [service]
        suffixes = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
        names = " ".join(host + suffix for host in hosts for suffix in suffixes)
        lines += [f"{address} {names}\n" for address in endpoint["addresses"]]
    return lines
