"""The replica protocol: five methods that other tools code against, over any Atoll executor.

Executors of services are loaded when they are first used, so that none needs another one's packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atoll.serverless.local import LocalProcessExecutor
from atoll.serverless.protocol import ReplicaHandle, ServerlessExecutor

if TYPE_CHECKING:
    from atoll.serverless.sagemaker import SageMakerExecutor

_HOMES = {"SageMakerExecutor": "atoll.serverless.sagemaker"}

__all__ = ["LocalProcessExecutor", "ReplicaHandle", "SageMakerExecutor", "ServerlessExecutor"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `atoll.serverless` has no attribute `{name}`")
    return getattr(import_module(_HOMES[name]), name)
