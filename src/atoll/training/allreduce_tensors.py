"""Tensors as raw bytes, and the mean of such bytes: the same bits on every rank, whatever machine it is.

Sums run in rank order. float16, bfloat16 and float8 are added up in float32 and rounded once, float32 in float32,
float64 in float64, complex numbers part by part. The mean of whole numbers is exact and then rounded to the nearest
whole number, halves to even; of truth values it is what most ranks say, and False when they are evenly split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.errors import ConfigError, CorruptUpdate
from atoll.training.params import dtype_name

Spec = tuple[str, tuple[int, ...]]


def check_tensor(tensor: object, what: str) -> None:
    """Raise unless the tensor has values that can be read and written in place."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"`{what}` is a `{type(tensor).__name__}`, not a tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or hasattr(tensor, "to_local"):
        raise ConfigError(f"`{what}` is sparse, quantized, nested or sharded; only plain tensors can be averaged")
    if tensor.is_meta:
        raise ConfigError(f"`{what}` has no storage (device `meta`)")
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ConfigError(
            f"`{what}` is an expanded view: its elements share memory, so the mean has no place to go",
            hint="give a tensor of its own: tensor.clone()",
        )


def specs_of(tensors: Sequence[Tensor]) -> tuple[Spec, ...]:
    return tuple((dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)


def as_payload(tensors: Sequence[Tensor]) -> memoryview:
    """The values one after the other, little-endian; a view where one tensor lies contiguous in main memory."""
    flat = [_bytes_of(tensor) for tensor in tensors]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    return joined.numpy().data.cast("B") if joined.numel() else memoryview(b"")


def check_size(payload: memoryview, like: Sequence[Tensor], name: str, rank: int) -> None:
    """Raise unless the payload has as many bytes as these tensors."""
    wanted = sum(tensor.numel() * tensor.element_size() for tensor in like)
    if payload.nbytes != wanted:
        message = f"what rank {rank} gave for `{name}` has {payload.nbytes} bytes, not {wanted}"
        raise CorruptUpdate(message, rank=rank, check="length")


def mean_of(payloads: Sequence[memoryview], like: Sequence[Tensor]) -> list[Tensor]:
    """The mean of the payloads, given in rank order, as tensors like these in main memory."""
    return [_mean([_cut(payload, span) for payload in payloads], tensor) for span, tensor in _spans(like)]


def values_of(payload: memoryview, like: Sequence[Tensor]) -> list[Tensor]:
    """A payload as tensors like these in main memory."""
    return [_typed(_cut(payload, span), tensor.dtype).reshape(tensor.shape) for span, tensor in _spans(like)]


def write_back(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Set tensors in place, wherever and however they lie."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8)


def _spans(like: Sequence[Tensor]) -> list[tuple[slice, Tensor]]:
    spans, start = [], 0
    for tensor in like:
        stop = start + tensor.numel() * tensor.element_size()
        spans.append((slice(start, stop), tensor))
        start = stop
    return spans


def _cut(payload: memoryview, span: slice) -> NDArray[np.uint8]:
    return np.frombuffer(payload[span], dtype=np.uint8)


def _typed(raw: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """A copy, aligned and writable: what comes from the store is neither."""
    return torch.from_numpy(raw.copy()).view(dtype) if raw.size else torch.empty(0, dtype=dtype)


def _mean(parts: Sequence[NDArray[np.uint8]], like: Tensor) -> Tensor:
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return _float_mean(parts, like.dtype).reshape(like.shape)
    # A truth value is one byte, 0 or 1.
    numbers = np.dtype("uint8" if like.dtype == torch.bool else dtype_name(like.dtype))
    mean = torch.from_numpy(_whole_mean([raw.copy().view(numbers) for raw in parts], numbers))
    return mean.to(like.dtype).reshape(like.shape)


def _float_mean(parts: Sequence[NDArray[np.uint8]], dtype: torch.dtype) -> Tensor:
    def summand(raw: NDArray[np.uint8]) -> Tensor:
        values = _typed(raw, dtype)
        real = torch.view_as_real(values) if dtype.is_complex else values
        return real if real.dtype == torch.float64 else real.float()

    total = summand(parts[0])
    for raw in parts[1:]:
        total += summand(raw)
    total /= len(parts)
    return torch.view_as_complex(total).to(dtype) if dtype.is_complex else total.to(dtype)


def _whole_mean(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Quotients and remainders are added up apart, so that no sum overflows."""
    count = len(parts)
    wide = np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
    quotients = np.zeros(parts[0].shape, wide)
    remainders = np.zeros(parts[0].shape, np.int64)
    for part in parts:
        values = part.astype(wide)
        quotients += values // wide.type(count)
        remainders += (values % wide.type(count)).astype(np.int64)
    floor = quotients + (remainders // count).astype(wide)
    twice = 2 * (remainders % count)
    is_up = (twice > count) | ((twice == count) & (floor % wide.type(2) == 1))
    rounded: NDArray[Any] = (floor + is_up.astype(wide)).astype(dtype)
    return rounded
