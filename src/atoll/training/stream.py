"""When fragments are exchanged and how a result that comes late meets weights that have moved on.

With F fragments, one of them begins its exchange every `inner_steps / F` optimizer steps, in turn, so that each is
exchanged every `inner_steps`. `delay` steps later its result is merged; until then training goes on.

`alpha` is that of the Streaming DiLoCo paper and of torchft's `fragment_update_alpha`: the part of the live weights
that is kept, `live = (1 - alpha) * agreed + alpha * live`. 0 takes the agreed weights and drops what was trained
during the delay; 1 keeps the live ones, and the agreed ones only count in the next update.

Eager: the moment an exchange begins, the own update stands in for the mean, `live = outer step(own update)`. When the
true mean comes, the difference it makes is added to the live weights; all that was trained meanwhile is kept.
Whatever the settings, the agreed state moves by agreed means only, and is the same bits on every replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.errors import InvalidSpec

DEFAULT_ALPHA = 0.5
"""With a delay: half of each, as in the paper."""


@dataclass(frozen=True)
class Stream:
    """How exchanges overlap with training; agreed between replicas."""

    stride: int
    """Optimizer steps from the beginning of one exchange to that of the next."""
    fragments: int
    delay: int
    alpha: float
    is_eager: bool

    @classmethod
    def of(
        cls,
        inner_steps: int,
        fragments: int = 1,
        delay: int | None = None,
        alpha: float | None = None,
        eager: bool = False,
    ) -> Stream:
        """From the settings as given; None is what fits the others. Raises `InvalidSpec` with all that is wrong."""
        problems = list(_problems(inner_steps, fragments, delay, alpha, eager))
        if problems:
            raise InvalidSpec("DiLoCo", problems)
        stride = inner_steps // fragments
        wait = (stride if eager else 0) if delay is None else delay
        return cls(stride, fragments, wait, _alpha(alpha, wait, eager), eager)

    @property
    def is_settled(self) -> bool:
        """Whether the live weights are the agreed ones after every round."""
        return self.fragments == 1 and self.delay == 0 and self.alpha == 0

    def to_json(self) -> dict[str, Any]:
        return {"delay": self.delay, "alpha": self.alpha, "eager": self.is_eager}


def _alpha(alpha: float | None, delay: int, eager: bool) -> float:
    if alpha is not None:
        return float(alpha)
    return DEFAULT_ALPHA if delay and not eager else 0.0


def _problems(inner_steps: int, fragments: int, delay: int | None, alpha: float | None, eager: bool) -> list[str]:
    if not _is_whole(inner_steps, 1):
        return [f"inner_steps={inner_steps!r}: a whole number from 1"]
    if not _is_whole(fragments, 1):
        return [f"fragments={fragments!r}: a whole number from 1"]
    found = []
    stride, rest = divmod(inner_steps, fragments)
    if rest or not stride:
        found.append(f"fragments={fragments}: inner_steps={inner_steps} is not a multiple of it")
    elif delay is not None and not (_is_whole(delay, 0) and delay <= stride):
        most = f"inner_steps / fragments = {stride}"
        found.append(f"delay={delay}: a whole number from 0 to {most}, because one round is under way at a time")
    if alpha is not None and not (isinstance(alpha, int | float) and 0 <= alpha <= 1):
        found.append(f"alpha={alpha}: from 0 (take the agreed weights) to 1 (keep the own)")
    if alpha == 0 and delay == inner_steps and fragments == 1 and not eager:
        found.append(f"alpha=0: with delay={delay}, all of inner_steps, whatever is trained would be dropped again")
    if eager and delay == 0:
        found.append("eager: with delay=0 nothing has to stand in for the mean")
    if eager and alpha is not None:
        found.append(f"alpha={alpha}: eager keeps all that was trained meanwhile, so there is nothing to mix")
    return found


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
