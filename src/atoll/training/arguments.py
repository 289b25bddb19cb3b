"""The rules for the arguments of `atoll.DiLoCo`, which are checked before any of them is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from atoll import arguments
from atoll.arguments import COUNT, SWITCH, Kind, a, is_count, is_number, is_whole, one_of
from atoll.context import ReplicaContext
from atoll.rounds.context import Tuning
from atoll.rounds.outer import OuterRule
from atoll.rounds.quorum import Quorum
from atoll.rounds.tuning import CHUNK_MULTIPLE
from atoll.training.feed import Stateful


def check_arguments(called: str, given: Mapping[str, Any]) -> SimpleNamespace:
    """The arguments of a method of `DiLoCo`, checked and with plain numbers; `given` is its `locals()`."""
    is_swapped = isinstance(given.get("model"), Optimizer) and isinstance(given.get("inner_optimizer"), nn.Module)
    hint = f"the model comes first: `{called}(model, inner_optimizer, …)`" if is_swapped else None
    return SimpleNamespace(**arguments.check_arguments(called, given, _KINDS, hint))


def _is_quorum(value: object) -> bool:
    return is_whole(value) or isinstance(value, Quorum)


def _is_chunk(value: Any) -> bool:
    return is_count(value) and bool(value % CHUNK_MULTIPLE == 0)


def _are_batches(value: object) -> bool:
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def _are_optimizers(value: object) -> bool:
    if isinstance(value, Sequence):
        return bool(value) and all(isinstance(one, Optimizer) for one in value)
    return isinstance(value, Optimizer) or (isinstance(value, Iterable) and not isinstance(value, nn.Module | Mapping))


def _are_stateful(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(one, Stateful) for name, one in value.items()
    )


_CODEC = Kind("the name of a codec, or None", a(str), may_be_none=True)
_KINDS: dict[str, Kind] = {
    "model": Kind("a torch model (`nn.Module`)", a(nn.Module)),
    "inner_optimizer": Kind("a torch optimizer, or a list of them", _are_optimizers),
    "ctx": Kind("the `ctx` that your function is given, or None", a(ReplicaContext), may_be_none=True),
    "inner_steps": COUNT,
    "outer": Kind("Nesterov(…), Average() or None", a(OuterRule), may_be_none=True),
    "codec": _CODEC,
    "mean_codec": _CODEC,
    "error_feedback": Kind("True, False or None", a(bool), may_be_none=True),
    "fragments": COUNT,
    "delay": Kind("a whole number of steps, or None", is_whole, may_be_none=True),
    "alpha": Kind("a number from 0 to 1, or None", is_number, may_be_none=True),
    "eager": SWITCH,
    "quorum": Kind("a number of replicas, Quorum(…), or None for all of them", _is_quorum, may_be_none=True),
    "buffers": Kind("`average` or `local`", one_of("average", "local")),
    "checkpoint": Kind("a whole number from 1, or None for never", is_count, may_be_none=True),
    "snapshot": COUNT,
    "stateful": Kind(
        "a mapping of names to things with `state_dict` and `load_state_dict`", _are_stateful, may_be_none=True
    ),
    "tuning": Kind("Tuning(…) or None", a(Tuning), may_be_none=True),
    "chunk": Kind(f"a multiple of {CHUNK_MULTIPLE} elements, or None", _is_chunk, may_be_none=True),
    "batches": Kind("something to iterate over, such as a DataLoader", _are_batches),
    "rounds": COUNT,
    "weigh": Kind("a function of a batch", callable),
}
