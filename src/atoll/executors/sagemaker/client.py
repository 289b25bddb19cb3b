"""The one way out: every call to AWS is paced, tried again if that may help, and has its errors translated here.

A token bucket: so many calls a second, a few of them at once. Time is injected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from threading import Lock
from typing import Any

from atoll._time import SYSTEM_CLOCK, Clock, Deadline, backoff
from atoll.errors import AtollError
from atoll.executors.sagemaker import errors
from atoll.registry import require


class RateLimiter:
    """Lets callers through at a rate; `wait` sleeps until it is one's turn."""

    def __init__(self, per_s: float, *, at_once: int = 2, clock: Clock = SYSTEM_CLOCK) -> None:
        self._per_s, self._at_once, self._clock = per_s, float(at_once), clock
        self._tokens, self._seen_at = float(at_once), clock.monotonic()
        self._lock = Lock()

    def wait(self) -> None:
        """Returns when the call may be made. Turns are given out in order, so nobody sleeps twice."""
        with self._lock:
            now = self._clock.monotonic()
            self._tokens = min(self._at_once, self._tokens + max(0.0, now - self._seen_at) * self._per_s) - 1.0
            self._seen_at = now
            pause = max(0.0, -self._tokens / self._per_s)
        if pause > 0.0:
            self._clock.sleep(pause)


_EXTRA = "sagemaker"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0


class Gateway:
    """Clients of AWS services. botocore's own retries are off: it would try again without our pace or our clock."""

    def __init__(
        self,
        *,
        region: str | None,
        timeout_s: float,
        patience_s: float,
        list_calls_per_s: float,
        calls_per_s: float,
        clock: Clock,
        clients: Mapping[str, Any],
    ) -> None:
        self._boto3 = require("boto3", extra=_EXTRA)
        vendor = require("botocore.exceptions", extra=_EXTRA)
        parsers = require("botocore.parsers", extra=_EXTRA)
        # A proxy's page in place of an answer is a ResponseParserError, which has no base class of botocore's.
        self._vendor_errors = (vendor.ClientError, vendor.BotoCoreError, parsers.ResponseParserError)
        self._timeout_s, self._patience_s, self._clock = timeout_s, patience_s, clock
        self._given = {service: client for service, client in clients.items() if client is not None}
        self._made: dict[tuple[str, str | None], Any] = {}
        self._lock = Lock()
        self._session = self._new_session()
        own = "" if "sagemaker" in self._given else None
        self.region: str | None = region or _region_of(self._given) or self._session.region_name or own
        """Empty: that of a client that was given to us, whichever it is."""
        self._list_pace = RateLimiter(list_calls_per_s, clock=clock)
        self._rate, self._paces = calls_per_s, dict[str, RateLimiter]()

    @property
    def session(self) -> Any:
        """For what is known without a call: credentials, region."""
        return self._session

    def ask(
        self,
        service: str,
        verb: str,
        operation: str,
        what: str,
        *,
        region: str | None = None,
        tries: int | None = None,
        **body: Any,
    ) -> dict[str, Any]:
        """One call, and its answer. What may pass is tried again until patience ends; `tries` is for our own loops."""
        deadline = Deadline(self._patience_s, self._clock)
        pauses = self.pauses()
        renewed = False
        while True:
            self._pace(service, verb).wait()
            try:
                return dict(getattr(self._client(service, region), verb)(**body))
            except self._vendor_errors as exc:
                error = errors.translated(exc, what, operation)
                if errors.is_stale(exc) and not renewed:
                    renewed = True
                    self._renew()
                    continue
                tries = None if tries is None else tries - 1
                if not _may_pass(error) or tries == 0 or deadline.is_past:
                    raise error from exc
            deadline.sleep(next(pauses))

    def pauses(self) -> Iterator[float]:
        """Growing pauses between tries, spread so that many launchers do not come back at once."""
        return backoff(_FIRST_PAUSE_S, factor=2.0, cap_s=_LONGEST_PAUSE_S, jitter=0.5)

    def deadline(self) -> Deadline:
        """As long as a call may be tried."""
        return Deadline(self._patience_s, self._clock)

    def _pace(self, service: str, verb: str) -> RateLimiter:
        """Lists have a limit of their own, and no way to raise it."""
        if verb == "list_training_jobs":
            return self._list_pace
        with self._lock:
            if service not in self._paces:
                self._paces[service] = RateLimiter(self._rate, at_once=8, clock=self._clock)
            return self._paces[service]

    def _client(self, service: str, region: str | None) -> Any:
        if service in self._given:
            return self._given[service]
        where = (service, region or self.region)
        with self._lock:
            if where not in self._made:
                config = require("botocore.config", extra=_EXTRA).Config(
                    connect_timeout=min(10.0, self._timeout_s),
                    read_timeout=self._timeout_s,
                    retries={"mode": "standard", "total_max_attempts": 1},
                )
                self._made[where] = self._session.client(service, region_name=where[1], config=config)
            return self._made[where]

    def _renew(self) -> None:
        """Read credentials anew: somebody may have logged in again meanwhile."""
        with self._lock:
            self._made.clear()
            self._session = self._new_session()

    def _new_session(self) -> Any:
        inner = require("botocore.session", extra=_EXTRA).get_session()
        inner.register_component("data_loader", _loader())
        return self._boto3.Session(botocore_session=inner)


@cache
def _loader() -> Any:
    """Service models are large; each is read once in a process."""
    return require("botocore.loaders", extra=_EXTRA).create_loader()


def _may_pass(error: AtollError) -> bool:
    return bool(getattr(error, "retryable", False))


def _region_of(clients: Mapping[str, Any]) -> str | None:
    regions = [getattr(getattr(client, "meta", None), "region_name", None) for client in clients.values()]
    return next((region for region in regions if isinstance(region, str)), None)
