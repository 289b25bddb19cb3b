"""What a replica says about itself while it trains, for the live views: metrics, bytes, waiting, what was rejected."""

from __future__ import annotations

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import ReplicaContext, numbers
from atoll.errors import InvalidSpec
from atoll.rounds.client import RoundClient

_EVERY_S = 0.2


class Progress:
    """Collects metrics and passes them on now and then; always at the end of a round."""

    def __init__(self, ctx: ReplicaContext, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._ctx, self._clock = ctx, clock
        self._began = clock.monotonic()
        self._waited_s = 0.0
        self._told_at = -_EVERY_S
        self.metrics: dict[str, float] = {}

    @property
    def wait_share(self) -> float:
        """The part of the time so far that went into rounds instead of training."""
        return self._waited_s / max(1e-9, self._clock.monotonic() - self._began)

    def note(self, round_no: int, metrics: dict[str, float]) -> None:
        """New values; names that are not given keep theirs."""
        if "round_no" in metrics:
            raise InvalidSpec("log", ["round_no: a name that is taken: the round is told with every metric"])
        self.metrics.update(numbers(metrics))
        if self._clock.monotonic() - self._told_at >= _EVERY_S:
            self._tell(round_no)

    def waited(self, seconds: float) -> None:
        """So much time went into rounds instead of training."""
        self._waited_s += seconds

    def round_over(self, round_no: int, waited_s: float, client: RoundClient) -> None:
        self.waited(waited_s)
        used = client.counters
        self.metrics |= {
            "hidden_share": client.hidden_share,
            "wait_share": self.wait_share,
            "bytes": float(used.bytes_up + used.bytes_down),
            "bytes_up": float(used.bytes_up),
            "bytes_down": float(used.bytes_down),
        }
        if client.rejections:
            self.metrics["updates_rejected"] = float(client.rejections)
        self._tell(round_no)

    def _tell(self, round_no: int) -> None:
        self._told_at = self._clock.monotonic()
        self._ctx.log(round_no=round_no, **self.metrics)
