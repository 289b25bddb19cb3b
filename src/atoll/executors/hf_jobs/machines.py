"""Pure: which flavor of the hardware list a replica gets, and what it costs. Only the service has the list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from atoll import units
from atoll.errors import did_you_mean
from atoll.spec import Gpu

CPU_FLAVOR = "cpu-basic"
"""The flavor of runs without a GPU that name none; it is also the default of the service."""
_UNITS_AN_HOUR = {"second": 3600, "minute": 60, "hour": 1}
_MEMORY = re.compile(r"-(\d+)GB\Z")


class Machine(NamedTuple):
    """One flavor."""

    flavor: str
    gpu: str | None
    gpus: int
    gpu_gb: int
    """Memory of one GPU; 0 if it is not known."""
    hourly_usd: float | None

    def __str__(self) -> str:
        return f"{self.flavor} ({self.gpus} × {self.gpu})" if self.gpu else self.flavor


def machine_of(info: Any) -> Machine:
    """A row of the hardware list, as `huggingface_hub` returns it."""
    accelerator = getattr(info, "accelerator", None)
    count = _number(getattr(accelerator, "quantity", 0))
    memory = _number(getattr(accelerator, "vram", 0))
    units = _UNITS_AN_HOUR.get(str(getattr(info, "unit_label", "")))
    price = getattr(info, "unit_cost_usd", None)
    return Machine(
        str(info.name),
        None if accelerator is None else _plain(str(accelerator.model)),
        count,
        memory // count if count else 0,
        None if units is None or not isinstance(price, int | float) else float(price) * units,
    )


def chosen_machine(gpu: Gpu | None, flavor: str | None, hardware: Sequence[Machine]) -> Machine | str:
    """The machine of one replica, or the reason why there is none."""
    known = {each.flavor: each for each in hardware}
    if flavor is not None or gpu is None:
        name = flavor or CPU_FLAVOR
        if name not in known:
            return f"flavor=`{name}`: Hugging Face offers {', '.join(known)}{did_you_mean(name, known)}"
        if gpu is not None and not _has(known[name], gpu):
            return f"flavor=`{name}`: it has {_offer(known[name])}, and the run asks for gpu=`{gpu}`; leave one out"
        return known[name]
    fits = [each for each in hardware if _has(each, gpu)]
    if not fits:
        offered = sorted({f"{each.gpu}:{each.gpus}" for each in hardware if each.gpu})
        return f"gpu=`{gpu}`: Hugging Face offers {', '.join(offered)}{did_you_mean(str(gpu), offered)}"
    return min(fits, key=lambda each: (each.gpus, each.hourly_usd or 0.0, each.flavor))


def price_notes(machine: Machine, gpu: Gpu | None, *, replicas: int, limit_s: float) -> Iterator[str]:
    """The cost of a run as the last note, and a warning if it pays for GPUs that it does not use."""
    price = machine.hourly_usd
    if gpu is not None and machine.gpus > gpu.count:
        cost = "price unknown" if price is None else f"${price:,.2f}/h"
        yield f"warning: gpu=`{gpu}`: each replica pays for {machine}: {cost}, and uses {gpu.count} of its GPUs"
    if price is None:
        yield f"{replicas} × {machine}: the hardware list has no price"
        return
    hours, together = limit_s / 3600, price * replicas
    yield (
        f"{replicas} × {machine}: ${price:,.2f}/h each, ${together:,.2f}/h together, at most ${together * hours:,.2f} "
        f"until the time limit of {units.duration_text(limit_s)} "
        "(price of the hardware list now; the start of a machine is billed too)"
    )


def _has(machine: Machine, gpu: Gpu) -> bool:
    if machine.gpu is None or machine.gpus < gpu.count:
        return False
    wanted = _MEMORY.search(gpu.name)
    name = _plain(_MEMORY.sub("", gpu.name))
    return gpu.name == "any" or (machine.gpu == name and (wanted is None or machine.gpu_gb == int(wanted[1])))


def _offer(machine: Machine) -> str:
    return f"{machine.gpus} × {machine.gpu}" if machine.gpu else "no GPU"


def _plain(name: str) -> str:
    """`Nvidia L40S` and `RTX PRO 6000` as `L40S` and `RTXPRO6000`."""
    return re.sub(r"[^A-Z0-9]", "", name.upper().removeprefix("NVIDIA"))


def _number(text: Any) -> int:
    found = re.match(r"\d+", str(text))
    return int(found[0]) if found else 0
