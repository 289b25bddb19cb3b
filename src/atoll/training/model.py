"""A model as one flat float32 vector: which tensors are exchanged, in which order, and how to read and write them.

The vector has one or more fragments of whole tensors, about equal in size. In each fragment the trainable parameters
come first, each once even if modules share it, then the averaged buffers. Frozen parameters are not exchanged; replicas
compare their digests. The vector is float32 for any type of model: a bfloat16 model trains on a rounded copy.

Buffers, `average`: persistent floating-point buffers (BatchNorm statistics) are averaged with the weights, so that
every replica has the same model after a round. Other buffers stay local: every replica computes the same counters and
masks. `local`: no buffer is exchanged, and each replica keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.errors import ConfigError, CorruptUpdate
from atoll.rounds.codecs.base import F32
from atoll.rounds.frames import digest
from atoll.rounds.layout import ITEM_BYTES, Layout
from atoll.stores.base import Buffer

BufferPolicy: TypeAlias = Literal["average", "local"]
_COMPILED = "_orig_mod."  # the prefix that torch.compile adds to every name


class ModelVector:
    """The exchanged tensors of a model, and the position of each in the vector.

    Methods with a `fragment` work on that part of the vector, and without one on all of it; their arrays have the size
    of that part.
    """

    def __init__(self, model: nn.Module, policy: BufferPolicy = "average", fragments: int = 1) -> None:
        self._model, self._policy = model, policy
        trainable = _trainable(model)
        if not trainable:
            message = "the model has no trainable parameter, so there is nothing to exchange"
            raise ConfigError(message, reason="no_parameters")
        named = trainable + averaged_buffers(model, policy)
        for name, tensor in named:
            _check_usable(name, tensor)
        groups = balanced([_real(tensor).numel() for _, tensor in named], fragments)
        self._order = [i for group in groups for i in group]
        self._named = [named[i] for i in self._order]
        self.layouts = [Layout.of(_described(*named[i]) for i in group) for group in groups]
        self._compute_spans(groups, len(trainable))

    def _compute_spans(self, groups: Sequence[Sequence[int]], trainable: int) -> None:
        sizes = [t.size for layout in self.layouts for t in layout.tensors]
        self._spans = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        lasts = list(accumulate(len(group) for group in groups))
        self._tensors_of = [range(last - len(group), last) for group, last in zip(groups, lasts, strict=True)]
        self.fragments = [slice(self._spans[m[0]].start, self._spans[m[-1]].stop) for m in self._tensors_of]
        """The slice of each fragment in the vector."""
        averaged = [[self._spans[i].start for i in m if self._order[i] >= trainable] for m in self._tensors_of]
        self.averaged_from = [min([f.stop, *a]) for f, a in zip(self.fragments, averaged, strict=True)]
        """The position in the vector where the averaged buffers of each fragment begin."""

    @property
    def size(self) -> int:
        return self.fragments[-1].stop

    def frozen_digest(self) -> str:
        """The digest of the frozen parameters; empty without any."""
        frozen = [(name, p) for name, p in self._model.named_parameters() if not p.requires_grad]
        parts = [part for name, p in frozen for part in (name.replace(_COMPILED, "").encode(), tensor_bytes(p))]
        return digest(*parts) if parts else ""

    def tensors(self) -> list[Buffer]:
        """The live tensors as bytes in their own types, in layout order."""
        return [tensor_bytes(tensor) for _, tensor in self._named]

    def values_of(self, buffers: Sequence[Buffer]) -> F32:
        """The vector of what `tensors` returned on some replica."""
        values = np.empty(self.size, dtype=np.float32)
        tensors = [tensor for layout in self.layouts for tensor in layout.tensors]
        for tensor, span, buffer in zip(tensors, self._spans, buffers, strict=True):
            if memoryview(buffer).nbytes != tensor.size_bytes:
                raise CorruptUpdate(f"`{tensor.name}` has {memoryview(buffer).nbytes} bytes", check="layout")
            if tensor.size:
                found = torch.frombuffer(bytearray(buffer), dtype=getattr(torch, tensor.dtype))
                torch.from_numpy(values[span]).copy_(found)
        return values

    def write(self, values: F32, fragment: int | None = None) -> None:
        """Set the live tensors to these values, rounded to each tensor's own type."""
        with torch.no_grad():
            for live, given in self._pairs(values, fragment):
                live.copy_(given)

    def mix(self, values: F32, alpha: float, fragment: int) -> None:
        """Set the live tensors to `(1 - alpha) * values + alpha * live`."""
        with torch.no_grad():
            for live, given in self._pairs(values, fragment):
                wide = _wide(live)
                live.copy_(torch.lerp(given.to(wide), wide, alpha))

    def shift(self, offsets: F32, fragment: int) -> None:
        """Add the offsets to the live tensors."""
        with torch.no_grad():
            for live, given in self._pairs(offsets, fragment):
                wide = _wide(live)
                live.copy_(wide + given.to(wide))

    def read(self, out: F32, fragment: int | None = None) -> None:
        """Copy the live tensors to `out`."""
        for live, target in self._pairs(out, fragment):
            target.copy_(live)

    def read_update(self, start: F32, out: F32, fragment: int | None = None) -> None:
        """Write to `out` how far the live tensors have moved since `write(start)`: start minus now.

        The start is rounded like the live tensors; otherwise the rounding of a bfloat16 model would count as training.
        """
        self.read(out, fragment)
        for (live, moved), (_, began) in zip(self._pairs(out, fragment), self._pairs(start, fragment), strict=True):
            torch.sub(began if live.dtype == torch.float32 else began.to(live.dtype).float(), moved, out=moved)

    def live(self) -> list[Tensor]:
        """The live tensors in their own types, in layout order."""
        return [_real(tensor) for _, tensor in self._named]

    def load_live(self, saved: Sequence[Tensor]) -> None:
        """Set the live tensors to what `live` returned."""
        with torch.no_grad():
            for (_, tensor), value in zip(self._named, saved, strict=True):
                _real(tensor).copy_(value)

    def refresh(self) -> None:
        """Raise if parameters were added or replaced since the start: they would silently not be exchanged.

        Buffers may be new objects, because modules assign them and `Module.to` replaces them.
        """
        trainable = _trainable(self._model)
        now = trainable + averaged_buffers(self._model, self._policy)
        was = [named for _, named in sorted(zip(self._order, self._named, strict=True), key=lambda pair: pair[0])]
        if [(name, t.shape) for name, t in now] != [(name, t.shape) for name, t in was] or any(
            a is not b for (_, a), (_, b) in zip(trainable, was, strict=False)
        ):
            before = dict(was)
            names = {name for name, t in now if before.pop(name, None) is not t} | before.keys()
            raise ConfigError(
                f"the exchanged tensors of the model changed during training: {_some(sorted(names))}",
                reason="changed",
                hint="freeze, unfreeze or replace parameters before DiLoCo is constructed",
            )
        self._named = [now[i] for i in self._order]

    def _pairs(self, array: F32, fragment: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Each live tensor with its part of the array."""
        members = range(len(self._named)) if fragment is None else self._tensors_of[fragment]
        origin = self._spans[members[0]].start
        for i in members:
            span, live = self._spans[i], _real(self._named[i][1])
            yield live, torch.from_numpy(array[span.start - origin : span.stop - origin]).view(live.shape)


def check_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise if an optimizer trains parameters outside of the model: they would differ between replicas."""
    own = set(model.parameters())
    for number, optimizer in enumerate(optimizers):
        for i, group in enumerate(optimizer.param_groups):
            others = [j for j, p in enumerate(group["params"]) if p not in own and p.requires_grad]
            if others:
                raise ConfigError(
                    f"optimizer {number}, group {i} trains parameters that are not the model's: {_some(others)}",
                    reason="other_parameters",
                    hint="put them in one module with the model, or build the optimizer after the model is final",
                )


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, little-endian; a view if it is contiguous in main memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(name: str, tensor: Tensor) -> tuple[str, torch.Size, str]:
    live = _real(tensor)
    return name.replace(_COMPILED, ""), live.shape, dtype_name(live.dtype)


def _wide(live: Tensor) -> Tensor:
    """The tensor in a type for computing: at least float32."""
    return live if live.dtype == torch.float64 else live.float()


def _trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _real(tensor: Tensor) -> Tensor:
    """The tensor without its gradient; complex numbers as pairs."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _check_usable(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ConfigError(f"`{name}` has no storage (device `meta`): materialise the model first")
    if hasattr(tensor, "to_local"):
        raise ConfigError(f"`{name}` is sharded over devices; only whole parameters can be exchanged")
    if dtype_name(_real(tensor).dtype) not in ITEM_BYTES:
        raise ConfigError(f"`{name}` is {tensor.dtype}; can exchange {', '.join(ITEM_BYTES)}")


def _some(items: Sequence[Any]) -> str:
    shown = ", ".join(f"`{item}`" for item in items[:5])
    return shown + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def check_policy(policy: str) -> None:
    if policy not in ("average", "local"):
        raise ConfigError(f"buffers={policy!r}: `average` or `local`")


def averaged_buffers(model: nn.Module, policy: BufferPolicy) -> list[tuple[str, Tensor]]:
    """The buffers that are exchanged, by name."""
    return [] if policy == "local" else [(name, b) for name, b in persistent_buffers(model) if b.is_floating_point()]


def local_buffers(model: nn.Module, policy: BufferPolicy) -> dict[str, Tensor]:
    """The persistent buffers that are not exchanged; a checkpoint saves them."""
    exchanged = {name for name, _ in averaged_buffers(model, policy)}
    return {name: buffer for name, buffer in persistent_buffers(model) if name not in exchanged}


def restore_buffers(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Set the local buffers to the saved ones."""
    own = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in saved.items():
            if name in own:
                own[name].copy_(value)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of the model's state, each once even if modules share it."""
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or buffer in seen:
                continue
            seen.add(buffer)
            yield f"{prefix}.{name}" if prefix else name, buffer


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The indices of `sizes` in `count` groups: each size, from the largest, goes to the smallest group so far.

    Indices ascend within a group; groups are ordered by their first index. The result depends on nothing else, so every
    replica gets the same groups.
    """
    usable = sum(1 for size in sizes if size)
    if count > usable:
        raise ConfigError(
            f"fragments={count}: the model has {usable} tensors to exchange, and a fragment is made of whole tensors"
        )
    groups: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        smallest = totals.index(min(totals))
        groups[smallest].append(index)
        totals[smallest] += sizes[index]
    return sorted(sorted(group) for group in groups)
