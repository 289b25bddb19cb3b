"""The mean of tensors over ranks that share only a store: for training loops that do not use `DiLoCo`.

    with ObjectStoreAllReduce("s3://bucket/exp", rank, world_size) as ar:
        for step in range(1000):
            loss.backward()
            ar.allreduce_coalesced([p.grad for p in model.parameters()], "grads")   # one exchange
            optimizer.step()

Every rank calls with the same names and gets the same bits. `make_diloco_outer_loop` builds DiLoCo on it.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import ConfigError, CorruptUpdate, InvalidSpec
from atoll.errors import PartsDiffer as PartsDiffer
from atoll.registry import open_store
from atoll.rounds.io import Counters
from atoll.rounds.named.client import NamedClient
from atoll.rounds.named.exchange import NamedContribution
from atoll.rounds.named.keys import check_name
from atoll.stores.base import Store
from atoll.training.allreduce_outer import OuterLoop as OuterLoop
from atoll.training.allreduce_outer import make_diloco_outer_loop as make_diloco_outer_loop
from atoll.training.model import dtype_name

Spec = tuple[str, tuple[int, ...]]


class ObjectStoreAllReduce:
    """Blocking means by name. The constructor sends no request.

    Ranks with the same `uri`, `world_size` and `round_id` work together; use different `round_id`s for jobs that share
    a prefix at the same time, and for two objects in one process. Objects that an earlier job left in the store are
    never mistaken for a live rank. All ranks start and end together: if a rank restarts before the first mean, all
    begin again; later, the other ranks get `QuorumLost` with its number, and every rank needs a new object.

    Raises, within `timeout_s`: `QuorumLost` with the ranks that are missing (also a `TimeoutError` if the time is up),
    `PartsDiffer` with the tensors of each rank if shapes or dtypes differ, `CorruptUpdate`, `Fenced` if another process
    has this rank, `StoreError`. After `QuorumLost` or `StoreError` the same call can be repeated and waits for the same
    mean.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Store,
        rank: int,
        world_size: int,
        *,
        round_id: str | int | None = None,
        timeout_s: float = 1800.0,
        poll_interval_s: float = 0.05,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        """`poll_interval_s` is the first pause between two polls of the store; later pauses grow to 2 s."""
        _check(rank, world_size, timeout_s, poll_interval_s)
        self.store = open_store(uri) if isinstance(uri, str | os.PathLike) else uri
        self.uri, self.rank, self.world_size = self.store.uri, rank, world_size
        self.round_id = None if round_id is None else check_name("round_id", str(round_id))
        self._client = NamedClient(
            self.store, self.round_id, rank, world_size,
            timeout_s=timeout_s, poll_first_s=poll_interval_s, clock=clock, rng=rng,
        )  # fmt: skip

    @property
    def counters(self) -> Counters:
        """Requests and bytes so far."""
        return self._client.counters

    def allreduce(self, tensor: Tensor, name: str) -> Tensor:
        """Replace `tensor` by its mean over all ranks, and return it.

        Any shape, dtype and device; `_mean` says how each dtype is averaged, NaN and infinity like other values.
        Gradients do not flow through it. Names are free, and may be used again.
        """
        self.allreduce_coalesced([tensor], name)
        return tensor

    def allreduce_coalesced(self, tensors: Sequence[Tensor], name: str, *, note: str = "") -> Sequence[Tensor]:
        """Replace several tensors by their means in one exchange. `note` must be the same text on every rank."""
        payloads = self._exchange(tensors, name, "mean", note)
        if self.world_size > 1:
            for rank, payload in enumerate(payloads):
                _check_size(payload, tensors, name, rank)
            _write_back(tensors, _mean_of(payloads, tensors))
        return tensors

    def broadcast(self, tensors: Sequence[Tensor], name: str, *, root: int = 0) -> Sequence[Tensor]:
        """Replace the tensors of every rank by those of rank `root`."""
        if not 0 <= root < self.world_size:
            raise InvalidSpec("broadcast", [f"root={root}: a rank from 0 to {self.world_size - 1}"])
        payloads = self._exchange(tensors, name, f"broadcast from {root}", sends=self.rank == root)
        if self.rank != root:
            _check_size(payloads[root], tensors, name, root)
            _write_back(tensors, _values_of(payloads[root], tensors))
        return tensors

    def close(self) -> None:
        """Leave the other ranks; the last rank deletes the remaining objects. The object cannot be used afterwards."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(
        self, tensors: Sequence[Tensor], name: str, operation: str, note: str = "", *, sends: bool = True
    ) -> list[memoryview]:
        check_name("name", name)
        for i, tensor in enumerate(tensors):
            _check_tensor(tensor, name if len(tensors) == 1 else f"{name}[{i}]")
        payload = _as_payload(tensors) if sends else memoryview(b"")
        if self.world_size == 1:
            return [payload]
        found = self._client.exchange(name, NamedContribution(operation, _specs_of(tensors), note, payload))
        return [read.payload for read in found]


def _check(rank: int, world_size: int, timeout_s: float, poll_interval_s: float) -> None:
    problems = []
    if not _is_whole(world_size) or world_size < 1:
        problems.append(f"world_size={world_size!r}: a whole number from 1")
    elif not _is_whole(rank) or not 0 <= rank < world_size:
        problems.append(f"rank={rank!r}: a whole number from 0 to {world_size - 1}")
    for name, value in (("timeout_s", timeout_s), ("poll_interval_s", poll_interval_s)):
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            problems.append(f"{name}={value!r}: seconds above 0")
    if problems:
        raise InvalidSpec("all-reduce", problems)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_tensor(tensor: object, what: str) -> None:
    """Raise unless the values of the tensor can be read and written in place."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"`{what}` is a `{type(tensor).__name__}`, not a tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or hasattr(tensor, "to_local"):
        raise ConfigError(f"`{what}` is sparse, quantized, nested or sharded; only plain tensors can be averaged")
    if tensor.is_meta:
        raise ConfigError(f"`{what}` has no storage (device `meta`)")
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ConfigError(
            f"`{what}` is an expanded view: its elements share memory, so the mean cannot be written to it",
            hint="pass a copy: tensor.clone()",
        )


def _specs_of(tensors: Sequence[Tensor]) -> tuple[Spec, ...]:
    return tuple((dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)


def _as_payload(tensors: Sequence[Tensor]) -> memoryview:
    """All values, little-endian; a view if there is one tensor, contiguous in main memory."""
    flat = [_bytes_of(tensor) for tensor in tensors]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    return joined.numpy().data.cast("B") if joined.numel() else memoryview(b"")


def _check_size(payload: memoryview, like: Sequence[Tensor], name: str, rank: int) -> None:
    """Raise unless the payload has as many bytes as these tensors."""
    wanted = sum(tensor.numel() * tensor.element_size() for tensor in like)
    if payload.nbytes != wanted:
        message = f"the contribution of rank {rank} to `{name}` has {payload.nbytes} bytes, not {wanted}"
        raise CorruptUpdate(message, rank=rank, check="length")


def _mean_of(payloads: Sequence[memoryview], like: Sequence[Tensor]) -> list[Tensor]:
    """The mean of the payloads, which are in rank order, as tensors like these in main memory."""
    return [_mean([_cut(payload, span) for payload in payloads], tensor) for span, tensor in _spans(like)]


def _values_of(payload: memoryview, like: Sequence[Tensor]) -> list[Tensor]:
    """A payload as tensors like these in main memory."""
    return [_typed(_cut(payload, span), tensor.dtype).reshape(tensor.shape) for span, tensor in _spans(like)]


def _write_back(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Set tensors in place, on any device and with any strides."""
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
    """An aligned, writable copy; a payload from the store is neither."""
    return torch.from_numpy(raw.copy()).view(dtype) if raw.size else torch.empty(0, dtype=dtype)


def _mean(parts: Sequence[NDArray[np.uint8]], like: Tensor) -> Tensor:
    """The mean, with the same bits on every machine: sums run in rank order.

    float16, bfloat16 and float8 are added in float32 and rounded once, float32 in float32, float64 in float64, complex
    numbers part by part. The mean of integers is exact, then rounded to the nearest integer, halves to even. The mean
    of truth values is that of the majority, and False for a tie.
    """
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
    """Add quotients and remainders separately, so that no sum overflows."""
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
