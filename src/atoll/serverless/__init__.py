"""The replica protocol: five methods that other tools code against, over any Atoll executor."""

from __future__ import annotations

from atoll.serverless.local import LocalProcessExecutor
from atoll.serverless.protocol import ReplicaHandle, ServerlessExecutor

__all__ = ["LocalProcessExecutor", "ReplicaHandle", "ServerlessExecutor"]
