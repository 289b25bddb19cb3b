"""Pure: the GPUs of Modal, how Modal writes them, and what a run may cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from atoll import units
from atoll.errors import did_you_mean
from atoll.spec import Gpu

GPUS: dict[str, str] = {
    "any": "any",
    "T4": "T4",
    "L4": "L4",
    "A10": "A10",
    "A10G": "A10",
    "A100": "A100-40GB",
    "A100-80GB": "A100-80GB",
    "L40S": "L40S",
    "H100": "H100",
    "H200": "H200",
    "B200": "B200",
}
"""Atoll's name of a GPU -> Modal's."""
_MOST = {"A10": 4}
_MOST_OTHERS = 8

DATE = "2025-11"
"""The date of the tables: approximate list prices in dollars, without the factors for regions and non-preemption."""
PRICES: dict[str, float] = {
    "T4": 0.59,
    "L4": 0.80,
    "A10": 1.10,
    "A100-40GB": 2.10,
    "A100-80GB": 2.50,
    "L40S": 1.95,
    "H100": 3.95,
    "H200": 4.54,
    "B200": 6.25,
}
"""Modal's name of a GPU -> dollars an hour."""
CPU_PRICE, GIB_PRICE = 0.0472, 0.0080
"""Dollars an hour for a physical core, and for a GiB of memory."""
DEFAULT_CPUS, DEFAULT_GIB = 0.125, 0.125
"""What Modal reserves for a container that asks for nothing."""


def gpu_option(gpu: Gpu | None) -> str | None:
    """The GPU in Modal's words, such as `H100:2`; None without a GPU. `gpu_problem` has the reasons against it."""
    if gpu is None:
        return None
    name = GPUS.get(gpu.name, gpu.name)
    return name if gpu.count == 1 else f"{name}:{gpu.count}"


def gpu_problem(gpu: Gpu | None) -> str | None:
    """Why Modal has no such GPU."""
    if gpu is None:
        return None
    if gpu.name not in GPUS:
        offered = sorted(GPUS)
        return f"gpu=`{gpu}`: Modal has {', '.join(offered)}{did_you_mean(gpu.name, offered)}"
    most = _MOST.get(GPUS[gpu.name], _MOST_OTHERS)
    return f"gpu=`{gpu}`: a container of Modal has at most {most} × {gpu.name}" if gpu.count > most else None


def hourly_price(
    gpu: Gpu | None, *, cpus: float | None, memory_gib: float | None, own: Mapping[str, float]
) -> float | None:
    """Dollars for an hour of one container; None if the price of its GPU is not known."""
    size = (cpus or DEFAULT_CPUS) * CPU_PRICE + (memory_gib or DEFAULT_GIB) * GIB_PRICE
    if gpu is None:
        return size
    name = GPUS.get(gpu.name, gpu.name)
    each = own.get(gpu.name, own.get(name, PRICES.get(name)))
    return None if each is None else size + gpu.count * each


def price_notes(
    gpu: Gpu | None,
    *,
    cpus: float | None,
    memory_gib: float | None,
    replicas: int,
    limit_s: float,
    own: Mapping[str, float],
) -> Iterator[str]:
    """What the run may cost; the price is an upper limit at list prices, for Modal bills used time only."""
    size = hourly_price(gpu, cpus=cpus, memory_gib=memory_gib, own=own)
    if size is None:
        yield f"price: unknown for gpu=`{gpu}`; Modal bills each second of the GPU that it chooses"
        return
    what = f"{replicas} × {gpu or 'CPU'}"
    most = size * replicas * limit_s / 3600
    yield (
        f"price: about ${size * replicas:.2f}/h for {what} (list prices of {DATE}, or `prices`); "
        f"at most ${most:.2f} until the time limit of {units.duration_text(limit_s)}"
    )
