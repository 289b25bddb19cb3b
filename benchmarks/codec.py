"""GB/s of float32 that codecs encode, decode and add up, and outer steps take, against memcpy in the same run.

Every cell is measured in turn, so that a busy moment hits all of them; medians, and their ratio to memcpy's. The
clock is the CPU time of the threads (so GB/s of one core), which others on the machine disturb least.
`reduce` is the mean of four encoded contributions, counted once for each of them.

    python benchmarks/codec.py [--values 16777216] [--repeat 9] [--threads 1] [--clock cpu] [--kernels native]
                               [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np

from atoll import kernels
from atoll.kernels import native
from atoll.kernels.native import NotUsable
from atoll.rounds.codecs.base import codec, codec_names
from atoll.rounds.outer import OuterRule, outer_step
from atoll.rounds.reduce import Accumulator, Coefficients

RANKS = 4
REFERENCE = {("bf16", "encode"): 1.4, ("bf16", "add"): 0.9, ("int8", "encode"): 0.52, ("int8", "add"): 0.89}
"""What the best tiled torch code reached of memcpy, on one core of a quiet machine."""

Cell = tuple[str, str, str]
"""Kernel, codec, operation."""


class Arrays:
    """The arrays of one thread."""

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.values = rng.standard_normal(count, dtype=np.float32) * np.float32(1e-3)
        self.copied, self.out, self.total = (np.zeros_like(self.values) for _ in range(3))
        self.buffer = np.zeros_like(self.values)
        self.payloads = {name: bytearray(codec(name).encoded_bytes(count)) for name in codec_names()}
        for name, payload in self.payloads.items():
            codec(name).encode_into(self.values, payload)

    def memcpy(self) -> None:
        np.copyto(self.copied, self.values)

    def encode(self, name: str) -> None:
        codec(name).encode_into(self.values, self.payloads[name])

    def decode(self, name: str) -> None:
        codec(name).decode_into(self.payloads[name], self.out)

    def add(self, name: str) -> None:
        codec(name).add_into(self.payloads[name], self.total)

    def reduce(self, name: str) -> None:
        accumulator = Accumulator(self.total.size, Coefficients.of([1.0] * RANKS), self.total)
        accumulator.add_all(codec(name), [self.payloads[name]] * RANKS)
        accumulator.mean()

    def outer(self, _name: str) -> None:
        outer_step(OuterRule(), self.out, self.buffer, self.values, is_first=False)


OPERATIONS: dict[str, tuple[Callable[[Arrays, str], None], int]] = {
    "encode": (Arrays.encode, 1), "decode": (Arrays.decode, 1), "add": (Arrays.add, 1),
    "reduce": (Arrays.reduce, RANKS),
}  # fmt: skip


def kernels_named(name: str) -> kernels.Kernels:
    if name == "numpy":
        return kernels.NUMPY
    if name == "native":
        return native.load()
    from atoll.training.kernels import TorchKernels

    return TorchKernels()


def kernels_there() -> list[str]:
    """Those that can be measured here."""
    there = ["numpy", *(["torch"] if find_spec("torch") else [])]
    try:
        native.load()
    except NotUsable as exc:
        print(f"without the compiled kernels: {exc}", file=sys.stderr)
        return there
    return [*there, "native"]


def plan(names: list[str]) -> dict[Cell, tuple[kernels.Kernels, Callable[[Arrays], None], int]]:
    """What to measure: with which kernels, how, and how many times the values are gone through."""
    cells: dict[Cell, tuple[kernels.Kernels, Callable[[Arrays], None], int]] = {
        ("-", "-", "memcpy"): (kernels.NUMPY, Arrays.memcpy, 1)
    }
    for kernel in names:
        installed = kernels_named(kernel)
        for name in codec_names():
            for operation, (do, times) in OPERATIONS.items():
                cells[kernel, name, operation] = (installed, lambda arrays, d=do, n=name: d(arrays, n), times)  # type: ignore[misc]
        cells[kernel, "-", "outer"] = (installed, lambda arrays: arrays.outer(""), 1)
    return cells


def cpu_seconds(do: Callable[[Arrays], None], arrays: Arrays) -> float:
    began = time.thread_time()
    do(arrays)
    return time.thread_time() - began


def measure(asked: argparse.Namespace) -> dict[Cell, float]:
    """GB/s: of one core by the CPU clock, of all threads together by the other."""
    count = asked.values // asked.threads
    every_thread = [Arrays(count, seed) for seed in range(asked.threads)]
    cells = plan(asked.kernels)
    seen: dict[Cell, list[float]] = {cell: [] for cell in cells}
    with ThreadPoolExecutor(asked.threads) as pool:
        for turn in range(asked.repeat + 1):
            for cell, (installed, do, times) in cells.items():
                kernels.use(installed)
                began = time.perf_counter()
                cpu_s = sum(pool.map(lambda arrays, d=do: cpu_seconds(d, arrays), every_thread))  # type: ignore[misc]
                spent_s = cpu_s if asked.clock == "cpu" else time.perf_counter() - began
                if turn:  # the first one warms up
                    seen[cell].append(4e-9 * count * times * len(every_thread) / spent_s)
    return {cell: statistics.median(rates) for cell, rates in seen.items()}


def rows(rates: dict[Cell, float]) -> list[dict[str, Any]]:
    memcpy = rates["-", "-", "memcpy"]
    return [
        {
            "kernel": kernel, "codec": name, "operation": operation, "gb_per_s": round(rate, 2),
            "of_memcpy": round(rate / memcpy, 2), "reference_of_memcpy": REFERENCE.get((name, operation)),
        }
        for (kernel, name, operation), rate in rates.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 24)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", nargs="+", choices=["numpy", "torch", "native"])
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well; - for the screen only")
    asked = parser.parse_args()
    asked.kernels = asked.kernels or kernels_there()
    table = rows(measure(asked))
    sizes = {name: codec(name).encoded_bytes(asked.values) / asked.values for name in codec_names()}
    result = {
        "values": asked.values,
        "threads": asked.threads,
        "clock": asked.clock,
        "bytes_per_value": sizes,
        "rows": table,
    }
    if asked.json:
        text = json.dumps(result, indent=1)
        if asked.json == "-":
            print(text)
            return
        with open(asked.json, "w") as file:
            file.write(text + "\n")
    print(f"{asked.values} values, {asked.threads} thread(s), {asked.clock} clock; bytes for each value: {sizes}")
    print(f"{'kernel':<7} {'codec':<5} {'operation':<9} {'GB/s':>6} {'/memcpy':>8} {'reference':>9}")
    for row in table:
        wanted = row["reference_of_memcpy"]
        print(
            f"{row['kernel']:<7} {row['codec']:<5} {row['operation']:<9} {row['gb_per_s']:>6.2f}"
            f" {row['of_memcpy']:>8.2f} {'' if wanted is None else f'{wanted:.2f}':>9}"
        )


if __name__ == "__main__":
    main()
