"""What kind of thing each argument of `atoll.DiLoCo` is, looked at before anything is done with any of them.

Numbers that do not fit each other are found later, by those who know what they are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple, ParamSpec

import numpy as np
from torch import nn
from torch.optim import Optimizer

from atoll.arguments import call_problems, shown
from atoll.context import ReplicaContext
from atoll.errors import InvalidSpec
from atoll.rounds.layout import CHUNK_MULTIPLE
from atoll.rounds.member import Tuning
from atoll.rounds.outer import OuterRule
from atoll.rounds.quorum import Quorum
from atoll.training.feed import Stateful

P = ParamSpec("P")


class _Kind(NamedTuple):
    """What an argument is, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]
    may_be_none: bool = False


def checked(init: Callable[P, None]) -> Callable[P, None]:
    """An `__init__` that raises `InvalidSpec` with every argument that is not there, or not what it must be.

    Numbers of numpy are taken as those of Python, which can be written down for the other replicas.
    """
    make: Callable[..., None] = init

    @wraps(init)
    def checking(*given: P.args, **named: P.kwargs) -> None:
        made, bound = type(given[0]).__name__, MethodType(init, given[0])
        if problems := call_problems(bound, given[1:], named):
            raise InvalidSpec(made, problems)
        call = signature(bound).bind(*given[1:], **named)
        call.arguments.update({name: _plain(value) for name, value in call.arguments.items()})
        if problems := list(_problems(call.arguments)):
            raise InvalidSpec(made, problems, hint=_hint(call.arguments, made))
        make(given[0], *call.args, **call.kwargs)

    return checking


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in _KINDS.items():
        if name not in arguments:
            continue
        value = arguments[name]
        if not kind.fits(value) and not (value is None and kind.may_be_none):
            yield f"{name}={shown(value)}: {kind.words}"


def _hint(arguments: Mapping[str, Any], made: str) -> str | None:
    is_swapped = isinstance(arguments["model"], Optimizer) and isinstance(arguments["inner_optimizer"], nn.Module)
    return f"the model comes first: `{made}(model, inner_optimizer, …)`" if is_swapped else None


def _a(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_quorum(value: object) -> bool:
    return _is_whole(value) or isinstance(value, Quorum)


def _is_chunk(value: Any) -> bool:
    return _is_count(value) and value % CHUNK_MULTIPLE == 0


def _are_optimizers(value: object) -> bool:
    if isinstance(value, Sequence):
        return bool(value) and all(isinstance(one, Optimizer) for one in value)
    return isinstance(value, Optimizer) or (isinstance(value, Iterable) and not isinstance(value, nn.Module | Mapping))


def _are_stateful(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(one, Stateful) for name, one in value.items()
    )


_COUNT = _Kind("a whole number from 1", _is_count)
_CODEC = _Kind("the name of a codec, or None", _a(str), may_be_none=True)
_KINDS: dict[str, _Kind] = {
    "model": _Kind("a torch model (`nn.Module`)", _a(nn.Module)),
    "inner_optimizer": _Kind("a torch optimizer, or a list of them", _are_optimizers),
    "ctx": _Kind("the `ctx` that your function is given, or None", _a(ReplicaContext), may_be_none=True),
    "inner_steps": _COUNT,
    "outer": _Kind("Nesterov(…), Average() or None", _a(OuterRule), may_be_none=True),
    "codec": _CODEC,
    "mean_codec": _CODEC,
    "error_feedback": _Kind("True, False or None", _a(bool), may_be_none=True),
    "fragments": _COUNT,
    "delay": _Kind("a whole number of steps, or None", _is_whole, may_be_none=True),
    "alpha": _Kind("a number from 0 to 1, or None", _is_number, may_be_none=True),
    "eager": _Kind("True or False", _a(bool)),
    "quorum": _Kind("a number of replicas, Quorum(…), or None for all of them", _is_quorum, may_be_none=True),
    "buffers": _Kind("`average` or `local`", lambda policy: policy in ("average", "local")),
    "checkpoint": _Kind("a whole number from 1, or None for never", _is_count, may_be_none=True),
    "snapshot": _COUNT,
    "stateful": _Kind(
        "a mapping of names to things with `state_dict` and `load_state_dict`", _are_stateful, may_be_none=True
    ),
    "tuning": _Kind("Tuning(…) or None", _a(Tuning), may_be_none=True),
    "chunk": _Kind(f"a multiple of {CHUNK_MULTIPLE} elements, or None", _is_chunk, may_be_none=True),
}
