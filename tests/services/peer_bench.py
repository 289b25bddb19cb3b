"""What the benches over a peer share: a peer with `faults`, and an event `admits` that lets replicas start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any, Protocol

import pytest

from atoll.testing.bench import Call, Fault
from services.peer_faults import PeerFaults


class Peer(Protocol):
    """A peer, as fixtures see it."""

    def environment(self) -> dict[str, str]:
        """The variables that lead to it."""
        ...


class KillPoints:
    """A part of an executor's bench: the moments before and after each create."""

    peer: Any

    def kill_points(self, replicas: int) -> Sequence[str]:
        return [f"{when} create {number + 1}" for number in range(replicas) for when in ("before", "after")]

    def at_point(self, point: str, action: Callable[[], None]) -> None:
        when, _, number = point.split()
        self.peer.faults.on(Call.CREATE, action, nth=int(number), after_effect=when == "after")


@contextmanager
def closed(admits: Event) -> Iterator[None]:
    """While this is open, the peer starts no replica."""
    admits.clear()
    try:
        yield
    finally:
        admits.set()


@contextmanager
def create_refused(faults: PeerFaults, rank: int) -> Iterator[None]:
    """While this is open, the peer refuses to create the replica of this rank."""
    faults.fail(Call.CREATE, Fault.FORBIDDEN, nth=rank + 1)
    try:
        yield
    finally:
        faults.heal()


def enter(patch: pytest.MonkeyPatch, peer: Peer) -> None:
    """Set the variables that lead to the peer."""
    for name, value in peer.environment().items():
        patch.setenv(name, value)
