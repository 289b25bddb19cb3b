"""What launcher and host agree on: the form of requests and answers, and which versions of Atoll fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import atoll
from atoll.errors import BackendError
from atoll.executors.ssh.errors import EXECUTOR

PROTOCOL = 1
"""The version of requests and answers."""
MARK = b"atoll-host: "
"""Begins each line of an answer."""
MODULE = "atoll.executors.ssh.host"
VERBS = ("check", "start", "status", "watch", "stop", "logs", "origin", "strays", "diagnose")


def versions_problem(host: str, answer: Mapping[str, Any], *, is_start: bool) -> BackendError | None:
    """Why this launcher cannot work with the Atoll of a host; None if it can.

    Only a start needs the same version up to the last number: a run that was started can be stopped by another one.
    """
    there, here = str(answer.get("atoll", "unknown")), atoll.__version__
    is_same = answer.get("protocol") == PROTOCOL and (not is_start or _series(there) == _series(here))
    if is_same:
        return None
    text = f"host `{host}` has Atoll {there}, and this is Atoll {here}"
    hint = "install the same version of Atoll on the host, or set `python` to an interpreter that has it"
    return BackendError(text, executor=EXECUTOR, operation="submit", reason="version", hint=hint)


def _series(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
