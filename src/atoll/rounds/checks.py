"""What an update must satisfy before anybody averages it. Pure; every refusal names the rank and the check."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.rounds.layout import Layout
from atoll.rounds.records import Offer, Rejection
from atoll.rounds.tuning import Grid

LEAST_HISTORY = 3
"""A norm is called an outlier only when this many rounds have shown what is usual."""


@dataclass(frozen=True)
class Expected:
    """What every update of a round must match."""

    fragment: int
    layout: Layout
    grid: Grid
    codec: str
    usual_norms: Sequence[float] = ()
    """The median norm of each recent round."""
    outlier_factor: float | None = 10.0


def rejection(offer: Offer, expected: Expected) -> Rejection | None:
    """Why this update is not to be averaged, or None."""
    if offer.withdrawn is not None:
        return Rejection(offer.rank, offer.withdrawn.check, offer.withdrawn.detail)
    if (offer.fragment, offer.layout) != (expected.fragment, expected.layout.hash):
        return Rejection(offer.rank, "layout", f"layout {offer.layout[:12]} is not {expected.layout.hash[:12]}")
    if offer.codec != expected.codec:
        return Rejection(offer.rank, "codec", f"codec `{offer.codec}` is not `{expected.codec}`")
    if len(offer.chunks) != len(expected.grid):
        return Rejection(offer.rank, "chunks", f"{len(offer.chunks)} chunks, not {len(expected.grid)}")
    if offer.weight <= 0:
        return Rejection(offer.rank, "weight", f"weight {offer.weight:g} is not above 0")
    limit = norm_limit(expected.usual_norms, expected.outlier_factor)
    if offer.norm > limit:
        return Rejection(offer.rank, "norm", f"norm {offer.norm:.4g} is over the limit of {limit:.4g}")
    return None


def norm_limit(usual_norms: Sequence[float], factor: float | None) -> float:
    """The norm above which an update is an outlier; infinite while too little is known.

    Rounds that moved nothing, as in a warm-up from zero, say nothing about what is usual.
    """
    telling = [norm for norm in usual_norms if norm > 0]
    if factor is None or len(telling) < LEAST_HISTORY:
        return float("inf")
    return factor * statistics.median(telling)


def strays(offers: Mapping[int, Offer]) -> dict[int, Rejection]:
    """Offers made from another state than most: those replicas have diverged. Ties go to the lowest rank's state."""
    told = {rank: offer.base for rank, offer in sorted(offers.items()) if offer.base}
    if len(set(told.values())) <= 1:
        return {}
    common = Counter(told.values()).most_common(1)[0][0]
    return {
        rank: Rejection(rank, "base", f"made from state {base[:12]}, the others from {common[:12]}")
        for rank, base in told.items()
        if base != common
    }
