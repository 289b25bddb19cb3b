"""What the deployed function does in its container: run the replica's supervisor, and return an envelope.

The supervisor claims the rank for this call (`ATOLL_CLAIM`), and ends if another call or a cancel has the claim.

The function returns JSON values and raises no `Exception`, so that Modal has nothing of the user's to pickle: user code
runs in other processes, the supervisor `python -m atoll.replica` and its children. Only the interrupts with which Modal
ends a container pass through, after the supervisor has stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import atoll
from atoll.context import CLAIM, CLAIMED, GRACE, ReplicaContext
from atoll.errors import AtollError, KeyNotFound
from atoll.journal import FORMAT, Claim, read_claim, version_problem
from atoll.registry import open_store

_CALL_ID = "ATOLL_CALL_ID"
"""The variable with the id of this call; the function sets it, because Modal tells the id only to Python code."""
_UPLOAD_S = 20.0
"""After its grace the supervisor stores the outcome; then it is killed."""


class Terminated(KeyboardInterrupt):
    """Modal, or the machine, asks the container to end with SIGTERM.

    Modal takes it for an interrupt of the container. It would pickle any other exception as the output of the call.
    """


def run_replica(context: Mapping[str, Any], call_id: str | None) -> dict[str, Any]:
    """Run the replica that the context describes. Returns how that ended, as JSON values."""
    envelope: dict[str, Any] = {"format": FORMAT, "atoll": atoll.__version__, "host": os.uname().nodename}
    if context.get("probe"):
        return {**envelope, "state": "probe", "python": sys.version.split()[0]}
    try:
        return {**envelope, **_run(context, str(call_id or ""))}
    except AtollError as exc:
        return {**envelope, "state": "refused", "message": f"{exc.code}: {exc.message}"}
    except Exception as exc:  # noqa: BLE001  the launcher must not unpickle it
        return {**envelope, "state": "refused", "message": f"{type(exc).__name__}: {exc}"}


def _run(context: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    variables = {str(name): str(value) for name, value in context["environment"].items()}
    replica = ReplicaContext.from_environment(variables)
    if problem := version_problem(context):
        return {"state": "too_old", "message": f"{problem}; deploy again: `atoll deploy modal`"}
    began = time.time()
    code = _supervise({**variables, CLAIM: _CALL_ID, _CALL_ID: call_id})
    if code == CLAIMED and (claim := _claim(replica)).job != call_id:
        return {"state": "duplicate", "claimed_by": claim.job} if claim.job else {"state": "cancelled"}
    return {"state": "ran", "exit_code": code, "started_at": began, "ended_at": time.time()}


def _claim(replica: ReplicaContext) -> Claim:
    """Which call has this rank; none if the run was cancelled before any had it."""
    try:
        return read_claim(open_store(replica.store_uri), replica.run_id, replica.rank, launch=replica.launch)
    except KeyNotFound:
        return Claim()


def _supervise(variables: Mapping[str, str]) -> int:
    """Run the supervisor until its end. An interrupt stops it, and is raised again when it has ended."""
    command = [sys.executable, "-m", "atoll.replica"]
    process = subprocess.Popen(command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
    with _terminates():
        try:
            code = process.wait()
        except BaseException:
            _stop(process, float(variables.get(GRACE, 10.0)))
            raise
    return code if code >= 0 else 128 - code


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(grace_s + _UPLOAD_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the kill pipe ends its replicas with it
        process.wait()


@contextmanager
def _terminates() -> Iterator[None]:
    """Turn SIGTERM into an exception, as SIGINT is one, until the block ends."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
