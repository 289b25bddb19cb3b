"""The ranks whose updates are averaged together, known as soon as their weights are: often before the commit.

A mean names its party. So a replica may average and publish what everybody expects to be committed while that is still
being agreed; if something else is committed, it is another party, and what was published under this one is litter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from atoll.rounds.offers import Offer
from atoll.rounds.records import Commit
from atoll.rounds.reduce import Coefficients
from atoll.rounds.seal import digest


@dataclass(frozen=True)
class Seat:
    """One process that takes part, and what its update weighs."""

    rank: int
    incarnation: int
    weight: float


@dataclass(frozen=True)
class Party:
    """In rank order."""

    seats: tuple[Seat, ...]

    @classmethod
    def of_commit(cls, commit: Commit) -> Party:
        return cls(tuple(Seat(c.rank, c.incarnation, c.weight) for c in commit.contributions))

    @classmethod
    def of_offers(cls, offers: Iterable[Offer]) -> Party:
        return cls(tuple(Seat(o.rank, o.incarnation, o.weight) for o in sorted(offers, key=lambda o: o.rank)))

    @cached_property
    def id(self) -> str:
        """The first 16 hex digits of the XXH3-128 of a line for each seat: rank, incarnation and weight."""
        lines = (f"{seat.rank} {seat.incarnation} {float(seat.weight).hex()}\n" for seat in self.seats)
        return digest("".join(lines).encode())[:16]

    @cached_property
    def coefficients(self) -> Coefficients:
        return Coefficients.of([seat.weight for seat in self.seats])

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(seat.rank for seat in self.seats)

    def owner(self, chunk: int) -> int:
        """The rank that averages a chunk."""
        return self.seats[chunk % len(self.seats)].rank
