"""torch kernels for the two operations that are slow in numpy: rounding to bfloat16, and fused multiply-add.

`install` runs when `atoll.training` is imported. It compares bits with numpy first, and a build of torch that computes
other bits is not used. torch gets lists of pieces that are too small for its thread pool: the callers are
threads already, and no thread setting of the process changes.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from atoll import kernels
from atoll.kernels import F32, U16

_PIECE = 31 << 10  # torch uses its thread pool from 32 Ki elements on


class TorchKernels(kernels.NumpyKernels):
    """The same bits as numpy for finite values; other values stay not finite."""

    name = "torch"

    def to_bf16(self, values: F32, out: U16) -> None:
        rounded = _tensor(out.view(np.int16)).view(torch.bfloat16)
        torch._foreach_copy_(torch.split(rounded, _PIECE), torch.split(_tensor(values), _PIECE))

    def fma(self, a: F32, b: np.float32, c: F32, out: F32) -> None:
        pieces = (torch.split(_tensor(array), _PIECE) for array in (a, c, out))
        for one, addend, total in zip(*pieces, strict=True):
            torch.add(addend, one, alpha=float(b), out=total)


def install() -> bool:
    """Use torch instead of numpy if it computes the same bits. Returns whether torch is used.

    Compiled kernels stay in use: they are as fast as memory allows.
    """
    if kernels.current().name == kernels.NUMPY.name and _agrees_with_numpy():
        kernels.use(TorchKernels())
    return kernels.current().name == TorchKernels.name


@cache
def _agrees_with_numpy() -> bool:
    """Compare numbers of all magnitudes, ties, and every position in a vector register."""
    rng = np.random.default_rng(0)
    theirs, ours = TorchKernels(), kernels.NUMPY
    for size in (*range(1, 18), 33, 4099):
        bits = rng.integers(0, 1 << 32, (2, size), dtype=np.uint32)
        bits[:, ::3] &= np.uint32(0xFFFF8000)
        a, c = np.where(np.isfinite(bits.view(np.float32)), bits.view(np.float32), np.float32(1))
        c[::2] = a[::2] * rng.uniform(-1, 1, a[::2].size).astype(np.float32)
        if not (_same_bf16(theirs, ours, a) and all(_same_fma(theirs, ours, a, b, c) for b in (0.9, -0.7, 2.0**-12))):
            return False
    return True


def _same_bf16(theirs: kernels.Kernels, ours: kernels.Kernels, values: F32) -> bool:
    each = np.empty((2, values.size), dtype=np.uint16)
    theirs.to_bf16(values, each[0])
    ours.to_bf16(values, each[1])
    return bool(np.array_equal(*each))


def _same_fma(theirs: kernels.Kernels, ours: kernels.Kernels, a: F32, b: float, c: F32) -> bool:
    each = np.empty((2, a.size), dtype=np.float32)
    theirs.fma(a, np.float32(b), c, each[0])
    ours.fma(a, np.float32(b), c, each[1])
    return bool(np.array_equal(*each.view(np.uint32)))


def _tensor(array: NDArray[np.float32] | NDArray[np.int16]) -> torch.Tensor:
    """The array as a tensor. torch would warn about read-only arrays; the kernels only read those."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Alias(array)))


class _Alias:
    """The memory of an array without its read-only flag."""

    def __init__(self, array: NDArray[np.float32] | NDArray[np.int16]) -> None:
        self._array = array  # kept alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
