"""Check that a run is over, before it is resumed or deleted."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from atoll.errors import BackendError, ConfigError, Conflict
from atoll.runs.wait import counts_text
from atoll.status import Reason

if TYPE_CHECKING:
    from atoll.runs.run import Run


def check_is_over(run: Run, hint: str) -> None:
    """Raise `Conflict` with the reason `running`, and with this hint, unless every replica of the run has ended.

    If the backend does not say so, its error is raised, with a hint for a backend that is gone for good.
    """
    gone = f"if the backend is gone for good, `atoll cancel {shlex.quote(run.id)} --abandon` gives its replicas up"
    try:
        status = run.status(progress=False)
    except (BackendError, ConfigError) as exc:
        exc.hint = f"{exc.hint}; {gone}" if exc.hint else gone
        raise
    if not status.is_terminal:
        is_unknown = any(row.reason is Reason.NO_ANSWER for row in status.replicas)
        hint = f"{hint}; {gone}" if is_unknown else hint
        raise Conflict(run.id, what=f"run `{run.id}` is not over: {counts_text(status)}", reason="running", hint=hint)
