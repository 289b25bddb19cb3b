"""One submit: bind the options once, and spawn a call for each rank that no launcher has started yet.

A spawn whose answer was lost is repeated. That may leave two calls of one rank; the claim in the store lets one of them
run. Before the first spawn a record lists every rank for which this launcher may send a call, so that a cancel knows of
calls whose id was lost.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from atoll.errors import AtollError, BackendError, ConfigError, RunNotFound, StoreError, SubmitError
from atoll.executors.base import Plan
from atoll.executors.modal.client import ModalClient
from atoll.executors.modal.errors import EXECUTOR, is_throttled
from atoll.executors.modal.records import CallRecords
from atoll.executors.modal.request import request_token, run_handle

_RECORD_EVERY = 16
DEPLOY_HINT = "deploy it first: `atoll deploy modal`"
SECRET_HINT = "make a secret with `modal secret create NAME KEY=VALUE`, a volume with `modal volume create NAME`"  # noqa: S105

log = logging.getLogger("atoll.executors")


def bound_function(client: ModalClient, request: Mapping[str, Any]) -> Any:
    """The deployed function with the options of this request. It is looked up here, so that nothing is sent yet."""
    modal, where = client.modal, {"environment_name": request["environment"]}
    options = dict(request["options"])
    for name, keys in (options.pop("secrets", None) or {}).items():
        options.setdefault("secrets", []).append(modal.Secret.from_name(name, required_keys=keys, **where))
    if volumes := options.pop("volumes", None):
        options["volumes"] = {path: modal.Volume.from_name(name, **where) for path, name in volumes.items()}
    what = f"function `{request['function']}` of app `{request['app']}`"

    def deployed() -> Any:
        return modal.Function.from_name(request["app"], request["function"], client=client.connection, **where)

    try:
        return client.call("submit", what, lambda: deployed().with_options(**options).hydrate())
    except RunNotFound as exc:
        missing = exc
    try:
        client.call("submit", what, lambda: deployed().hydrate())
    except RunNotFound as exc:
        raise ConfigError(exc.message, reason="not_deployed", hint=DEPLOY_HINT) from exc
    raise ConfigError(missing.message, reason="not_found", hint=SECRET_HINT) from missing


class Submission:
    """Remembers which calls this submit may have sent."""

    def __init__(
        self, client: ModalClient, records: CallRecords, local: CallRecords, plan: Plan, bind: Callable[[], Any]
    ) -> None:
        self._client, self._records, self._local, self._plan, self._bind = client, records, local, plan, bind
        self._launcher = secrets.token_hex(16)
        self._handle = str(run_handle(plan.request, plan.replicas))
        self._calls: dict[int, str | None] = {}
        self._lost: set[int] = set()
        """Ranks for which a call may exist whose id was lost, besides the recorded one."""

    def run(self) -> None:
        """Return when every rank has a call."""
        try:
            self._records.check_plan(request_token(self._plan.request))
            known = self._records.read(self._plan.replicas)
            missing = [rank for rank, calls in enumerate(known) if not calls.ids and calls.holder is None]
            adopted = [calls.ids[0] for calls in known if calls.ids]
            if not missing:
                return
            function = self._bind()
            self._calls = dict.fromkeys(missing)
            self._record()
        except StoreError as exc:
            message = f"run `{self._plan.run_id}`: the store cannot record the calls: {exc.message}"
            raise BackendError(message, executor=EXECUTOR, operation="submit", reason="store") from exc
        try:
            for number, rank in enumerate(missing):
                self._spawn(function, rank)
                if number % _RECORD_EVERY == _RECORD_EVERY - 1:
                    self._record()
            self._record()
        except BaseException as exc:
            with suppress(StoreError):
                self._record()
            created = [call or unknown_call(rank) for rank, call in self._calls.items()]
            if not isinstance(exc, AtollError):
                raise
            if not created and not adopted:
                raise
            raise SubmitError(
                f"run `{self._plan.run_id}`: {exc.message}",
                left_running=[*created, *adopted],
                created=created,
                executor=EXECUTOR,
                hint=exc.hint,
            ) from exc

    def _record(self) -> None:
        """Record the calls in the store. The copy on this machine is only for a cancel while the store is down."""
        for records in (self._local, self._records):
            try:
                records.record_sent(self._launcher, self._calls, lost=self._lost, handle=self._handle)
            except StoreError as exc:
                if records is self._records:
                    raise
                log.warning("this machine keeps no copy of the ids of the calls: %s", exc.message)

    def _spawn(self, function: Any, rank: int) -> None:
        """Send the call of one rank. It counts as possibly sent until Modal has surely refused it."""
        argument = self._plan.request["calls"][rank]
        deadline, pauses = None, self._client.pauses()
        while True:
            try:
                call = self._client.call(
                    "submit", f"spawn rank {rank}", lambda: function.spawn(argument).object_id, tries=1
                )
            except (BackendError, ConfigError) as exc:
                is_retryable = isinstance(exc, BackendError) and exc.retryable
                if is_retryable and not is_throttled(exc):
                    self._lost.add(rank)
                is_late = deadline is not None and deadline.is_past
                deadline = deadline or self._client.deadline()  # at least two tries, however long the first one took
                if not is_retryable or is_late:
                    self._forget_unsent(rank)
                    if isinstance(exc, RunNotFound):
                        raise BackendError(exc.message, executor=EXECUTOR, operation="submit") from exc
                    raise
            else:
                self._calls[rank] = str(call)
                log.info("spawned call %s of rank %d", call, rank)
                return
            deadline.sleep(next(pauses))

    def _forget_unsent(self, rank: int) -> None:
        """Keep only ranks for which a call was sent, or may have been."""
        later = [each for each in self._calls if each > rank]
        for each in [*later, *([] if rank in self._lost else [rank])]:
            del self._calls[each]


def unknown_call(rank: int) -> str:
    """The name of a call whose id is not known."""
    return f"rank-{rank:05d}"
