"""After a start that failed: what may exist is stopped by name, or named in the error. (E10 E21 E24)"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from atoll.errors import AtollError, BackendError, ConfigError, StopFailed, SubmitError
from atoll.executors.base import Executor, Plan
from atoll.handle import RunHandle

log = logging.getLogger("atoll.executors")


def submit_or_stop(executor: Any, plan: Plan) -> RunHandle:
    """Start every replica, or stop what was started: the `submit` of an executor that is a `Starter`."""
    try:
        handle: RunHandle = executor.start(plan)
    except BaseException as why:
        if has_created_nothing(why):
            raise
        stop_and_raise(executor, executor.handle(plan), plan.run_id, why)
    return handle


def has_created_nothing(why: BaseException) -> bool:
    """Whether a start that failed with this error has surely created nothing itself."""
    if isinstance(why, SubmitError):
        return not why.created  # only replicas of another launcher exist
    return isinstance(why, ConfigError) or (isinstance(why, BackendError) and not why.retryable)


def stop_and_raise(
    executor: Executor, handle: RunHandle, run_id: str, why: BaseException, *, note: str = ""
) -> NoReturn:
    """Stop the replicas of a start that failed, and raise an error that says so and names what may still run."""
    log.info("run %s: the start failed: stop %s", run_id, handle)
    left = _stop(executor, handle)
    if not left and not isinstance(why, AtollError):
        why.add_note(f"the launch of run `{run_id}` was undone; nothing is left running{note}")
        raise why
    cause = why.__cause__ if isinstance(why, SubmitError) and why.__cause__ is not None else why
    message = cause.message if isinstance(cause, AtollError) else f"interrupted by {type(cause).__name__}"
    if isinstance(cause, SubmitError):
        message = message.removesuffix(cause.tail)
    hint = f"`atoll cancel '{handle}'` tries again to stop them" if left else getattr(why, "hint", None)
    text = f"run `{run_id}`: {message.removeprefix(f'run `{run_id}`: ')}{note}"
    raise SubmitError(text, left_running=left, executor=executor.name, hint=hint) from cause


def _stop(executor: Executor, handle: RunHandle) -> tuple[str, ...]:
    """Stop every replica; returns what may still run."""
    try:
        executor.cancel(handle)
    except StopFailed as exc:
        return exc.left_running
    except (AtollError, KeyboardInterrupt) as exc:  # also a login that has ended since
        log.warning("could not stop %s: %s", handle, exc)
        return (str(handle),)
    return ()
