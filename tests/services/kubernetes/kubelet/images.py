"""The images that the nodes can "pull". An image is a search path for programs and some variables."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    path: tuple[str, ...] = ()
    """Folders before the system's in PATH."""
    env: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    """What runs if the pod names no command."""
    user: int = 0
    is_private: bool = False
    """Whether a pull needs one of the pod's `imagePullSecrets`."""

    def environment(self) -> dict[str, str]:
        return {"PATH": os.pathsep.join([*self.path, SYSTEM_PATH]), **self.env}


def known_images() -> dict[str, Image]:
    """`atoll-test` has this environment's Python, with Atoll; `python` has a bare one; `busybox` has a shell."""
    environment = (str(Path(sys.executable).parent),)
    bare = (str(Path(sys.base_prefix) / "bin"),)
    return {
        "busybox:latest": Image(command=("sh",)),
        "atoll-test:latest": Image(path=environment),
        "atoll-test:nonroot": Image(path=environment, user=1000),
        "private/atoll-test:latest": Image(path=environment, is_private=True),
        # A pod is a process of this machine: what pip installs goes below the pod's HOME, not into this Python.
        "python:3.11": Image(path=bare, env={"PIP_USER": "1"}, command=("python3",)),
    }


def full_name(name: str) -> str:
    """With a tag: a name without one means `latest`."""
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


def image_from(values: dict[str, Any]) -> Image:
    """An image that a test describes in JSON."""
    given: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Image(**given)
