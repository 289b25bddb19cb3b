"""The state that torchft replicas agree on: the global parameters, and the state of the outer step.

`FragmentState` is for `torchft.local_sgd.DiLoCo`: each fragment has its global parameters and an outer optimizer.
`WeightState` is for `LocalSGD`, which averages the weights themselves. `TorchftRounds` uses both as `AgreedState`.
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
"""The prefix of the keys under which DiLoCo registers its fragments."""


class TorchftFragment(Protocol):
    """The part of torchft's fragment that healing needs; the manager finds it through the registered functions."""

    original_parameters: dict[str, Tensor]
    use_bucketization: bool
    bucket_cap_mb: int
    _model_fragment: nn.Module
    _outer_optimizer: torch.optim.Optimizer

    def save_parameters(self) -> None: ...
    def restore_parameters(self) -> None: ...


class AgreedState(Protocol):
    """The agreed state, as `TorchftRounds` uses it."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """One layout for each fragment."""
        ...

    def initial(self) -> list[Buffer]:
        """The tensors before the first round, in layout order."""
        ...

    def adopt(self, buffers: Sequence[Buffer]) -> None:
        """Replace the initial tensors, and the live weights, by these."""
        ...

    def apply(self, fragment: int, mean: F32) -> None:
        """Apply the mean of a committed round; the live weights of the fragment become the global ones."""
        ...

    def placeholder(self, fragment: int) -> F32 | None:
        """The contribution of a replica without an update of its own; None: its computed update is right."""
        ...

    def note(self, fragment: int, mean: F32) -> None:
        """Record the mean of a committed round that torchft itself applies."""
        ...

    def export(self) -> dict[str, Buffer]:
        """A copy of the state."""
        ...

    def load(self, sections: Mapping[str, Buffer]) -> None:
        """Load an exported state; live weights too."""
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
        # If fragments share an optimizer, its step must not use the inner loop's gradients of the other fragments.
        one._outer_optimizer.zero_grad()
        for parameter, values in zip(one._model_fragment.parameters(), self._cut(fragment, mean), strict=True):
            parameter.grad = values.to(parameter).view_as(parameter)
        with torch.enable_grad():  # as torchft steps
            one._outer_optimizer.step()
        one._outer_optimizer.zero_grad()
        one.save_parameters()

    def placeholder(self, fragment: int) -> F32 | None:  # noqa: ARG002
        return None  # the live weights are the global ones, so the update is zero

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
    """The weights after the last mean. Without a model, only the tensors of a round are known."""

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
            self._named.clear()  # the tensors of the first round are no longer needed

    @torch.no_grad()
    def apply(self, fragment: int, mean: F32) -> None:
        self.note(fragment, mean)
        if self._is_live:
            write_mean([tensor for _, tensor in self._named], mean)

    def placeholder(self, fragment: int) -> F32 | None:  # noqa: ARG002
        return self._mean

    def note(self, fragment: int, mean: F32) -> None:  # noqa: ARG002
        self._mean = mean

    def export(self) -> dict[str, Buffer]:
        assert self._mean is not None, "the first committed round sets it"
        return {"mean": self._mean.tobytes()}

    def load(self, sections: Mapping[str, Buffer]) -> None:
        self.apply(0, np.frombuffer(sections["mean"], dtype=np.float32).copy())


def flat(tensors: Sequence[Tensor]) -> F32:
    """A copy of the tensors as one float32 vector in main memory."""
    vector = np.empty(sum(tensor.numel() for tensor in tensors), dtype=np.float32)
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel()
        torch.from_numpy(vector[start:stop]).copy_(tensor.detach().reshape(-1))
        start = stop
    return vector


def write_mean(tensors: Sequence[Tensor], mean: F32) -> None:
    """Set the tensors, each with its own dtype and device: the inverse of `flat`."""
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel()
        tensor.detach().copy_(torch.from_numpy(mean[start:stop]).view(tensor.shape))
        start = stop


def fragment_behind(load: Callable[[Any], None], key: str) -> TorchftFragment:
    """The fragment that registered this function: the only way from DiLoCo's interface to the live weights."""
    found = inspect.getclosurevars(load).nonlocals.get("self") if inspect.isfunction(load) else None
    wanted = ("original_parameters", "save_parameters", "restore_parameters", "_model_fragment", "_outer_optimizer")
    if not all(hasattr(found, name) for name in wanted):
        raise ConfigError(
            f"`{key}` was registered by an unknown version of torchft; the manager supports 0.2",
            reason="version",
            hint=install_command("torchft"),
        )
    fragment = cast("TorchftFragment", found)
    _check_buckets(fragment, key)
    return fragment


def _check_buckets(fragment: TorchftFragment, key: str) -> None:
    """Refuse more than one bucket, because torchft would lose tensors; one bucket has no effect."""
    if not getattr(fragment, "use_bucketization", False):
        return
    tensors = list(fragment.original_parameters.values())
    size = sum(t.numel() * t.element_size() for t in tensors)
    if size > fragment.bucket_cap_mb or len({t.dtype for t in tensors}) > 1:
        raise ConfigError(
            f"{key} does not fit into one bucket, and torchft averages only the last of several buckets",
            reason="buckets",
            hint="turn use_bucketization off: the manager makes one exchange for each round",
        )
    warnings.warn(
        f"{key}: use_bucketization has no effect: the manager makes one exchange for each round", stacklevel=4
    )


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
