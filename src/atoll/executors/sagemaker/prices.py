"""Pure: what a run may cost. A small table of list prices with its date; `prices` in the settings goes before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from atoll.executors.sagemaker.machines import Machine
from atoll.gpu import Gpu

DATE, REGION = "2025-11", "us-east-1"
"""When and where these prices were taken down, as approximate list prices for training on demand, in dollars."""

PRICES: dict[str, float] = {
    "ml.m5.large": 0.115, "ml.m5.xlarge": 0.23, "ml.m5.2xlarge": 0.461, "ml.m5.4xlarge": 0.922,
    "ml.c5.xlarge": 0.204, "ml.c5.2xlarge": 0.408, "ml.c5.4xlarge": 0.816,
    "ml.g4dn.xlarge": 0.736, "ml.g4dn.2xlarge": 0.94, "ml.g4dn.4xlarge": 1.505, "ml.g4dn.8xlarge": 2.72,
    "ml.g4dn.12xlarge": 4.89, "ml.g4dn.16xlarge": 5.44,
    "ml.p3.2xlarge": 3.825, "ml.p3.8xlarge": 14.688, "ml.p3.16xlarge": 28.152,
    "ml.g5.xlarge": 1.408, "ml.g5.2xlarge": 1.515, "ml.g5.4xlarge": 2.03, "ml.g5.8xlarge": 3.06,
    "ml.g5.12xlarge": 7.09, "ml.g5.16xlarge": 5.12, "ml.g5.24xlarge": 10.18, "ml.g5.48xlarge": 20.36,
    "ml.g6.xlarge": 1.127, "ml.g6.2xlarge": 1.222, "ml.g6.4xlarge": 1.654, "ml.g6.8xlarge": 2.518,
    "ml.g6.12xlarge": 5.752, "ml.g6.16xlarge": 4.246, "ml.g6.24xlarge": 8.344, "ml.g6.48xlarge": 16.688,
    "ml.g6e.xlarge": 2.605, "ml.g6e.2xlarge": 2.803, "ml.g6e.4xlarge": 3.755, "ml.g6e.8xlarge": 5.661,
    "ml.g6e.12xlarge": 13.116, "ml.g6e.16xlarge": 9.473, "ml.g6e.24xlarge": 18.833, "ml.g6e.48xlarge": 37.666,
    "ml.p4d.24xlarge": 25.251, "ml.p4de.24xlarge": 31.564,
    "ml.p5.4xlarge": 7.912, "ml.p5.48xlarge": 63.296, "ml.p5en.48xlarge": 72.795,
    "ml.p6-b200.48xlarge": 130.84,
}  # fmt: skip


def price_notes(
    machine: Machine, gpu: Gpu | None, *, replicas: int, limit_s: float, spot: bool, own: Mapping[str, float]
) -> Iterator[str]:
    """What a person should know about money before saying yes."""
    price = own.get(machine.name, PRICES.get(machine.name))
    source = "your own price" if machine.name in own else f"list price of {REGION} in {DATE}, on demand; check yours"
    if gpu is not None and machine.gpus > gpu.count:
        cost = "a price unknown here" if price is None else f"${price:,.2f}/h"
        yield (
            f"warning: gpu=`{gpu}`: each replica gets, and pays for, a whole {machine}: {cost} for "
            f"{machine.gpus} GPUs of which it asked for {gpu.count}"
        )
    if price is None:
        yield f"{replicas} × {machine}: price unknown; set `prices` to see one"
        return
    hours = limit_s / 3600
    together = price * replicas
    yield (
        f"{replicas} × {machine}: ${price:,.2f}/h each, ${together:,.2f}/h together, at most ${together * hours:,.2f} "
        f"at the limit of {hours:,.4g} h ({source})"
    )
    if spot:
        yield "managed spot: usually less than that; while it waits for a machine nothing is billed"
