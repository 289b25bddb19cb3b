"""The replica protocol: five methods that other tools call, implemented for each Atoll executor.

A facade is imported on first use, so that it needs only the packages of its own service.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atoll.serverless.protocol import ReplicaHandle, ServerlessExecutor

if TYPE_CHECKING:
    from atoll.serverless.eks import EKSExecutor
    from atoll.serverless.eks import EKSExecutor as K8sExecutor
    from atoll.serverless.hf_jobs import HFJobsExecutor
    from atoll.serverless.local import LocalProcessExecutor
    from atoll.serverless.mcad import MCADExecutor
    from atoll.serverless.modal import ModalSpawnExecutor
    from atoll.serverless.modal import ModalSpawnExecutor as ModalExecutor
    from atoll.serverless.sagemaker import SageMakerExecutor

FACADES = {
    "hf_jobs": "atoll.serverless.hf_jobs:HFJobsExecutor",
    "local_process": "atoll.serverless.local:LocalProcessExecutor",
    "modal": "atoll.serverless.modal:ModalSpawnExecutor",
    "sagemaker": "atoll.serverless.sagemaker:SageMakerExecutor",
    "eks": "atoll.serverless.eks:EKSExecutor",
    "mcad": "atoll.serverless.mcad:MCADExecutor",
}
"""Backend name -> its facade. The suite of the protocol runs over all of them."""
_ALIASES = {"K8sExecutor": "EKSExecutor", "ModalExecutor": "ModalSpawnExecutor"}

__all__ = [
    "EKSExecutor",
    "HFJobsExecutor",
    "K8sExecutor",
    "LocalProcessExecutor",
    "MCADExecutor",
    "ModalExecutor",
    "ModalSpawnExecutor",
    "ReplicaHandle",
    "SageMakerExecutor",
    "ServerlessExecutor",
]


def __getattr__(name: str) -> Any:
    wanted = _ALIASES.get(name, name)
    for place in FACADES.values():
        module, _, facade = place.partition(":")
        if facade == wanted:
            return getattr(import_module(module), wanted)
    known = ", ".join(place.partition(":")[2] for place in FACADES.values())
    raise AttributeError(f"module `atoll.serverless` has no attribute `{name}`; the facades are {known}")
