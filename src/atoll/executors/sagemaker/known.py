"""The regions and instance types that the installed boto3 knows. Reads its data files; makes no call."""

from __future__ import annotations

from functools import cache
from typing import Any

from atoll.registry import require

EXTRA = "sagemaker"


def may_use_sdk(client: Any) -> bool:
    """Whether the lists below may be read with this client: it is None, so the SDK makes one, or it is of the SDK.

    A stand-in that the caller gives needs no SDK, so nothing may import it.
    """
    return client is None or any(each.__module__.partition(".")[0] == "botocore" for each in type(client).__mro__)


@cache
def regions() -> tuple[str, ...]:
    """The regions of all partitions of AWS."""
    partitions = loader().load_data("endpoints")["partitions"]
    return tuple(region for partition in partitions for region in partition["regions"])


@cache
def instance_types() -> tuple[str, ...]:
    """The instance types of training jobs."""
    model = loader().load_service_model("sagemaker", "service-2")
    return tuple(model["shapes"]["TrainingInstanceType"]["enum"])


@cache
def loader() -> Any:
    """One loader for the process: it caches the service models, which are large."""
    return require("botocore.loaders", extra=EXTRA).create_loader()
