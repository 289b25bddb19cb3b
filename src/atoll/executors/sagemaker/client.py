"""Every call to AWS: limited in rate, retried while the error may be transient, with its errors translated.

`AwsClient.call` is the only way from this package to a service. boto3 is imported only for services whose client the
caller did not give: a given client is used as it is, and its errors are recognized by their answer, not by their class.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Any

from atoll._time import SYSTEM_CLOCK, Clock, Deadline, backoff
from atoll.errors import BackendUnavailable, ConfigError, did_you_mean
from atoll.executors.sagemaker import errors, known
from atoll.executors.sagemaker.known import EXTRA
from atoll.registry import require

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_MOST_PAGES = 200
"""A page has a hundred jobs, and all jobs of a list belong to one run."""
_REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")

log = logging.getLogger("atoll.executors")


class AwsClient:
    """Clients of AWS services. botocore's own retries are off, because they ignore the rate limit and the clock."""

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
        self._timeout_s, self._patience_s, self._clock = timeout_s, patience_s, clock
        self._given = {service: client for service, client in clients.items() if client is not None}
        self._made: dict[tuple[str, str | None], Any] = {}
        self._session: Any = None
        self._lock = Lock()
        self._client_region = _region_of(self._given)
        self.region: str | None = region or self._client_region or self._default_region()
        """Empty if the caller gave a client whose region is unknown."""
        self._list_limiter = RateLimiter(list_calls_per_s, clock=clock)
        self._rate, self._limiters = calls_per_s, dict[str, RateLimiter]()

    @property
    def session(self) -> Any:
        """The boto3 session: credentials and region, which need no call."""
        with self._lock:
            return self._open_session()

    @property
    def may_use_sdk(self) -> bool:
        """Whether checks may use boto3: false if the caller gave a client that is not one of boto3."""
        return known.may_use_sdk(self._given.get("sagemaker"))

    def has(self, service: str, verb: str) -> bool:
        """Whether a call is there. A client that the caller gave may lack it."""
        return service not in self._given or callable(getattr(self._given[service], verb, None))

    def is_given(self, service: str) -> bool:
        return service in self._given

    def region_problem(self) -> str | None:
        """Why this region cannot be right. The region of a client that the caller gave is always accepted."""
        if self._client_region not in (None, self.region):
            return f"region=`{self.region}`: the given client is for `{self._client_region}`; leave it out"
        if "sagemaker" in self._given or self.region in known.regions():
            return None
        if not self.region:
            return "region: not set; set it with `--setting region=eu-west-1`, in atoll.toml, or with AWS_REGION"
        meant = did_you_mean(self.region, known.regions())
        return (
            f"region=`{self.region}`: from AWS_REGION or ~/.aws/config; the installed boto3 has no such region{meant}"
        )

    def call(
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
        """Make one call and return its answer; an answer that is not a mapping counts as empty.

        A transient error is retried for `patience_s`, or at most `tries` times for callers with a loop of their own.
        Expired credentials are read again once.
        """
        deadline = self.deadline()
        pauses = self.pauses()
        renewed = False
        while True:
            self._limiter(service, verb).wait()
            log.debug("call %s.%s (%s)", service, verb, what)
            send = self._sender(service, verb, region, what, operation)
            try:
                answer = send(**body)
                return dict(answer) if isinstance(answer, Mapping) else {}
            except Exception as exc:
                if not self.is_given(service) and not errors.is_of_service(exc):
                    raise
                error = errors.translated(exc, what, operation)
                if errors.is_stale(exc) and not renewed:
                    renewed = True
                    log.info("credentials have expired; reading them again")
                    self._renew()
                    continue
                tries = None if tries is None else tries - 1
                if not getattr(error, "retryable", False) or tries == 0 or deadline.is_past:
                    raise error from exc
                log.info("retry %s.%s after %s", service, verb, errors.code_of(exc) or type(exc).__name__)
            deadline.sleep(next(pauses))

    def pauses(self) -> Iterator[float]:
        """Growing pauses between tries, with jitter so that many launchers do not retry at once."""
        return backoff(_FIRST_PAUSE_S, factor=2.0, cap_s=_LONGEST_PAUSE_S, jitter=0.5)

    def deadline(self) -> Deadline:
        """The end of the time for which a call is retried."""
        return Deadline(self._patience_s, self._clock)

    def _limiter(self, service: str, verb: str) -> RateLimiter:
        """AWS limits list calls separately, and does not raise that limit."""
        if verb == "list_training_jobs":
            return self._list_limiter
        with self._lock:
            if service not in self._limiters:
                self._limiters[service] = RateLimiter(self._rate, at_once=8, clock=self._clock)
            return self._limiters[service]

    def _sender(self, service: str, verb: str, region: str | None, what: str, operation: str) -> Callable[..., Any]:
        """The function that makes the call; `ConfigError` if the client that the caller gave does not have it."""
        if not self.has(service, verb):
            raise ConfigError(f"the given {service}_client has no `{verb}`", reason="client")
        if service in self._given:
            client = self._given[service]
        else:
            try:
                client = self._made_client(service, region or self.region or None)
            except Exception as exc:
                if not errors.is_of_service(exc):
                    raise
                raise errors.translated(exc, what, operation) from exc
        found: Callable[..., Any] = getattr(client, verb)
        return found

    def _made_client(self, service: str, region: str | None) -> Any:
        where = (service, region)
        with self._lock:
            if where not in self._made:
                session = self._open_session()
                config = require("botocore.config", extra=EXTRA).Config(
                    connect_timeout=min(10.0, self._timeout_s),
                    read_timeout=self._timeout_s,
                    retries={"mode": "standard", "total_max_attempts": 1},
                )
                self._made[where] = session.client(service, region_name=region, config=config)
            return self._made[where]

    def _default_region(self) -> str | None:
        """The region of the environment. The files of AWS are read only if the SDK makes the client."""
        if "sagemaker" not in self._given:
            return str(self.session.region_name or "") or None
        return next((value for name in _REGION_VARIABLES if (value := os.environ.get(name))), "")

    def _renew(self) -> None:
        """Read the credentials again: the user may have logged in since."""
        with self._lock:
            self._made.clear()
            self._session = None

    def _open_session(self) -> Any:
        """The session, made on first use. Call it with the lock held."""
        if self._session is None:
            boto3 = require("boto3", extra=EXTRA)
            inner = require("botocore.session", extra=EXTRA).get_session()
            inner.register_component("data_loader", known.loader())
            self._session = boto3.Session(botocore_session=inner)
        return self._session


class Pages:
    """The page tokens of one list. A list that does not end raises `BackendUnavailable`."""

    def __init__(self, what: str, operation: str) -> None:
        self._what, self._operation = what, operation
        self._tokens: set[str] = set()

    def after(self, token: str) -> str:
        """The token, if it leads to another page."""
        if token in self._tokens or len(self._tokens) >= _MOST_PAGES:
            message = f"{self._what} does not end: a page token came twice, or there are more than {_MOST_PAGES} pages"
            raise BackendUnavailable(message, executor=errors.EXECUTOR, operation=self._operation, reason="endless")
        self._tokens.add(token)
        return token


class RateLimiter:
    """A token bucket: `per_s` calls a second, and up to `at_once` together after a pause."""

    def __init__(self, per_s: float, *, at_once: int = 2, clock: Clock = SYSTEM_CLOCK) -> None:
        self._per_s, self._at_once, self._clock = per_s, float(at_once), clock
        self._tokens, self._seen_at = float(at_once), clock.monotonic()
        self._lock = Lock()

    def wait(self) -> None:
        """Sleep until the next call may be made. Each caller reserves its token first, so it sleeps at most once."""
        with self._lock:
            now = self._clock.monotonic()
            self._tokens = min(self._at_once, self._tokens + max(0.0, now - self._seen_at) * self._per_s) - 1.0
            self._seen_at = now
            pause = max(0.0, -self._tokens / self._per_s)
        if pause > 0.0:
            self._clock.sleep(pause)


def _region_of(clients: Mapping[str, Any]) -> str | None:
    regions = [getattr(getattr(client, "meta", None), "region_name", None) for client in clients.values()]
    return next((region for region in regions if isinstance(region, str)), None)
