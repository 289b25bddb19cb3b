"""Pure: the machines of EKS with their GPUs, sizes and prices, and what one replica costs on them.

Sizes are those of AWS. What pods can use of them is computed, not measured: AWS reserves a part for the kubelet, and
the kernel and the daemons of a usual cluster take some, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from atoll.spec import Gpu

DATE, REGION = "2025-11", "us-east-1"
"""Date and region of the prices: approximate list prices on demand, in dollars an hour."""
HYPERPOD = "ml."
"""HyperPod puts this before the name of an instance type."""
_VM_SHARE, _DAEMON_CPUS = 0.925, 0.25


@dataclass(frozen=True)
class Machine:
    """One instance type. `price` is None where AWS has no price on demand."""

    name: str
    gpu: str | None
    gpus: int
    cpus: int
    memory_gib: int
    price: float | None

    def __str__(self) -> str:
        return f"{self.name} ({self.gpus} × {self.gpu})" if self.gpu else self.name

    @property
    def usable_cpus(self) -> float:
        """Cores that pods can request: without those that the kubelet reserves and daemons usually take."""
        reserved = 0.06 + 0.01 + 0.005 * min(max(self.cpus - 2, 0), 2) + 0.0025 * max(self.cpus - 4, 0)
        return math.floor((self.cpus - reserved - _DAEMON_CPUS) * 2) / 2

    @property
    def usable_gib(self) -> int:
        """GiB that pods can request: without what the kernel, the kubelet and the eviction limit take."""
        pods = 58 if self.cpus <= 8 else 234
        return math.floor(self.memory_gib * _VM_SHARE - (255 + 11 * pods + 100) / 1024)

    def has(self, gpu: Gpu) -> bool:
        """Whether it has so many of this GPU; an A100 with 80 GB is an A100, too."""
        is_it = gpu.name in ("any", self.gpu) or (gpu.name == "A100" and self.gpu == "A100-80GB")
        return is_it and self.gpus >= gpu.count


def _machines(gpu: str | None, rows: str) -> Iterator[Machine]:
    """Rows are `name gpus cpus GiB price`; a price `-` is unknown."""
    for row in filter(None, map(str.split, rows.splitlines())):
        name, gpus, cpus, memory, price = row
        yield Machine(name, gpu, int(gpus), int(cpus), int(memory), None if price == "-" else float(price))


# The smallest machine of each GPU comes first.
_ALL = [
    *_machines("T4", """
        g4dn.xlarge 1 4 16 0.526
        g4dn.2xlarge 1 8 32 0.752
        g4dn.4xlarge 1 16 64 1.204
        g4dn.8xlarge 1 32 128 2.176
        g4dn.16xlarge 1 64 256 4.352
        g4dn.12xlarge 4 48 192 3.912
        g4dn.metal 8 96 384 7.824"""),
    *_machines("V100", """
        p3.2xlarge 1 8 61 3.06
        p3.8xlarge 4 32 244 12.24
        p3.16xlarge 8 64 488 24.48
        p3dn.24xlarge 8 96 768 31.212"""),
    *_machines("A10G", """
        g5.xlarge 1 4 16 1.006
        g5.2xlarge 1 8 32 1.212
        g5.4xlarge 1 16 64 1.624
        g5.8xlarge 1 32 128 2.448
        g5.16xlarge 1 64 256 4.096
        g5.12xlarge 4 48 192 5.672
        g5.24xlarge 4 96 384 8.144
        g5.48xlarge 8 192 768 16.288"""),
    *_machines("L4", """
        g6.xlarge 1 4 16 0.805
        g6.2xlarge 1 8 32 0.978
        g6.4xlarge 1 16 64 1.323
        g6.8xlarge 1 32 128 2.014
        g6.16xlarge 1 64 256 3.397
        g6.12xlarge 4 48 192 4.602
        g6.24xlarge 4 96 384 6.675
        g6.48xlarge 8 192 768 13.35"""),
    *_machines("L40S", """
        g6e.xlarge 1 4 32 1.861
        g6e.2xlarge 1 8 64 2.242
        g6e.4xlarge 1 16 128 3.004
        g6e.8xlarge 1 32 256 4.529
        g6e.16xlarge 1 64 512 7.577
        g6e.12xlarge 4 48 384 10.493
        g6e.24xlarge 4 96 768 15.066
        g6e.48xlarge 8 192 1536 30.131"""),
    *_machines("A100", "p4d.24xlarge 8 96 1152 21.958"),
    *_machines("A100-80GB", "p4de.24xlarge 8 96 1152 27.447"),
    *_machines("H100", """
        p5.4xlarge 1 16 256 6.88
        p5.48xlarge 8 192 2048 55.04"""),
    *_machines("H200", """
        p5en.48xlarge 8 192 2048 63.296
        p5e.48xlarge 8 192 2048 -"""),
    *_machines("B200", "p6-b200.48xlarge 8 192 2048 113.93"),
    *_machines("B300", "p6-b300.48xlarge 8 192 4096 -"),
    *_machines("GB200", "p6e-gb200.36xlarge 4 144 960 -"),
    *_machines(None, """
        m5.large 0 2 8 0.096
        m5.xlarge 0 4 16 0.192
        m5.2xlarge 0 8 32 0.384
        m5.4xlarge 0 16 64 0.768
        c5.xlarge 0 4 8 0.17
        c5.2xlarge 0 8 16 0.34
        c5.4xlarge 0 16 32 0.68
        r5.xlarge 0 4 32 0.252
        r5.2xlarge 0 8 64 0.504"""),
]  # fmt: skip
MACHINES = {machine.name: machine for machine in _ALL}
GPUS = frozenset(machine.gpu for machine in _ALL if machine.gpu)
FIXED = {"A100": "p4d.24xlarge", "H100": "p5.48xlarge", "A10G": "g5.xlarge", "T4": "g4dn.xlarge"}
"""The machine of each GPU for `atoll.serverless.EKSExecutor`, which names one instance type for each GPU."""


def machine(instance_type: str) -> Machine | None:
    """The machine of an instance type, written as on EC2 or as on HyperPod; None if the table does not have it."""
    return MACHINES.get(instance_type.removeprefix(HYPERPOD))


def machines_with(gpu: Gpu) -> list[Machine]:
    """The machines that have so many of this GPU, the smallest first; an A100 with 80 GB is an A100, too."""
    names = ("A100", "A100-80GB") if gpu.name == "A100" else (gpu.name,)
    return [each for each in _ALL if each.gpu in names and each.gpus >= gpu.count]


def smallest_that_fits(machines: Sequence[Machine], cpus: float | None, memory_gib: float | None) -> Machine | None:
    """The first machine that can hold such a request; the first one if none can; None if there are no machines."""
    fits = (m for m in machines if (cpus or 0) <= m.usable_cpus and (memory_gib or 0) <= m.usable_gib)
    return next(fits, machines[0] if machines else None)


def fit_notes(cpus: float | None, memory_gib: float | None, chosen: Sequence[Machine]) -> Iterator[str]:
    """A warning for each explicit request that no chosen machine can ever hold."""
    if not chosen:
        return
    most_cpus, most_gib = max(m.usable_cpus for m in chosen), max(m.usable_gib for m in chosen)
    names = chosen[0].name if len(chosen) == 1 else f"the largest of {chosen[0].name} to {chosen[-1].name}"
    if cpus is not None and cpus > most_cpus:
        yield (
            f"warning: cpus={cpus:g}: can never fit: {names} leaves about {most_cpus:g} cores for pods, so that no "
            "replica would start"
        )
    if memory_gib is not None and memory_gib > most_gib:
        yield (
            f"warning: memory_gib={memory_gib:g}: can never fit: {names} leaves about {most_gib:g} GiB for pods, so "
            "that no replica would start"
        )


def gpu_notes(gpu: Gpu | None, chosen: Sequence[Machine]) -> Iterator[str]:
    """A warning if none of the machines that replicas may run on has the GPU."""
    if gpu is not None and chosen and not any(machine.has(gpu) for machine in chosen):
        has = f"{chosen[0]}" if chosen[0].gpu else f"{chosen[0]}, which has no GPU"
        yield (
            f"warning: gpu=`{gpu}`: can never fit: the node selector allows only {has}, so that no replica would start"
        )


def price_notes(
    chosen: Machine,
    gpu: Gpu | None,
    *,
    is_sure: bool,
    replicas: int,
    limit_s: float,
    spot: bool | None,
    own: Mapping[str, float],
) -> Iterator[str]:
    """What a run may cost, and a warning if a lone replica pays for GPUs that it does not use.

    `is_sure` says that replicas can run on no other machine. `own` are the user's prices.
    """
    given = own.get(chosen.name, own.get(HYPERPOD + chosen.name))
    price = chosen.price if given is None else given
    source = "your own price" if given is not None else f"list price of {REGION} in {DATE}, on demand; check yours"
    if gpu is not None and chosen.gpus > gpu.count:
        cost = "price unknown" if price is None else f"${price:,.2f}/h"
        yield (
            f"warning: gpu=`{gpu}`: a {chosen} costs as a whole: {cost} for {chosen.gpus} GPUs, of which a replica "
            f"uses {gpu.count}; up to {chosen.gpus // gpu.count} replicas share one, but a lone one pays for all"
        )
    if spot:
        yield "spot: usually cheaper than on demand; a replica whose machine is taken away starts again elsewhere"
    shared = max(1, chosen.gpus // gpu.count) if gpu is not None else 1
    least, most = math.ceil(replicas / shared), replicas
    count = f"{most}" if least == most else f"{least} to {most}"
    where = "" if is_sure else ", the usual machine for this; the cluster may have others"
    if price is None:
        yield f"{count} × {chosen}{where}: price unknown; set `prices` to see one"
        return
    hours = limit_s / 3600
    yield (
        f"{count} × {chosen}{where}: ${price:,.2f}/h each, at most ${price * most:,.2f}/h together and "
        f"${price * most * hours:,.2f} at the limit of {hours:,.4g} h ({source})"
    )
