"""A model as one flat float32 vector: what is exchanged, in which order, and how it goes in and out of the model.

Trainable parameters come first, each once however many modules share it; then the buffers that are averaged. Frozen
parameters are not exchanged; that they are equal everywhere is checked by their digest. The outer values are float32
whatever the model's own type: a bfloat16 model trains on a rounded copy of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.errors import ConfigError, CorruptUpdate
from atoll.rounds.codec import F32
from atoll.rounds.layout import ITEM_BYTES, Layout
from atoll.rounds.seal import digest
from atoll.stores.base import Buffer
from atoll.training.buffers import BufferPolicy, averaged_buffers

_COMPILED = "_orig_mod."  # torch.compile puts it in front of every name


class ModelVector:
    """The exchanged tensors of a model, and where each lies in the vector."""

    def __init__(self, model: nn.Module, policy: BufferPolicy = "average") -> None:
        self._model, self._policy = model, policy
        trainable = _trainable(model)
        if not trainable:
            raise ConfigError("the model has no trainable parameter, so there is nothing to exchange")
        self._named = trainable + averaged_buffers(model, policy)
        for name, tensor in self._named:
            _refuse_unusable(name, tensor)
        views = [_real(tensor) for _, tensor in self._named]
        names = [name.replace(_COMPILED, "") for name, _ in self._named]
        self.layout = Layout.of((name, v.shape, dtype_name(v.dtype)) for name, v in zip(names, views, strict=True))
        ends = np.cumsum([t.size for t in self.layout.tensors]).tolist()
        self._spans = [slice(end - t.size, end) for end, t in zip(ends, self.layout.tensors, strict=True)]
        self.averaged_from = self._spans[len(trainable) - 1].stop

    @property
    def size(self) -> int:
        return self.layout.size

    def frozen_digest(self) -> str:
        """Names the values of the frozen parameters; empty when there are none."""
        frozen = [(name, p) for name, p in self._model.named_parameters() if not p.requires_grad]
        parts = [part for name, p in frozen for part in (name.replace(_COMPILED, "").encode(), tensor_bytes(p))]
        return digest(*parts) if parts else ""

    def tensors(self) -> list[Buffer]:
        """The live tensors as bytes in their own types, in layout order."""
        return [tensor_bytes(tensor) for _, tensor in self._named]

    def values_of(self, buffers: Sequence[Buffer]) -> F32:
        """The vector that `tensors` of some replica describe."""
        values = np.empty(self.size, dtype=np.float32)
        for tensor, span, buffer in zip(self.layout.tensors, self._spans, buffers, strict=True):
            if memoryview(buffer).nbytes != tensor.size_bytes:
                raise CorruptUpdate(f"`{tensor.name}` has {memoryview(buffer).nbytes} bytes", check="layout")
            if tensor.size:
                found = torch.frombuffer(bytearray(buffer), dtype=getattr(torch, tensor.dtype))
                torch.from_numpy(values[span]).copy_(found)
        return values

    def write(self, values: F32) -> None:
        """Set the live tensors to these values, rounded to each tensor's own type."""
        with torch.no_grad():
            for (_, tensor), span in zip(self._named, self._spans, strict=True):
                live = _real(tensor)
                live.copy_(torch.from_numpy(values[span]).view(live.shape))

    def read(self, out: F32) -> None:
        """The live tensors, as they are."""
        for (_, tensor), span in zip(self._named, self._spans, strict=True):
            live = _real(tensor)
            torch.from_numpy(out[span]).view(live.shape).copy_(live)

    def read_update(self, start: F32, out: F32) -> None:
        """How far the live tensors have come since `write(start)`: start minus now.

        The start is rounded as the live tensors were, or the rounding of a bfloat16 model would count as training.
        """
        self.read(out)
        for (_, tensor), span in zip(self._named, self._spans, strict=True):
            began, moved = torch.from_numpy(start[span]), torch.from_numpy(out[span])
            own = _real(tensor).dtype
            torch.sub(began if own == torch.float32 else began.to(own).float(), moved, out=moved)

    def refresh(self) -> None:
        """See that the model still consists of the tensors it had; one added or swapped would silently not train.

        Buffers may be new objects: modules assign them, and `Module.to` replaces them.
        """
        trainable, buffers = _trainable(self._model), averaged_buffers(self._model, self._policy)
        now = trainable + buffers
        if [(name, t.shape) for name, t in now] != [(name, t.shape) for name, t in self._named] or any(
            a is not b for (_, a), (_, b) in zip(trainable, self._named, strict=False)
        ):
            was = dict(self._named)
            names = {name for name, t in now if was.pop(name, None) is not t} | was.keys()
            raise ConfigError(
                f"the exchanged tensors of the model changed during training: {_some(sorted(names))}",
                hint="freeze, unfreeze or replace parameters before DiLoCo is made",
            )
        self._named = now


def refuse_strangers(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise if an optimizer trains something that is not part of the model: replicas would drift apart there."""
    own = set(model.parameters())
    for number, optimizer in enumerate(optimizers):
        for i, group in enumerate(optimizer.param_groups):
            strangers = [j for j, p in enumerate(group["params"]) if p not in own and p.requires_grad]
            if strangers:
                raise ConfigError(
                    f"optimizer {number}, group {i} trains parameters that are not the model's: {_some(strangers)}",
                    hint="put them in one module with the model, or build the optimizer after the model is final",
                )


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, little-endian; a view where it lies contiguous in main memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _real(tensor: Tensor) -> Tensor:
    """The tensor without its gradient; complex numbers as pairs."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _refuse_unusable(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ConfigError(f"`{name}` has no storage (device `meta`): materialise the model first")
    if hasattr(tensor, "to_local"):
        raise ConfigError(f"`{name}` is sharded over devices; only whole parameters can be exchanged")
    if dtype_name(_real(tensor).dtype) not in ITEM_BYTES:
        raise ConfigError(f"`{name}` is {tensor.dtype}; can exchange {', '.join(ITEM_BYTES)}")


def _some(items: Sequence[Any]) -> str:
    shown = ", ".join(f"`{item}`" for item in items[:5])
    return shown + (f" and {len(items) - 5} more" if len(items) > 5 else "")
