"""Pure: the machines of SageMaker, the one for a placement, and what it costs.

`chosen_machine` never returns a machine with another GPU than the placement asks for. `price_notes` says what a run may
cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from atoll.errors import did_you_mean
from atoll.spec import Gpu


@dataclass(frozen=True)
class Machine:
    """One instance type: the name and the number of its GPUs."""

    name: str
    gpu: str | None
    gpus: int

    def __str__(self) -> str:
        return f"{self.name} ({self.gpus} × {self.gpu})" if self.gpu else self.name


INSTANCE_TYPE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9]+\Z")
# The smallest machine of each GPU comes first, because `chosen_machine` takes the first that is large enough.
_TYPES: dict[str, tuple[tuple[str, int], ...]] = {
    "T4": (("ml.g4dn.xlarge", 1), ("ml.g4dn.2xlarge", 1), ("ml.g4dn.4xlarge", 1), ("ml.g4dn.8xlarge", 1),
           ("ml.g4dn.16xlarge", 1), ("ml.g4dn.12xlarge", 4)),
    "V100": (("ml.p3.2xlarge", 1), ("ml.p3.8xlarge", 4), ("ml.p3.16xlarge", 8), ("ml.p3dn.24xlarge", 8)),
    "A10G": (("ml.g5.xlarge", 1), ("ml.g5.2xlarge", 1), ("ml.g5.4xlarge", 1), ("ml.g5.8xlarge", 1),
             ("ml.g5.16xlarge", 1), ("ml.g5.12xlarge", 4), ("ml.g5.24xlarge", 4), ("ml.g5.48xlarge", 8)),
    "L4": (("ml.g6.xlarge", 1), ("ml.g6.2xlarge", 1), ("ml.g6.4xlarge", 1), ("ml.g6.8xlarge", 1),
           ("ml.g6.16xlarge", 1), ("ml.g6.12xlarge", 4), ("ml.g6.24xlarge", 4), ("ml.g6.48xlarge", 8)),
    "L40S": (("ml.g6e.xlarge", 1), ("ml.g6e.2xlarge", 1), ("ml.g6e.4xlarge", 1), ("ml.g6e.8xlarge", 1),
             ("ml.g6e.16xlarge", 1), ("ml.g6e.12xlarge", 4), ("ml.g6e.24xlarge", 4), ("ml.g6e.48xlarge", 8)),
    "A100": (("ml.p4d.24xlarge", 8),),
    "A100-80GB": (("ml.p4de.24xlarge", 8),),
    "H100": (("ml.p5.4xlarge", 1), ("ml.p5.48xlarge", 8)),
    "H200": (("ml.p5en.48xlarge", 8), ("ml.p5e.48xlarge", 8)),
    "B200": (("ml.p6-b200.48xlarge", 8),),
    "B300": (("ml.p6-b300.48xlarge", 8),),
    "GB200": (("ml.p6e-gb200.36xlarge", 4),),
}  # fmt: skip
MACHINES = {name: Machine(name, gpu, count) for gpu, types in _TYPES.items() for name, count in types}
GPUS = frozenset(_TYPES)
GPU_INSTANCE_TYPE, CPU_INSTANCE_TYPE = "ml.g5.2xlarge", "ml.m5.xlarge"
"""The machines of runs for which the user set no type."""
_CPU_FAMILY = re.compile(r"ml\.[mcrtxz]\d")
_LOCAL_DISKS = re.compile(r"ml\.(g4dn|g5|g6|g6e|g7|g7e|p3dn|p4d|p4de|p5|p5e|p5en|p6\S*|trn1n?|trn2|[crm]\d+\w*d)\.")


def machine(name: str) -> Machine:
    """The machine of an instance type; a type that is not in the table is accepted without GPUs."""
    return MACHINES.get(name, Machine(name, None, 0))


def has_local_disks(name: str) -> bool:
    """Whether the machine has its own NVMe disks, so that SageMaker ignores the volume size."""
    return _LOCAL_DISKS.match(name) is not None


def has_no_gpu(name: str) -> bool:
    """Whether this is surely a machine without GPUs or other accelerators."""
    return name not in MACHINES and _CPU_FAMILY.match(name) is not None


def chosen_machine(gpu: Gpu | None, *, instance_type: str | None, cpu_instance_type: str | None) -> Machine | str:
    """The machine for one replica, or the reason why there is none. A type is None if the user did not set it.

    A run without a GPU gets `cpu_instance_type`, `any` gets `instance_type`, and a named GPU gets its smallest machine,
    or the `instance_type` that the user set. A type that the user set and that the run would not use is an error.
    """
    if gpu is None:
        if instance_type is not None and cpu_instance_type is None:
            remedy = "add a GPU, such as `any`, or set cpu_instance_type"
            return f"instance_type=`{instance_type}`: only runs with a GPU use it, and this one has gpu=None; {remedy}"
        return _checked("cpu_instance_type", cpu_instance_type or CPU_INSTANCE_TYPE)
    own = _checked("instance_type", instance_type or GPU_INSTANCE_TYPE)
    if isinstance(own, str):
        return own
    if gpu.name != "any" and gpu.name not in GPUS:
        offered = sorted(GPUS)
        return f"gpu=`{gpu}`: SageMaker has {', '.join(offered)}{did_you_mean(gpu.name, offered)}"
    if has_no_gpu(own.name):
        return f"instance_type=`{own.name}`: this machine has no GPU, and the run asks for gpu=`{gpu}`"
    if gpu.name == "any":
        is_large_enough = own.gpus >= gpu.count or own.name not in MACHINES
        return own if is_large_enough else f"gpu=`{gpu}`: instance_type=`{own.name}` has {own.gpus} × {own.gpu}"
    return own if own.gpu == gpu.name and own.gpus >= gpu.count else _smallest(gpu, instance_type)


def _smallest(gpu: Gpu, instance_type: str | None) -> Machine | str:
    """The smallest machine with this GPU; the reason if there is none, or if the user set a type without it."""
    fits = [each for each in MACHINES.values() if each.gpu == gpu.name and each.gpus >= gpu.count]
    if not fits:
        most = max(each.gpus for each in MACHINES.values() if each.gpu == gpu.name)
        return f"gpu=`{gpu}`: a machine of SageMaker has at most {most} × {gpu.name}"
    if instance_type is not None:
        other = machine(instance_type)
        has = f"has {other.gpus} × {other.gpu}" if other.gpu else "is not known to have it"
        remedy = f"leave it out, or set {fits[0].name}"
        return f"instance_type=`{instance_type}`: it {has}, and the run asks for gpu=`{gpu}`; {remedy}"
    return fits[0]


def _checked(setting: str, name: str) -> Machine | str:
    if not INSTANCE_TYPE.match(name):
        return f"{setting}=`{name}`: an instance type looks like `ml.g5.2xlarge`{did_you_mean(name, list(MACHINES))}"
    return machine(name)


# ── prices ──────────────────────────────────────────────────────────────────────────────────────────────────────

DATE, REGION = "2025-11", "us-east-1"
"""Date and region of the table: approximate list prices for on-demand training, in dollars an hour."""

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


def hourly_price(name: str, own: Mapping[str, float]) -> float | None:
    """Dollars for an hour of a machine; None if no price is known."""
    return own.get(name, PRICES.get(name))


def price_notes(
    machine: Machine, gpu: Gpu | None, *, replicas: int, limit_s: float, spot: bool, own: Mapping[str, float]
) -> Iterator[str]:
    """The cost of a run as the last note, and a warning if it pays for GPUs that it does not use."""
    price = hourly_price(machine.name, own)
    source = "your own price" if machine.name in own else f"list price of {REGION} in {DATE}, on demand; check yours"
    if gpu is not None and machine.gpus > gpu.count:
        cost = "price unknown" if price is None else f"${price:,.2f}/h"
        yield (
            f"warning: gpu=`{gpu}`: each replica pays for a whole {machine}: {cost} for "
            f"{machine.gpus} GPUs, of which it uses {gpu.count}"
        )
    if spot:
        yield "managed spot: usually cheaper; waiting for a machine is not billed"
    if price is None:
        yield f"{replicas} × {machine}: price unknown; set `prices` to see one"
        return
    hours = limit_s / 3600
    together = price * replicas
    yield (
        f"{replicas} × {machine}: ${price:,.2f}/h each, ${together:,.2f}/h together, at most ${together * hours:,.2f} "
        f"at the limit of {hours:,.4g} h ({source})"
    )
