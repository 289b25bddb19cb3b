"""What a torchft run says about itself: its step, its bytes, and how much of the exchange training did not wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import ReplicaContext
from atoll.rounds.timeline import COMPUTE
from atoll.training.progress import Progress
from atoll.training.torchft_rounds import TorchftRounds


class RoundMeter:
    """Tells the rounds when the caller trained: whenever it was not in the manager. For the caller's thread only."""

    def __init__(self, rounds: TorchftRounds, ctx: ReplicaContext | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._rounds, self._clock = rounds, clock
        self._progress = Progress(ctx, clock=clock) if ctx is not None else None
        self._began = self._trained_since = clock.monotonic()
        self._waited_s = self._told_s = 0.0
        self._is_waiting = False

    @property
    def wait_share(self) -> float:
        """The part of the time so far that training waited."""
        return self._waited_s / max(1e-9, self._clock.monotonic() - self._began)

    @property
    def hidden_share(self) -> float:
        """The part of the exchanges so far that went on while the model trained."""
        return self._rounds.client.hidden_share if self._rounds.is_joined else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens inside is waiting; inside of waiting it changes nothing."""
        if self._is_waiting:
            yield
            return
        self.trained()
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False
            began, self._trained_since = self._trained_since, self._clock.monotonic()
            self._waited_s += self._trained_since - began

    def trained(self) -> None:
        """Training has gone on until now; told before an exchange begins, so that it counts for that one."""
        if self._is_waiting:
            return
        now = self._clock.monotonic()
        if self._rounds.is_joined:
            self._rounds.client.mark(COMPUTE, self._trained_since, now)
        self._trained_since = now

    def note(self, metrics: dict[str, float]) -> None:
        """New values for the live views."""
        if self._progress is not None:
            self._progress.note(self._rounds.step, metrics)

    def round_over(self) -> None:
        """A round is committed; the live views hear of it."""
        if self._progress is None:
            return
        waited_s, self._told_s = self._waited_s - self._told_s, self._waited_s
        self._progress.round_over(self._rounds.step, waited_s, self._rounds.client)
