"""SshExecutor: replicas are process groups on a list of hosts that the user can log in to.

Each host gets a block of ranks, which the local executor there supervises; see `host`. The handle has the hosts, the
run id and the store, so any process with the same keys can use it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from atoll._threads import map_in_background
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.context import RunContext
from atoll.errors import (
    AtollError,
    BackendError,
    BackendUnavailable,
    ConfigError,
    Problems,
    RunNotFound,
    StopFailed,
    SubmitError,
    Unsupported,
)
from atoll.executors.base import Capabilities, Check, Plan, Stray, ranks_to_stop
from atoll.executors.ssh import doctor
from atoll.executors.ssh.connection import Hosts
from atoll.executors.ssh.errors import EXECUTOR, NOT_CONNECTED
from atoll.executors.ssh.hosts import Host, parsed
from atoll.executors.ssh.logs import read_lines
from atoll.executors.ssh.request import (
    CAPABILITIES,
    Block,
    blocks_of,
    blocks_of_handle,
    rows_of,
    run_handle,
    run_request,
    stray_of,
)
from atoll.executors.ssh.settings import SshSettings
from atoll.executors.ssh.stored import request_stop, stop_through_store, stored_rows
from atoll.executors.ssh.watching import HostsWatch
from atoll.executors.undo import submit_or_stop
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import ReplicaStatus, RunStatus
from atoll.validation import CLOCK, checks_settings, settings_hint

_AT_ONCE = 16
_STOP_S = 160.0
"""Time beyond the time for an answer in which a host ends its replicas and their outcomes are stored."""

log = logging.getLogger("atoll.executors")
T = TypeVar("T")
R = TypeVar("R")


class SshExecutor:
    """Runs replicas on hosts over ssh. `given` takes the fields of `SshSettings`."""

    name: ClassVar[str] = EXECUTOR
    capabilities: ClassVar[Capabilities] = CAPABILITIES
    settings_class: ClassVar[type] = SshSettings

    @checks_settings
    def __init__(self, *, clock: Annotated[Clock, CLOCK] = SYSTEM_CLOCK, **given: Any) -> None:
        self.settings = SshSettings(**given)
        self._hosts = Hosts(self.settings, clock)
        self._clock = clock

    # ── planning and starting ───────────────────────────────────────────────────────────────────────────────────

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        request, problems, notes = run_request(context, placement, self.settings)
        if problems:
            hint = settings_hint(EXECUTOR) if any(each.startswith(("hosts", "store")) for each in problems) else None
            raise Unsupported(self.name, context.run_id, problems, hint=hint)
        return Plan(self.name, context.run_id, placement.replicas, request, tuple(notes))

    def preflight(self, plan: Plan) -> None:
        """Every host can be reached, has this version of Atoll, and has what the run needs: GPUs, secrets, store."""
        problems = Problems()
        for _, answer in self._each(_planned(plan), lambda block: self._call(block, "check", _placed(plan, block))):
            problems.trying(partial(_as_config_error, answer))
        problems.raise_any(f"run `{plan.run_id}`")

    def handle(self, plan: Plan) -> RunHandle:
        return run_handle(plan.request, plan.replicas)

    def submit(self, plan: Plan) -> RunHandle:
        return submit_or_stop(self, plan)

    def start(self, plan: Plan) -> RunHandle:
        """One host after the other, so that after a refusal nothing more is started."""
        created: list[str] = []
        for block in _planned(plan):
            created.append(block.name)  # first: after an interrupt it may exist
            try:
                is_new = self._start(plan, block, created)
            except AtollError as exc:
                if not created and not getattr(exc, "retryable", False):
                    raise
                message = f"run `{plan.run_id}`: {exc.message}"
                names = tuple(created)
                raise SubmitError(message, left_running=names, created=names, executor=EXECUTOR, hint=exc.hint) from exc
            if not is_new:
                created.remove(block.name)
        return self.handle(plan)

    def _start(self, plan: Plan, block: Block, created: list[str]) -> bool:
        """Start a block. False if an earlier start did; a block whose answer was lost counts as new.

        If the host has surely started nothing for this, the name of the block is taken out of `created`.
        """
        lost: list[BackendError] = []
        try:
            answer = self._call(block, "start", _placed(plan, block), must_end=True, on_retry=lost.append)
        except AtollError as exc:
            if not any(map(_may_have_started, [*lost, exc])):
                created.remove(block.name)
            raise
        log.debug("run `%s`: ranks %s are on %s", plan.run_id, list(block.ranks), block.host)
        return bool(answer.get("is_new")) or any(map(_may_have_started, lost))

    # ── asking and stopping ─────────────────────────────────────────────────────────────────────────────────────

    def status(self, handle: RunHandle) -> RunStatus:
        return self._asked(blocks_of_handle(handle, "status"), {})[0]

    def watch(self, handle: RunHandle) -> HostsWatch:
        blocks = blocks_of_handle(handle, "status")
        return HostsWatch(self._hosts, blocks, partial(self._asked, blocks))

    def _asked(
        self, blocks: Sequence[Block], known: Mapping[Block, list[ReplicaStatus]]
    ) -> tuple[RunStatus, list[Block]]:
        """The status, of which some rows are known, and the blocks of the hosts that answered. Raises if none did."""
        asked = self._each([block for block in blocks if block not in known], self._block_status)
        errors = [answer for _, answer in asked if isinstance(answer, AtollError)]
        if errors and len(errors) == len(blocks):
            raise errors[0]
        found = dict(asked)
        rows = [(block, known[block] if block in known else found[block]) for block in blocks]
        return _joined(rows), [block for block, answer in asked if not isinstance(answer, AtollError)]

    def stored_status(self, handle: RunHandle, problem: str) -> RunStatus:
        rows = [stored_rows(block, problem) for block in blocks_of_handle(handle, "status")]
        return RunStatus(tuple(row for block in rows for row in block))

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        """Over ssh; if a host cannot be reached, through the store, which then has to show the end of each rank."""
        chosen = ranks_to_stop(self, handle, ranks)
        blocks = [block for block in blocks_of_handle(handle, "cancel") if set(block.ranks) & set(chosen)]
        found = self._each(blocks, lambda block: self._stop(block, chosen))
        refusals = {block: answer for block, answer in found if isinstance(answer, AtollError)}
        silent = [block for block, error in refusals.items() if isinstance(error, BackendUnavailable)]
        why = stop_through_store(silent, chosen, self._clock)
        problems = {
            block.name: f"{error.message}; {why[block]}" if why.get(block) else error.message
            for block, error in refusals.items()
            if why.get(block) != ""
        }
        if problems:
            first = next(error for block, error in refusals.items() if block.name in problems)
            raise StopFailed(f"run `{blocks[0].context.run_id}`", problems, executor=EXECUTOR) from first

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        block = next((b for b in blocks_of_handle(handle, "logs") if rank in b.ranks), None)
        if block is None:
            raise RunNotFound(f"run `{handle.native_id}` has no rank {rank}", executor=EXECUTOR, operation="logs")
        return read_lines(self._hosts, block, rank - block.ranks.start, tail=tail, follow=follow)

    # ── finding and checking ────────────────────────────────────────────────────────────────────────────────────

    def origin(self, handle: RunHandle) -> RunContext | None:
        context = blocks_of_handle(handle, "attach")[0].context
        return RunContext(context.run_id, context.store_uri, context.launch, handle.first_rank)

    def strays(self) -> list[Stray]:
        """What runs on the hosts of the settings for launchers on other machines; hosts that fail are logged."""
        found = self._each(self._listed(), lambda host: self._hosts.call(host, "strays", "", {}))
        errors = [answer for _, answer in found if isinstance(answer, AtollError)]
        if errors and len(errors) == len(found):
            raise errors[0]
        for error in errors:
            log.warning("not searched: %s", error.message)
        return [
            stray_of(host, each)
            for host, answer in found
            if not isinstance(answer, AtollError)
            for each in answer["strays"]
        ]

    def diagnose(self) -> list[Check]:
        return doctor.setup_checks(self.settings, self._hosts)

    def _listed(self) -> list[Host]:
        hosts = [host for address in self.settings.hosts if (host := parsed(address)) is not None]
        if not hosts:
            raise ConfigError("no hosts are set", hint=settings_hint(EXECUTOR))
        return hosts

    # ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _call(self, block: Block, verb: str, more: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        return self._hosts.call(block.host, verb, block.context.run_id, {**block.body(), **(more or {})}, **options)

    def _each(self, items: Sequence[T], call: Callable[[T], R]) -> list[tuple[T, R | AtollError]]:
        """The answer for each item, or its error; many at once."""

        def tried(item: T) -> R | AtollError:
            try:
                return call(item)
            except AtollError as exc:
                return exc

        answers = list(map(tried, items)) if len(items) < 2 else map_in_background(tried, items, most=_AT_ONCE)
        return list(zip(items, answers, strict=True))

    def _block_status(self, block: Block) -> list[ReplicaStatus]:
        return rows_of(block, self._call(block, "status")["replicas"])

    def _stop(self, block: Block, chosen: Sequence[int]) -> None:
        """Stop the replicas of a block that are chosen; all of them if all are.

        A refusal does not matter if a look at the host shows that none of them runs, such as before their start.
        """
        own = [rank - block.ranks.start for rank in chosen if rank in block.ranks]
        more = {} if len(own) == len(block.ranks) else {"ranks": own}
        asked: list[BackendError] = []

        def ask_through_store(error: BackendError) -> None:
            """While the connection is tried again, the replicas stop already."""
            if not asked:
                asked.append(error)
                with suppress(AtollError):
                    request_stop(block, chosen)

        try:
            limit_s = self.settings.timeout_s + _STOP_S
            self._call(block, "stop", more, timeout_s=limit_s, on_retry=ask_through_store)
        except BackendError as refusal:
            if refusal.retryable or not self._has_ended(block, own):
                raise

    def _has_ended(self, block: Block, places: Sequence[int]) -> bool:
        """Whether the host says that these replicas of the block do not run; False if it says nothing."""
        try:
            rows = self._block_status(block)
        except BackendError:
            return False
        return all(rows[place].state.is_terminal for place in places)


def _may_have_started(error: AtollError) -> bool:
    """Whether a host may have started replicas although its start failed so."""
    is_lost = getattr(error, "retryable", False) and error.reason != NOT_CONNECTED
    return is_lost or isinstance(error, SubmitError)


def _planned(plan: Plan) -> list[Block]:
    """The blocks of a plan."""
    request = plan.request
    context = RunContext(
        request["run_id"], request["store"], request["launch"], request["hosts"][0]["ranks"][0], request["world_size"]
    )
    hosts = [host for each in request["hosts"] if (host := parsed(each["host"])) is not None]
    return blocks_of(context, plan.replicas, hosts)


def _placed(plan: Plan, block: Block) -> dict[str, Any]:
    """The placement of a block: that of the run, with the replicas of the block."""
    return {"placement": {**plan.request["placement"], "replicas": len(block.ranks)}}


def _as_config_error(answer: object) -> None:
    """Raise the error of a host before a launch. What the user has to change on the host is input like any other."""
    if isinstance(answer, ConfigError):
        raise answer
    if isinstance(answer, BackendError) and answer.reason in ("no_python", "no_atoll", "version"):
        raise ConfigError(answer.message, reason=answer.reason, hint=answer.hint) from answer
    if isinstance(answer, AtollError):
        raise answer


def _joined(found: Sequence[tuple[Block, list[ReplicaStatus] | AtollError]]) -> RunStatus:
    """The rows of the hosts that answered; for the others, what the store has."""
    rows: list[ReplicaStatus] = []
    for block, answer in found:
        rows += stored_rows(block, answer.message) if isinstance(answer, AtollError) else answer
    return RunStatus(tuple(rows))
