"""What tests can make the nodes do wrong. A fault holds for pods of one namespace, so that tests do not meet."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from threading import Lock
from typing import Any

Object = dict[str, Any]
KINDS = {
    "image": "the image cannot be pulled",
    "slow-start": "nothing happens for `seconds` before the containers start",
    "ignore-sigterm": "containers do not get SIGTERM, so they live until the grace period ends",
    "delay-status": "each status is sent `seconds` late",
}


@dataclass(frozen=True)
class Fault:
    kind: str
    namespace: str
    pod: str = ""
    """A regular expression for the beginning of the pod's name."""
    image: str = ""
    seconds: float = 0.0

    def meets(self, pod: Object, image: str | None) -> bool:
        metadata = pod["metadata"]
        is_its_image = not self.image or image is None or self.image == image
        return self.namespace == metadata["namespace"] and bool(re.match(self.pod, metadata["name"])) and is_its_image


class Faults:
    def __init__(self) -> None:
        self._faults: dict[int, Fault] = {}
        self._numbers = itertools.count(1)
        self._lock = Lock()

    def add(self, fault: Fault) -> int:
        if fault.kind not in KINDS:
            raise ValueError(f"no fault is called {fault.kind!r}; there are {', '.join(KINDS)}")
        with self._lock:
            number = next(self._numbers)
            self._faults[number] = fault
        return number

    def remove(self, number: int) -> None:
        with self._lock:
            self._faults.pop(number, None)

    def clear(self, namespace: str) -> None:
        with self._lock:
            self._faults = {number: one for number, one in self._faults.items() if one.namespace != namespace}

    def find(self, kind: str, pod: Object, image: str | None = None) -> Fault | None:
        with self._lock:
            return next((one for one in self._faults.values() if one.kind == kind and one.meets(pod, image)), None)
