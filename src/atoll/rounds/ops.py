"""The protocol asks, a driver answers: every store request of a round is a value yielded by a generator.

So the protocol is plain code without threads, clocks or sockets, and a test can run many replicas in one thread,
switching between any two requests. `drive` is the driver for real life; tests have their own.
A request that fails raises at its `yield`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from atoll.stores.base import Data

T = TypeVar("T")


@dataclass(frozen=True)
class Get:
    """Answered with the object."""

    key: str


@dataclass(frozen=True)
class Open:
    """Answered with the object's `Body`, to be read piece by piece while others are read."""

    key: str


@dataclass(frozen=True)
class Put:
    key: str
    data: Data


@dataclass(frozen=True)
class Create:
    key: str
    data: Data


@dataclass(frozen=True)
class List:
    """Answered with a list of keys."""

    prefix: str


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class Discard:
    """Nobody needs this object any more: a store that can use its space again takes it, others do nothing."""

    key: str


@dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclass(frozen=True)
class Gather:
    """Run the children side by side, at most `width` at once; answered with their results, in order.

    The first error of a child is raised here, after every child has ended.
    """

    children: Sequence[Steps[Any]]
    width: int


Request: TypeAlias = Get | Open | Put | Create | List | Delete | Discard
Op: TypeAlias = Request | Sleep | Gather
Steps: TypeAlias = Generator[Op, Any, T]
"""A piece of protocol that ends with a T."""
