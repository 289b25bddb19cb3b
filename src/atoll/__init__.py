"""Atoll trains one model on many machines that communicate only through an object store.

Each public name is imported on first use, so `import atoll` itself is fast.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing `typing` would double the time of `atoll --help`

if TYPE_CHECKING:
    import typing

    from atoll.context import ReplicaContext as ReplicaContext
    from atoll.context import current as current
    from atoll.errors import AtollError as AtollError
    from atoll.handle import RunHandle as RunHandle
    from atoll.registry import open_store as open_store
    from atoll.result import ReplicaOutcome as ReplicaOutcome
    from atoll.result import RunResult as RunResult
    from atoll.rounds.quorum import Quorum as Quorum
    from atoll.runs.attach import attach as attach
    from atoll.runs.join import join as join
    from atoll.runs.prepare import launch as launch
    from atoll.runs.prepare import prepare as prepare
    from atoll.runs.run import Run as Run
    from atoll.spec import Placement as Placement
    from atoll.spec import RunSpec as RunSpec
    from atoll.spec import Task as Task
    from atoll.status import ReplicaState as ReplicaState
    from atoll.status import ReplicaStatus as ReplicaStatus
    from atoll.status import RunStatus as RunStatus
    from atoll.training.allreduce import ObjectStoreAllReduce as ObjectStoreAllReduce
    from atoll.training.allreduce import make_diloco_outer_loop as make_diloco_outer_loop
    from atoll.training.diloco import DiLoCo as DiLoCo
    from atoll.training.diloco import LocalSGD as LocalSGD
    from atoll.training.outer import Average as Average
    from atoll.training.outer import Nesterov as Nesterov

__version__ = "0.1.0"

_MODULES = {
    "AtollError": "atoll.errors",
    "Average": "atoll.training.outer",
    "DiLoCo": "atoll.training.diloco",
    "LocalSGD": "atoll.training.diloco",
    "Nesterov": "atoll.training.outer",
    "ObjectStoreAllReduce": "atoll.training.allreduce",
    "Placement": "atoll.spec",
    "Quorum": "atoll.rounds.quorum",
    "ReplicaContext": "atoll.context",
    "ReplicaOutcome": "atoll.result",
    "ReplicaState": "atoll.status",
    "ReplicaStatus": "atoll.status",
    "Run": "atoll.runs.run",
    "RunHandle": "atoll.handle",
    "RunResult": "atoll.result",
    "RunSpec": "atoll.spec",
    "RunStatus": "atoll.status",
    "Task": "atoll.spec",
    "attach": "atoll.runs.attach",
    "current": "atoll.context",
    "join": "atoll.runs.join",
    "launch": "atoll.runs.prepare",
    "make_diloco_outer_loop": "atoll.training.allreduce",
    "open_store": "atoll.registry",
    "prepare": "atoll.runs.prepare",
}

_PACKAGES_OF_TRAIN = ("numpy", "torch", "xxhash")

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULES:
        raise AttributeError(_unknown(name))
    from importlib import import_module

    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as exc:
        if exc.name not in _PACKAGES_OF_TRAIN:
            raise
        from atoll.errors import MissingExtra

        raise MissingExtra(exc.name, extra="train") from exc


def _unknown(name: str) -> str:
    message = f"module `atoll` has no attribute `{name}`"
    if name.startswith("_") or _is_submodule(name):  # `from atoll import runs` calls this before it imports
        return message
    from atoll.errors import did_you_mean

    return message + did_you_mean(name, sorted(_MODULES))


def _is_submodule(name: str) -> bool:
    from importlib.machinery import PathFinder

    return PathFinder.find_spec(f"{__name__}.{name}", __path__) is not None


def __dir__() -> list[str]:
    return sorted(__all__)
