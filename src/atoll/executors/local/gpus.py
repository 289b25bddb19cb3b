"""GPUs of this machine, as `nvidia-smi` lists them, and how ranks share them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.spec import KNOWN, Gpu

_QUERY = ["nvidia-smi", "--query-gpu=uuid,name", "--format=csv,noheader"]


@dataclass(frozen=True)
class Device:
    """One GPU: its id for CUDA_VISIBLE_DEVICES, and its short product name."""

    uuid: str
    name: str


def present() -> tuple[Device, ...]:
    """The GPUs of this machine; none if there is no driver."""
    try:
        listing = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if listing.returncode != 0:
        return ()
    rows = (line.split(",", 1) for line in listing.stdout.splitlines() if "," in line)
    return tuple(Device(uuid.strip(), short_name(name.strip())) for uuid, name in rows)


def short_name(product: str) -> str:
    """`NVIDIA H100 80GB HBM3` -> `H100`; an unknown product keeps its full name."""
    plain = re.sub(r"[^a-z0-9]", "", product.lower())
    if "a100" in plain and "80gb" in plain:
        return "A100-80GB"
    words = re.sub(r"(RTX) ?(\d)", r"\1\2", product, flags=re.I).replace("-", " ").split()
    folded = {known.lower(): known for known in KNOWN}
    return next((folded[word.lower()] for word in words if word.lower() in folded), product)


def share(gpu: Gpu, replicas: int, devices: Sequence[Device]) -> list[str] | str:
    """The devices of each rank as a CUDA_VISIBLE_DEVICES value, or the reason there are not enough."""
    fitting = [device for device in devices if gpu.name in ("any", device.name)]
    needed = gpu.count * replicas
    if len(fitting) < needed:
        have = ", ".join(sorted({device.name for device in devices})) or "no GPU"
        need = "1 replica needs" if replicas == 1 else f"{replicas} replicas need"
        return f"gpu=`{gpu}`: {need} {needed}, and this machine has {len(fitting)} ({have})"
    spans = (fitting[rank * gpu.count : (rank + 1) * gpu.count] for rank in range(replicas))
    return [",".join(device.uuid for device in span) for span in spans]
