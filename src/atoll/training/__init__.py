"""Training with rounds: the only package that imports torch. Start reading at `atoll.training.diloco`."""

from __future__ import annotations

try:
    import torch as torch
except ImportError as exc:
    from atoll.errors import MissingExtra

    raise MissingExtra("torch", extra="train") from exc

from atoll.training import kernels as kernels

kernels.install()
