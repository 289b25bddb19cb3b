"""The replica protocol: five methods that other tools call, implemented for each Atoll executor.

An executor of a service is imported on first use, so that it needs only its own packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atoll.serverless.local import LocalProcessExecutor
from atoll.serverless.protocol import ReplicaHandle, ServerlessExecutor

if TYPE_CHECKING:
    from atoll.serverless.sagemaker import SageMakerExecutor

_MODULES = {"SageMakerExecutor": "atoll.serverless.sagemaker"}

__all__ = ["LocalProcessExecutor", "ReplicaHandle", "SageMakerExecutor", "ServerlessExecutor"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module `atoll.serverless` has no attribute `{name}`")
    return getattr(import_module(_MODULES[name]), name)
