"""Pure: SageMaker's machines with GPUs, and which one a placement gets. Never a machine with another GPU than asked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from atoll.errors import did_you_mean
from atoll.gpu import Gpu

INSTANCE_TYPE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9]+\Z")


@dataclass(frozen=True)
class Machine:
    """One instance type: which GPUs it has, and how many."""

    name: str
    gpu: str | None
    gpus: int

    def __str__(self) -> str:
        return f"{self.name} ({self.gpus} × {self.gpu})" if self.gpu else self.name


# Within one GPU the smallest machine comes first: the first that is large enough is taken.
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
_LOCAL_DISKS = re.compile(r"ml\.(g4dn|g5|g6|g6e|g7|g7e|p3dn|p4d|p4de|p5|p5e|p5en|p6\S*|trn1n?|trn2|[crm]\d+\w*d)\.")


def machine(name: str) -> Machine:
    """The machine of an instance type; one that is not in our table is taken at its word."""
    return MACHINES.get(name, Machine(name, None, 0))


def has_local_disks(name: str) -> bool:
    """Whether the volume is the machine's own NVMe, so that a volume size means nothing."""
    return _LOCAL_DISKS.match(name) is not None


def chosen_machine(gpu: Gpu | None, *, instance_type: str, cpu_instance_type: str) -> Machine | str:
    """The machine for one replica, or why there is none.

    `any`, and a GPU that the configured `instance_type` has, get that type; another GPU the smallest machine with it.
    """
    if gpu is None:
        return _checked("cpu_instance_type", cpu_instance_type)
    own = _checked("instance_type", instance_type)
    if isinstance(own, str):
        return own
    if gpu.name == "any":
        is_large_enough = own.gpus >= gpu.count or own.name not in MACHINES
        return own if is_large_enough else f"gpu=`{gpu}`: instance_type=`{own.name}` has {own.gpus} × {own.gpu}"
    if gpu.name not in GPUS:
        offered = sorted(GPUS)
        return f"gpu=`{gpu}`: SageMaker has {', '.join(offered)}{did_you_mean(gpu.name, offered)}"
    if own.gpu == gpu.name and own.gpus >= gpu.count:
        return own
    fits = (each for each in MACHINES.values() if each.gpu == gpu.name and each.gpus >= gpu.count)
    most = max(each.gpus for each in MACHINES.values() if each.gpu == gpu.name)
    return next(fits, f"gpu=`{gpu}`: a machine there has at most {most} × {gpu.name}")


def _checked(setting: str, name: str) -> Machine | str:
    if not INSTANCE_TYPE.match(name):
        return f"{setting}=`{name}`: an instance type looks like `ml.g5.2xlarge`{did_you_mean(name, list(MACHINES))}"
    return machine(name)
