"""Every call to the Hub: bounded in time, retried while the error may be transient, with its errors translated.

`HubClient.call` is the only way from this package to a method of `HfApi`. That client waits without a limit for an
answer and does not retry, so each call runs in a thread that the caller stops waiting for. Two requests are made with
the session of the SDK instead of its methods, because the methods do not do what is needed: `list_jobs` retries by
itself, and `fetch_job_logs` relies on the Date header of the answer. A client that the caller gives is used as it is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from json import JSONDecodeError
from threading import Event
from typing import Any, TypeVar

from atoll._threads import answer_within
from atoll._time import Clock, Deadline, backoff
from atoll.errors import BackendUnavailable, ConfigError
from atoll.executors.hf_jobs import errors
from atoll.registry import require

EXTRA = "hf"
HUB = "https://huggingface.co"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_MOST_PAGES = 1000

log = logging.getLogger("atoll.executors")
R = TypeVar("R")


class HubClient:
    """The client of one endpoint and token."""

    def __init__(
        self,
        *,
        client: Any,
        endpoint: str | None,
        token: str | None,
        timeout_s: float,
        patience_s: float,
        clock: Clock,
    ) -> None:
        self.timeout_s, self._patience_s, self.clock = timeout_s, patience_s, clock
        if client is None:
            hub = require("huggingface_hub", extra=EXTRA)
            client = hub.HfApi(endpoint=endpoint or os.environ.get("HF_ENDPOINT") or None, token=token)
        self._api = client
        self.endpoint = str(getattr(client, "endpoint", None) or endpoint or HUB).rstrip("/")

    @property
    def pages(self) -> str:
        """The address of web pages. An endpoint without TLS, such as a proxy, has none of its own."""
        return self.endpoint if self.endpoint.startswith("https://") else HUB

    def deadline(self) -> Deadline:
        """The end of the time for which a call is retried."""
        return Deadline(self._patience_s, self.clock)

    def pauses(self) -> Iterator[float]:
        """Growing pauses between tries, with jitter so that many launchers do not retry at once."""
        return backoff(_FIRST_PAUSE_S, factor=2.0, cap_s=_LONGEST_PAUSE_S, jitter=0.5)

    def call(self, verb: str, operation: str, what: str, *, tries: int | None = None, **body: Any) -> Any:
        """Call a method of the client. A transient error is retried for `patience_s`, or at most `tries` times."""
        return self._retried(lambda: self._method(verb)(**body), f"{verb} ({what})", operation, what, tries)

    def create(self, what: str, on_answer: Callable[[Any], R], **body: Any) -> R:
        """One try of `run_job`. `on_answer` gets the answer, also if the caller was interrupted or waits no longer."""
        ended = Event()

        def send() -> R:
            try:
                return on_answer(self._method("run_job")(**body))
            finally:
                ended.set()

        try:
            made: R = self._retried(send, f"run_job ({what})", "submit", what, tries=1)
        except KeyboardInterrupt:
            ended.wait(self.timeout_s)  # the request may have its effect: its caller has to know the job
            raise
        return made

    def jobs(
        self, namespace: str, operation: str, what: str, *, labels: Mapping[str, str], stages: Sequence[str] = ()
    ) -> list[Any]:
        """All jobs with these labels, page by page. Each page is one request, and is retried like a call."""
        if not self._is_of_sdk("list_jobs"):
            given = {"labels": dict(labels), "namespace": namespace, **({"status": list(stages)} if stages else {})}
            return list(
                self._retried(
                    lambda: list(self._method("list_jobs")(**given)), f"list_jobs ({what})", operation, what, None
                )
            )
        params: list[tuple[str, str]] | None = [
            *(("stage", stage) for stage in stages),
            *(("label", f"{k}={v}") for k, v in labels.items()),
        ]
        found: list[Any] = []
        url, seen = f"{self.endpoint}/api/jobs/{namespace}", set[str]()
        while url:
            page, following = self._retried(partial(self._page, url, params), f"GET {url}", operation, what, None)
            found += page
            if following in seen or len(seen) >= _MOST_PAGES:
                text = f"{what}: the list does not end: a page came twice, or there are more than {_MOST_PAGES} pages"
                raise BackendUnavailable(text, executor=errors.EXECUTOR, operation=operation, reason="endless")
            seen.add(following)
            url, params = following, None  # the address of a page has them; an empty list would remove them
        return found

    @contextmanager
    def log_events(self, namespace: str, job_id: str, *, tail: int | None, read_s: float) -> Iterator[Iterator[str]]:
        """The lines of the event stream of a job's log; a silence longer than `read_s` raises the SDK's time-out."""
        utils = require("huggingface_hub.utils", extra=EXTRA)
        url = f"{self.endpoint}/api/jobs/{namespace}/{job_id}/logs"
        params = {} if tail is None else {"tail": tail}
        log.debug("GET %s", url)
        session, headers = utils.get_session(), self._headers()
        with session.stream("GET", url, headers=headers, params=params, timeout=self.timeout_s) as answer:
            utils.hf_raise_for_status(answer)
            answer.request.extensions["timeout"]["read"] = read_s  # of the body, whose reading begins only now
            yield _lines(answer.iter_bytes())

    @property
    def reads_events(self) -> bool:
        """Whether logs can be read as events: the client is the SDK's own."""
        return self._is_of_sdk("fetch_job_logs")

    def _page(self, url: str, params: Any) -> tuple[list[Any], str]:
        """One page of a list, and the address of the next page; empty if it is the last."""
        utils = require("huggingface_hub.utils", extra=EXTRA)
        answer = utils.get_session().get(url, params=params, headers=self._headers(), timeout=self.timeout_s)
        utils.hf_raise_for_status(answer)
        made = require("huggingface_hub", extra=EXTRA).JobInfo
        try:
            jobs = [made(**each, endpoint=self.endpoint) for each in answer.json()]
        except (TypeError, AttributeError, ValueError) as exc:  # JSON of a proxy, such as `{"error": …}`
            raise JSONDecodeError("the answer is no list of jobs", answer.text, 0) from exc
        return jobs, str(answer.links.get("next", {}).get("url", ""))

    def _headers(self) -> dict[str, str]:
        utils = require("huggingface_hub.utils", extra=EXTRA)
        made: dict[str, str] = utils.build_hf_headers(token=getattr(self._api, "token", None))
        return made

    def _is_of_sdk(self, verb: str) -> bool:
        """Whether this method of the client is the SDK's own, whose request may be made here."""
        owner = next((each for each in type(self._api).__mro__ if verb in vars(each)), object)
        return owner.__module__.partition(".")[0] == "huggingface_hub"

    def _method(self, verb: str) -> Callable[..., Any]:
        found: Callable[..., Any] | None = getattr(self._api, verb, None)
        if not callable(found):
            raise ConfigError(f"the given client has no `{verb}`", reason="client")
        return found

    def _retried(self, send: Callable[[], Any], shown: str, operation: str, what: str, tries: int | None) -> Any:
        deadline, pauses = self.deadline(), self.pauses()
        while True:
            log.debug("call %s", shown)
            try:
                return answer_within(self.timeout_s, send)
            except ConfigError:
                raise
            except Exception as exc:
                if self._is_of_sdk("run_job") and not errors.is_of_service(exc):
                    raise
                error = errors.translated(exc, what, operation)
                tries = None if tries is None else tries - 1
                if not getattr(error, "retryable", False) or tries == 0 or deadline.is_past:
                    raise error from exc
                log.info("retry %s after %s", shown, error.message)
                deadline.sleep(max(next(pauses), errors.retry_after_s(exc)))


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """The lines of an event stream. Only a newline ends one: the SDK's `iter_lines` also cuts at characters such as
    U+2028 and U+0085, which JSON has as they are within a text."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r").decode("utf-8", "replace") for line in lines)
    if rest:
        yield rest.decode("utf-8", "replace")
