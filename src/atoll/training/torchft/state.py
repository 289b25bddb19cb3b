"""What replicas agree on when torchft trains: the global parameters, and what the outer step needs besides them.

`FragmentState` is for `torchft.local_sgd.DiLoCo`: each fragment keeps its global parameters and an outer optimizer.
`WeightState` is for `LocalSGD`, which averages the weights themselves. Rounds know both by the same few methods.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.registry import install_command
from atoll.rounds.codecs.base import F32
from atoll.rounds.layout import ITEM_BYTES, Layout
from atoll.stores.base import Buffer
from atoll.training.checkpoint import pack, unpack
from atoll.training.model import dtype_name, tensor_bytes

FRAGMENT_KEY = "StreamingDiLoCoFragment_"
"""How the keys begin under which DiLoCo registers its fragments."""


class TorchftFragment(Protocol):
    """The part of torchft's own fragment that healing needs; it is reached through what it registers."""

    original_parameters: dict[str, Tensor]
    use_bucketization: bool
    bucket_cap_mb: int
    _model_fragment: nn.Module
    _outer_optimizer: torch.optim.Optimizer

    def save_parameters(self) -> None: ...
    def restore_parameters(self) -> None: ...


class AgreedState(Protocol):
    """What rounds need of the state that all replicas share."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """One for each fragment."""
        ...

    def initial(self) -> list[Buffer]:
        """The tensors before the first round, in layout order."""
        ...

    def adopt(self, buffers: Sequence[Buffer]) -> None:
        """Begin with these instead; live weights too."""
        ...

    def apply(self, fragment: int, mean: F32) -> None:
        """Do what a committed round does to the state; live weights of the fragment are the global ones afterwards."""
        ...

    def stand_in(self, fragment: int) -> F32 | None:
        """What one contributes whose own update means nothing, if that is not simply its own update."""
        ...

    def note(self, fragment: int, mean: F32) -> None:
        """A round that torchft itself applies was committed."""
        ...

    def export(self) -> dict[str, Buffer]:
        """A copy of the state."""
        ...

    def load(self, sections: Mapping[str, Buffer]) -> None:
        """Take over an exported state; live weights too."""
        ...


class FragmentState:
    """The fragments of a DiLoCo, in order."""

    def __init__(
        self, fragments: Mapping[str, tuple[TorchftFragment, Callable[[Any], None], Callable[[], Any]]]
    ) -> None:
        self._fragments = [fragments[f"{FRAGMENT_KEY}{i}"] for i in range(len(fragments))]
        self.layouts = [_layout(one.original_parameters.items()) for one, _, _ in self._fragments]

    def initial(self) -> list[Buffer]:
        return [tensor_bytes(t) for one, _, _ in self._fragments for t in one.original_parameters.values()]

    @torch.no_grad()
    def adopt(self, buffers: Sequence[Buffer]) -> None:
        rest = iter(buffers)
        for one, _, _ in self._fragments:
            for tensor in one.original_parameters.values():
                _fill(tensor, next(rest))
            one.restore_parameters()

    @torch.no_grad()
    def apply(self, fragment: int, mean: F32) -> None:
        one, _, _ = self._fragments[fragment]
        one.restore_parameters()
        # An optimizer shared by several fragments must not step the others with the gradients of the inner loop.
        one._outer_optimizer.zero_grad()
        for parameter, values in zip(one._model_fragment.parameters(), self._cut(fragment, mean), strict=True):
            parameter.grad = values.to(parameter).view_as(parameter)
        with torch.enable_grad():  # as torchft steps
            one._outer_optimizer.step()
        one._outer_optimizer.zero_grad()
        one.save_parameters()

    def stand_in(self, fragment: int) -> F32 | None:  # noqa: ARG002
        return None  # live weights are the global ones, so its own update is zero

    def note(self, fragment: int, mean: F32) -> None:
        pass

    def export(self) -> dict[str, Buffer]:
        return {str(i): b"".join(pack(save())) for i, (_, _, save) in enumerate(self._fragments)}

    def load(self, sections: Mapping[str, Buffer]) -> None:
        for i, (one, load, _) in enumerate(self._fragments):
            load(unpack(sections[str(i)]))
            one.restore_parameters()

    def _cut(self, fragment: int, mean: F32) -> Iterator[Tensor]:
        start = 0
        for tensor in self.layouts[fragment].tensors:
            yield torch.from_numpy(mean[start : start + tensor.size])
            start += tensor.size


class WeightState:
    """The weights as they were averaged last. Without a model, only what is handed in to be averaged is known."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], *, is_live: bool) -> None:
        self._named, self._is_live = list(named), is_live
        self.layouts = [_layout(self._named)]
        self._mean: F32 | None = None

    @classmethod
    def of_model(cls, model: nn.Module) -> WeightState:
        return cls(list(model.named_parameters()), is_live=True)

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> WeightState:
        return cls([(str(i), tensor) for i, tensor in enumerate(tensors)], is_live=False)

    def initial(self) -> list[Buffer]:
        return [tensor_bytes(tensor) for _, tensor in self._named]

    @torch.no_grad()
    def adopt(self, buffers: Sequence[Buffer]) -> None:
        if self._is_live:
            for (_, tensor), buffer in zip(self._named, buffers, strict=True):
                _fill(tensor, buffer)
        else:
            self._named.clear()  # tensors of the first round, which nobody needs any more

    @torch.no_grad()
    def apply(self, fragment: int, mean: F32) -> None:
        self.note(fragment, mean)
        if self._is_live:
            write_mean([tensor for _, tensor in self._named], mean)

    def stand_in(self, fragment: int) -> F32 | None:  # noqa: ARG002
        return self._mean

    def note(self, fragment: int, mean: F32) -> None:  # noqa: ARG002
        self._mean = mean

    def export(self) -> dict[str, Buffer]:
        assert self._mean is not None, "there is a mean once a round was committed"
        return {"mean": self._mean.tobytes()}

    def load(self, sections: Mapping[str, Buffer]) -> None:
        self.apply(0, np.frombuffer(sections["mean"], dtype=np.float32).copy())


def flat(tensors: Sequence[Tensor]) -> F32:
    """The tensors one after the other as float32: a copy in main memory."""
    vector = np.empty(sum(tensor.numel() for tensor in tensors), dtype=np.float32)
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel()
        torch.from_numpy(vector[start:stop]).copy_(tensor.detach().reshape(-1))
        start = stop
    return vector


def write_mean(tensors: Sequence[Tensor], mean: F32) -> None:
    """The inverse of `flat`: sets the tensors, each in its own dtype and on its own device."""
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel()
        tensor.detach().copy_(torch.from_numpy(mean[start:stop]).view(tensor.shape))
        start = stop


def fragment_behind(load: Callable[[Any], None], key: str) -> TorchftFragment:
    """The fragment that registered this function. DiLoCo hands out nothing else that leads to the live weights."""
    found = inspect.getclosurevars(load).nonlocals.get("self") if inspect.isfunction(load) else None
    wanted = ("original_parameters", "save_parameters", "restore_parameters", "_model_fragment", "_outer_optimizer")
    if not all(hasattr(found, name) for name in wanted):
        raise ConfigError(
            f"`{key}` was not registered by a torchft that is known here (0.2)",
            reason="version",
            hint=install_command("torchft"),
        )
    fragment = cast("TorchftFragment", found)
    _check_buckets(fragment, key)
    return fragment


def _check_buckets(fragment: TorchftFragment, key: str) -> None:
    """torchft's buckets lose tensors when there is more than one; the manager sends everything at once anyway."""
    if not getattr(fragment, "use_bucketization", False):
        return
    tensors = list(fragment.original_parameters.values())
    size = sum(t.numel() * t.element_size() for t in tensors)
    if size > fragment.bucket_cap_mb or len({t.dtype for t in tensors}) > 1:
        raise ConfigError(
            f"{key} does not fit into one bucket, and of several buckets torchft averages only the last",
            reason="buckets",
            hint="leave use_bucketization off: one exchange for each round is made in any case",
        )
    warnings.warn(f"{key}: use_bucketization is of no use here: one exchange is made in any case", stacklevel=4)


def _layout(named: Any) -> Layout:
    rows = [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in named]
    odd = [f"`{name}` is {dtype}" for name, _, dtype in rows if dtype not in ITEM_BYTES]
    if odd:
        raise ConfigError(f"{', '.join(odd[:3])}; can exchange {', '.join(ITEM_BYTES)}")
    return Layout.of(rows)


def _fill(tensor: Tensor, buffer: Buffer) -> None:
    if tensor.numel():
        values = torch.frombuffer(bytearray(buffer), dtype=tensor.dtype)
        tensor.detach().copy_(values.view(tensor.shape))
