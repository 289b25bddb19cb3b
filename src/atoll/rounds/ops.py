"""The protocol asks, a driver answers: every store request of a round is a value yielded by a generator.

So the protocol is plain code without threads, clocks or sockets, and a test can run many replicas in one thread,
switching between any two requests. That includes reading an object piece by piece: `Open` begins it, and only the
driver, with `Read`, takes bytes from what was opened. `drive` is the driver for real life; tests have their own.
A request that fails raises at its `yield`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
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
    """Answered with the object's `Body`. The protocol closes it; only a `Read` takes bytes from it."""

    key: str


@dataclass(frozen=True)
class Read:
    """Take bytes from opened objects: answered with what `take` returns.

    `take` reads no less than the front of a frame or the payloads of a chunk, so that compiled code can read, check
    and add them up in one call.
    """

    take: Callable[[], Any]


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


Request: TypeAlias = Get | Open | Read | Put | Create | List | Delete | Discard
Op: TypeAlias = Request | Sleep | Gather
Steps: TypeAlias = Generator[Op, Any, T]
"""A piece of protocol that ends with a T."""
