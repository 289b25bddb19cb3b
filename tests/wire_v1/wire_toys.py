"""The runs of the wire fixture: what each one trains, how it is written, stopped and continued.

`write.py` and `test_wire_v1.py` share this file, so a test continues a stored run with exactly the training that began
it. The result must have the same bits on every machine. So the training uses no matrix product, no reduction and no
random generator, and every constant is a power of two: each float32 operation rounds once, with or without a fused
multiply-add, in any order of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import atoll
from atoll.rounds.tuning import Tuning
from atoll.rounds.verify import verify

INLINE = Tuning(poll_first_s=0.001, poll_cap_s=0.02, turn_s=0.02)
"""Updates travel inside their offers, and every replica averages whole updates."""
SCATTER = replace(INLINE, inline_bytes=0, latency_s=0.0, bandwidth_bytes_s=1.0)
"""Small updates that travel like large ones: in chunks, each averaged and published by its owner."""
SMALL = {"weight": (13, 15), "bias": (43,), "scale": (), "late": (5, 12)}
LARGE = {"weight": (35, 60), "bias": (100,)}
INNER_STEPS = 4
VERIFIED = ("difference", "first_round", "rounds", "updates", "means", "trusted", "states", "records")
"""What is expected of the report of `atoll verify`: its numbers, not its words."""


@dataclass(frozen=True)
class Case:
    """One configuration. It has two runs in the fixture: `NAME-finished` and `NAME-stopped`."""

    name: str
    options: Mapping[str, Any]
    """Arguments of `atoll.DiLoCo`."""
    rounds: int = 3
    stop: int = 2
    """The stopped run has held this many rounds."""
    checkpoint: int | None = None
    """Of the stopped run; the finished one writes no checkpoints."""
    world_size: int = 2
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SMALL)
    is_mixed: bool = False
    """Whether the model has a bfloat16 tensor and a running average, and ranks weigh differently."""
    poisoned: tuple[int, int] | None = None
    """Rank and inner step whose gradient is not a number."""

    @property
    def finished(self) -> str:
        return f"{self.name}-finished"

    @property
    def stopped(self) -> str:
        return f"{self.name}-stopped"

    @property
    def runs(self) -> tuple[str, str]:
        return self.finished, self.stopped


_STREAM = {"fragments": 2, "delay": 1, "tuning": INLINE}
CASES = [
    Case("plain-fp32", {"codec": "fp32", "tuning": INLINE}, rounds=4, stop=3, checkpoint=2),
    Case("plain-bf16", {"codec": "bf16", "tuning": INLINE, "snapshot": 2}, rounds=6, stop=5),  # deletes old rounds
    Case("plain-int8", {"codec": "int8", "tuning": INLINE}),
    Case("plain-int4", {"codec": "int4", "tuning": INLINE}, rounds=4, stop=3, checkpoint=2),  # with error feedback
    Case("stream-fp32", {"codec": "fp32", **_STREAM}, rounds=4, stop=3),
    Case("stream-bf16", {"codec": "bf16", **_STREAM, "alpha": 0.25}, rounds=4, stop=3),
    Case("stream-int8", {"codec": "int8", **_STREAM, "eager": True}, rounds=4, stop=3),
    Case("stream-int4", {"codec": "int4", **_STREAM}, rounds=4, stop=3, checkpoint=2),
    Case("average", {"outer": atoll.Average(), "tuning": INLINE}, is_mixed=True),
    Case("rejected", {"codec": "fp32", "tuning": INLINE}, world_size=3, poisoned=(1, 5)),
    Case(
        "scatter-int8", {"codec": "int8", "tuning": SCATTER, "chunk": 1024}, world_size=3, shapes=LARGE, is_mixed=True
    ),
    Case("scatter-int4", {"codec": "int4", "tuning": SCATTER, "chunk": 2048}, world_size=3, shapes=LARGE),
]
"""All four codecs, blocking and streaming; and what else the format has: averages, rejected updates, chunks."""


class Stopped(Exception):
    """Stands for the end of the process, between two rounds."""


@dataclass(frozen=True)
class Final:
    """What one replica ends with."""

    weights: str
    """SHA-256 of all tensors of the model."""
    digest: str
    """The name of the agreed state."""


class Toy(nn.Module):
    """Parameters, and in a mixed model a bfloat16 one and a running average."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        for index, (name, shape) in enumerate(case.shapes.items()):
            self.register_parameter(name, nn.Parameter(fractions(shape, seed, index)))
        if case.is_mixed:
            self.narrow = nn.Parameter(fractions((33,), seed, 97).bfloat16())
            self.register_buffer("running", torch.zeros(21))

    def set_gradients(self, rank: int, step: int, *, is_poisoned: bool) -> None:
        """Half the distance to a target that depends on the rank and the step."""
        for index, parameter in enumerate(self.parameters()):
            target = fractions(tuple(parameter.shape), 1000 + 100 * rank + step, index)
            parameter.grad = ((parameter.detach().float() - target) * 0.5).to(parameter.dtype)
            if is_poisoned:
                parameter.grad.fill_(float("nan"))
        for buffer in self.buffers():
            buffer.copy_(buffer * 0.5 + fractions((21,), rank, step))


class Batches:
    """Endless batches that keep their own place; a batch is the number of its step, once for each element it has."""

    def __init__(self, size: int) -> None:
        self._size, self._next = size, 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self._next += 1
            yield torch.full((self._size,), self._next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def fractions(shape: tuple[int, ...], seed: int, index: int) -> Tensor:
    """Multiples of 2^-20 from -1 to 1 that look random, from whole numbers alone."""
    count = int(torch.Size(shape).numel())
    mixed = (torch.arange(count) + 7919 * seed + 104_729 * index) * 2_654_435_761 % (1 << 32)
    mixed = (mixed ^ (mixed >> 15)) * 2_246_822_519 % (1 << 32) >> 11
    return ((mixed - (1 << 20)).float() / (1 << 20)).reshape(shape)


def run_case(store: str, run_id: str, case: Case, *, attempt: int = 0, stop: bool = False, **options: Any) -> list[Any]:
    """Train all replicas as threads, from wherever the store has come to; what each one ends with."""

    def body(rank: int) -> Final | None:
        ctx = atoll.ReplicaContext(run_id, rank, case.world_size, store, attempt)
        try:
            return train(ctx, case, stop=case.stop if stop else None, **options)
        except Stopped:
            return None

    with ThreadPoolExecutor(case.world_size) as pool:
        return [future.result(timeout=120) for future in [pool.submit(body, r) for r in range(case.world_size)]]


def train(ctx: atoll.ReplicaContext, case: Case, *, stop: int | None = None, **options: Any) -> Final:
    """One replica, to the end of the run or until `stop` rounds are over."""
    model = Toy(case, seed=ctx.rank)  # other weights on every rank: those of the agreement count
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    batches = Batches(4 + ctx.rank if case.is_mixed else 4)
    settings = {"inner_steps": INNER_STEPS, "checkpoint": None, "snapshot": 99, **case.options, **options}
    with atoll.DiLoCo(model, inner, ctx, **settings) as outer:
        for batch in outer.steps(batches, rounds=case.rounds):
            if stop is not None and outer.round >= stop:
                raise Stopped
            step = int(batch[0])
            model.set_gradients(ctx.rank, step, is_poisoned=(ctx.rank, step) == case.poisoned)
            inner.step()
        digest = outer.digest
    return Final(weights_digest(model.state_dict().values()), digest)


def weights_digest(tensors: Any) -> str:
    """SHA-256 of the bytes of all tensors, in order."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def verified(store: str, run_id: str) -> dict[str, Any]:
    """What `atoll verify` counts in a run, and the first difference it finds."""
    report = asdict(verify(atoll.open_store(store), run_id))
    return {name: report[name] for name in VERIFIED}


def only(finals: list[Any]) -> Any:
    """What all replicas end with; an error if they differ."""
    (final,) = set(finals)
    return final
