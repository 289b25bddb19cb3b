"""DiLoCo for a training loop of your own: call the outer loop every H optimizer steps, on every rank.

    outer = make_diloco_outer_loop(model, ObjectStoreAllReduce(uri, rank, world_size))
    outer.agree()                        # all ranks begin with the weights of rank 0
    for step, batch in enumerate(batches, start=1):
        train_one_step(model, batch)
        if step % 50 == 0:
            outer()                      # one exchange; the model now has the agreed weights

`atoll.DiLoCo` does more: it continues without lost replicas, resumes, compresses, and divides the reduction among the
replicas. This is the simple form: all ranks in every step, with the arithmetic of `torch.optim.SGD`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError, CorruptUpdate
from atoll.rounds.frames import digest
from atoll.training.model import BufferPolicy, averaged_buffers, check_policy, tensor_bytes

if TYPE_CHECKING:
    from atoll.stores.base import Store
    from atoll.training.allreduce import ObjectStoreAllReduce


def make_diloco_outer_loop(
    model: nn.Module,
    allreduce: ObjectStoreAllReduce | Store | str | os.PathLike[str],
    rank: int | None = None,
    world_size: int | None = None,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    buffers: BufferPolicy = "average",
    name: str = "outer",
    **options: Any,
) -> OuterLoop:
    """An outer loop for `model`: a callable that takes one outer step, with the same result on every rank.

    `allreduce` is an `ObjectStoreAllReduce`, or a URI or a store with the `rank`, `world_size` and `options` of one.
    `outer_lr=1, outer_momentum=0` is plain averaging of the weights.
    """
    from atoll.training.allreduce import ObjectStoreAllReduce

    if not isinstance(allreduce, ObjectStoreAllReduce):
        if rank is None or world_size is None:
            raise ConfigError("a URI needs rank and world_size too", reason="rank_missing")
        allreduce = ObjectStoreAllReduce(allreduce, rank, world_size, **options)
    elif options or rank is not None or world_size is not None:
        message = "the given ObjectStoreAllReduce has its own rank, world_size and options"
        raise ConfigError(message, reason="rank_twice")
    return OuterLoop(model, allreduce, outer_lr, outer_momentum, nesterov=nesterov, buffers=buffers, name=name)


class OuterLoop:
    """The agreed weights and the momentum, in float32 or wider, in main memory."""

    def __init__(
        self,
        model: nn.Module,
        allreduce: ObjectStoreAllReduce,
        lr: float,
        momentum: float,
        *,
        nesterov: bool,
        buffers: BufferPolicy,
        name: str,
    ) -> None:
        check_policy(buffers)
        self.allreduce = allreduce
        self.round = 0
        """Outer steps taken."""
        self._name, self._model, self._policy = name, model, buffers
        self._live = [p for p in model.parameters() if p.requires_grad]
        if not self._live:
            message = "the model has no trainable parameter, so there is nothing to exchange"
            raise ConfigError(message, reason="no_parameters")
        self._agreed = [_outer_copy(p) for p in self._live]
        self._optimizer = torch.optim.SGD(self._agreed, lr, momentum, nesterov=nesterov and momentum > 0)

    @torch.no_grad()
    def agree(self) -> None:
        """Take the weights and averaged buffers of rank 0. Call it on every rank, before the first optimizer step."""
        if self.round:
            raise ConfigError("`agree` must be called before the first outer step", reason="too_late")
        self.allreduce.broadcast([*self._live, *self._buffers()], f"{self._name} start")
        for agreed, live in zip(self._agreed, self._live, strict=True):
            agreed.copy_(live)

    @torch.no_grad()
    def __call__(self) -> int:
        """Exchange the updates since the last call, take the outer step, and write the result to the model.

        Returns the number of outer steps taken. After an error the model is unchanged, and the call can be repeated.
        Raises `PartsDiffer` with the ranks if their agreed weights differ.
        """
        moved = [
            agreed.to(live.dtype).to(agreed.dtype) - live.to(agreed)
            for agreed, live in zip(self._agreed, self._live, strict=True)
        ]
        buffers = self._buffers()
        averaged = [buffer.clone() for buffer in buffers]
        was_finite = _are_finite(moved)
        self.allreduce.allreduce_coalesced(
            [*moved, *averaged], self._name, note=f"round {self.round}, {self._digest()}"
        )
        if not _are_finite(moved):
            raise self._not_finite(is_ours=not was_finite)
        for agreed, gradient in zip(self._agreed, moved, strict=True):
            agreed.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()
        for live, agreed in zip([*self._live, *buffers], [*self._agreed, *averaged], strict=True):
            live.copy_(agreed)
        self.round += 1
        return self.round

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint between outer steps, besides the model; equal on all ranks."""
        return {"round": self.round, "agreed": list(self._agreed), "outer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; the model gets the agreed weights."""
        for agreed, live, saved in zip(self._agreed, self._live, state["agreed"], strict=True):
            agreed.copy_(saved)
            live.copy_(agreed)
        self._optimizer.load_state_dict(dict(state["outer"]))
        self.round = int(state["round"])

    def _buffers(self) -> list[Tensor]:
        return [buffer for _, buffer in averaged_buffers(self._model, self._policy)]

    def _digest(self) -> str:
        """The digest of the agreed weights and the momentum."""
        momentum = [self._optimizer.state[p].get("momentum_buffer") for p in self._agreed]
        return digest(*(tensor_bytes(t) for t in [*self._agreed, *momentum] if t is not None))

    def _not_finite(self, *, is_ours: bool) -> CorruptUpdate:
        whose = f"this rank ({self.allreduce.rank}) has" if is_ours else "another rank has"
        message = f"outer step {self.round} was not taken: {whose} weights that are not finite"
        rank = self.allreduce.rank if is_ours else -1
        return CorruptUpdate(message, round_no=self.round, rank=rank, check="finite")


def _outer_copy(parameter: Tensor) -> Tensor:
    """A copy in main memory; float16 and bfloat16 become float32, so that small outer steps are not rounded away."""
    wide = parameter.dtype if parameter.dtype.itemsize >= 4 else torch.float32
    return parameter.detach().to(device="cpu", dtype=wide, copy=True).contiguous()


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
