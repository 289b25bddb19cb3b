"""The app that `atoll deploy modal` deploys, and the module that its containers import: one function, `replica`."""

from __future__ import annotations

from typing import Any

from atoll.executors.modal.container import run_replica
from atoll.registry import require

modal = require("modal", extra="modal")


def replica(context: dict[str, Any]) -> dict[str, Any]:
    """Run one replica in this container, and return an envelope. The argument is the replica's context alone."""
    return run_replica(context, modal.current_function_call_id())
