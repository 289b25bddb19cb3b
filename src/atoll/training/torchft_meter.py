"""What a torchft run says about itself: its step, its bytes, and how much of the exchange training did not wait for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import ReplicaContext
from atoll.rounds.requests import Counters
from atoll.training.progress import Progress
from atoll.training.torchft_rounds import Found


class RoundMeter:
    """Adds up seconds. Only the caller's thread uses it; an exchange in the background tells its length at its end."""

    def __init__(self, ctx: ReplicaContext | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._progress = Progress(ctx, clock=clock) if ctx is not None else None
        self._began = clock.monotonic()
        self.waited_s = 0.0
        """Spent in the manager instead of training."""
        self.exchange_s = 0.0
        """What the exchanges took, from their first tensor on its way to their last in place."""
        self.exposed_s = 0.0
        """What of that training waited for."""
        self._told_s = 0.0
        self._is_waiting = False

    @property
    def wait_share(self) -> float:
        """The part of the time so far that training waited."""
        return self.waited_s / max(1e-9, self._clock.monotonic() - self._began)

    @property
    def hidden_share(self) -> float:
        """The part of the exchanges so far that went on while the model trained."""
        return 1.0 - min(1.0, self.exposed_s / self.exchange_s) if self.exchange_s else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens inside is waiting; inside of waiting it changes nothing."""
        if self._is_waiting:
            yield
            return
        self._is_waiting, began = True, self._clock.monotonic()
        try:
            yield
        finally:
            self._is_waiting = False
            self.waited_s += self._clock.monotonic() - began

    def result_of(self, exchange: Future[Found]) -> Found:
        """Wait for an exchange, and take note of how long that was next to how long it took."""
        began = self._clock.monotonic()
        with self.waiting():
            found = exchange.result()
        self.exchange_s += found.seconds
        self.exposed_s += min(found.seconds, self._clock.monotonic() - began)
        return found

    def note(self, step: int, metrics: dict[str, float]) -> None:
        if self._progress is not None:
            self._progress.note(step, metrics)

    def round_over(self, step: int, used: Counters) -> None:
        """A round is committed; the live views hear of it."""
        if self._progress is None:
            return
        waited_s, self._told_s = self.waited_s - self._told_s, self.waited_s
        self._progress.metrics["hidden_share"] = self.hidden_share
        self._progress.round_over(step, waited_s, bytes_up=used.bytes_up, bytes_down=used.bytes_down)
