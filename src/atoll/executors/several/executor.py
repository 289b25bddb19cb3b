"""SeveralExecutor: the replicas of one run are at several other executors, which are its parts.

Each part gets its own request with the ranks of the run. A part that cannot be started makes the whole start fail; the
caller then stops the other parts by name. Executors of parts come from the caller, or from the registry by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from atoll import registry
from atoll._threads import map_in_background
from atoll.context import RunContext
from atoll.errors import (
    AtollError,
    BackendError,
    ConfigError,
    Problems,
    RunNotFound,
    StopFailed,
    SubmitError,
    Unsupported,
)
from atoll.executors.base import (
    AttemptReader,
    Capabilities,
    Executor,
    HandleResolver,
    Linker,
    PartHandle,
    Plan,
    Preflighter,
    Pricer,
    QueueLimiter,
    Rated,
    Replacer,
    Restarter,
    Starter,
    StoreReader,
    ranks_to_stop,
)
from atoll.executors.several.parts import (
    ANY,
    EXECUTOR,
    common,
    joined_handle,
    joined_plan,
    joined_status,
    part_handles,
    part_plans,
    title,
    unanswered,
)
from atoll.executors.several.unusable import Unusable
from atoll.executors.undo import has_created_nothing, submit_or_stop
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import RunStatus
from atoll.validation import Kind, a, a_table_of, checks_settings

_TABLES = a_table_of(Kind("a table of settings", a(Mapping)))
_EXECUTORS = Kind(
    "a list of executors, which only Python code can give",
    lambda value: isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Executor) for each in value),
)
_AT_ONCE = 8


class SeveralExecutor:
    """Runs the parts of a run on other executors. `settings` has those of each backend, by its name."""

    name: ClassVar[str] = EXECUTOR
    capabilities: ClassVar[Capabilities] = ANY

    @checks_settings
    def __init__(
        self,
        *,
        settings: Annotated[Mapping[str, Mapping[str, Any]], _TABLES._replace(may_be_none=True)] | None = None,
        executors: Annotated[Sequence[Executor], _EXECUTORS._replace(may_be_none=True)] | None = None,
    ) -> None:
        self._settings, self._given = dict(settings or {}), tuple(executors or ())
        self._made: dict[str, Executor] = {}
        if self._given:
            self.capabilities = common([each.capabilities for each in self._given])  # type: ignore[misc]

    @property
    def command(self) -> tuple[str, ...]:
        """The program of an image that a part runs in place of replicas; a launch refuses it."""
        commands = (tuple(getattr(each, "command", ())) for each in self._given)
        return next((command for command in commands if command), ())

    # Planning and starting.

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        problems: list[str] = []
        hints: dict[str, None] = {}
        plans: list[Plan] = []
        for number, (first_rank, own) in enumerate(placement.of_parts()):
            name = placement.parts[number].on
            where = title(name, first_rank, own.replicas)
            world_size = context.world_size or placement.replicas
            part = replace(context, first_rank=context.first_rank + first_rank, world_size=world_size)
            try:
                plans.append(self._starter(number, name).plan(part, own))
            except Unsupported as exc:
                problems += (f"{problem} ({where})" for problem in exc.problems)
                hints |= {exc.hint: None} if exc.hint else {}
            except ConfigError as exc:
                problems.append(f"parts: {exc.message} ({where})")
        if not placement.parts:
            problems.append("parts: name them, such as `--on kubernetes:2 --on modal:2`")
        if problems:
            raise Unsupported(self.name, context.run_id, problems, hint="; ".join(hints) or None)
        return joined_plan(context.run_id, plans)

    def preflight(self, plan: Plan) -> None:
        problems = Problems()
        for executor, part, _ in self._planned(plan):
            if isinstance(executor, Preflighter):
                problems.trying(lambda e=executor, p=part: e.preflight(p))  # type: ignore[misc]
        problems.raise_any(f"run `{plan.run_id}`")

    def prices(self, plan: Plan) -> list[str]:
        found: list[str] = []
        for executor, part, first_rank in self._planned(plan):
            if isinstance(executor, Pricer):
                where = title(part.executor, first_rank, part.replicas)
                try:
                    found += (f"{where}: {note}" for note in executor.prices(part))
                except BackendError as exc:
                    found.append(f"{where}: price unknown: {exc.message}")
        return found

    def hourly_usd(self, plan: Plan, placement: Placement) -> float | None:
        """The mean price of a replica; None if the price of a part is not known."""
        prices = self.part_prices(plan, placement)
        known = [
            price * part.replicas for price, part in zip(prices, part_plans(plan), strict=True) if price is not None
        ]
        return sum(known) / plan.replicas if len(known) == len(prices) else None

    def part_prices(self, plan: Plan, placement: Placement) -> list[float | None]:
        found: list[float | None] = []
        for (executor, part, _), (_, own) in zip(self._planned(plan), placement.of_parts(), strict=True):
            try:
                found.append(executor.hourly_usd(part, own) if isinstance(executor, Rated) else None)
            except BackendError:
                found.append(None)
        return found

    def handle(self, plan: Plan) -> RunHandle:
        return joined_handle([executor.handle(part) for executor, part, _ in self._planned(plan)])

    def submit(self, plan: Plan) -> RunHandle:
        return submit_or_stop(self, plan)

    def start(self, plan: Plan) -> RunHandle:
        started: list[str] = []
        for executor, part, first_rank in self._planned(plan):
            try:
                executor.start(part)
            except AtollError as exc:
                is_refused = has_created_nothing(exc)
                if is_refused and not started:
                    raise
                more = (
                    exc.left_running if isinstance(exc, SubmitError) else [] if is_refused else [executor.handle(part)]
                )
                left = [*started, *map(str, more)]
                message = exc.message.removesuffix(exc.tail) if isinstance(exc, SubmitError) else exc.message
                where = title(executor.name, first_rank, part.replicas)
                raise SubmitError(
                    f"run `{plan.run_id}`: {where}: {message.removeprefix(f'run `{plan.run_id}`: ')}",
                    left_running=left,
                    created=left or started,
                    executor=self.name,
                    hint=exc.hint,
                ) from exc
            started.append(str(executor.handle(part)))
        return self.handle(plan)

    def replace(self, plan: Plan, rank: int, ended: str) -> str | None:
        for executor, part, first_rank in self._planned(plan):
            if first_rank <= rank < first_rank + part.replicas:
                return executor.replace(part, rank - first_rank, ended) if isinstance(executor, Replacer) else None
        return None

    # After the start.

    def parts_of(self, handle: RunHandle) -> list[PartHandle]:
        found, first_rank = list[PartHandle](), 0
        for number, part in enumerate(part_handles(handle)):
            try:
                executor = self._executor(number, part.executor)
            except ConfigError as exc:  # such as a package that is missing here; the other parts can be used
                executor = Unusable(part.executor, exc)
            found.append(PartHandle(executor, part, first_rank))
            first_rank += part.replicas
        return found

    def status(self, handle: RunHandle) -> RunStatus:
        """Of each part whose backend answers. Of the others what the store has, where replicas report all to it;
        elsewhere PENDING with the reason NO_ANSWER, which `Run.status` completes from the store. A backend that
        cannot be asked because of the setup of this machine does not answer, either.

        Raises if no backend answers.
        """
        parts = self.parts_of(handle)
        answers = map_in_background(_status_or_error, parts, most=_AT_ONCE)
        _raise_if_none_answers(answers)
        return _joined(parts, answers)

    def stored_status(self, handle: RunHandle, problem: str) -> RunStatus:
        """Every rank as the store knows it. Parts that do not report all to the store are asked.

        Raises if there are only such parts and none answers.
        """
        parts = self.parts_of(handle)
        missing = BackendError(problem, executor=self.name, operation="status")
        answers = [missing if isinstance(each.executor, StoreReader) else _status_or_error(each) for each in parts]
        if not any(isinstance(each.executor, StoreReader) for each in parts):
            _raise_if_none_answers(answers)
        return _joined(parts, answers)

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        wanted = ranks_to_stop(self, handle, ranks)
        chosen = [
            (part, [rank - part.first_rank for rank in wanted if rank in part.ranks]) for part in self.parts_of(handle)
        ]
        for part, own in chosen:
            if own:
                ranks_to_stop(part.executor, part.handle, own)
        found = map_in_background(lambda each: _refusals(*each), [each for each in chosen if each[1]], most=_AT_ONCE)
        if refusals := {name: reason for each in found for name, reason in each.items()}:
            raise StopFailed(f"run on {handle.scope}", refusals, executor=self.name)

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        part = self._part(handle, rank)
        return part.executor.logs(part.handle, rank - part.first_rank, tail=tail, follow=follow)

    def attempt_logs(self, handle: RunHandle, rank: int, attempt: int, *, tail: int | None = None) -> Iterator[str]:
        part = self._part(handle, rank)
        if not isinstance(part.executor, AttemptReader):
            what = f"`{part.executor.name}` keeps no output of attempt {attempt} of rank {rank}"
            raise RunNotFound(what, executor=self.name, operation="logs")
        return part.executor.attempt_logs(part.handle, rank - part.first_rank, attempt, tail=tail)

    def restart(self, handle: RunHandle, *, is_cancelled: Callable[[], bool] | None = None) -> bool:
        """Start the replicas of each part again that wait for that; see `Restarter`."""
        parts = [(executor, part) for executor, part, _ in self.parts_of(handle) if isinstance(executor, Restarter)]
        restarted = [executor.restart(part, is_cancelled=is_cancelled) for executor, part in parts]
        return any(restarted)

    def queue_left_s(self, handle: RunHandle) -> float:
        parts = self.parts_of(handle)
        left = [part.executor.queue_left_s(part.handle) for part in parts if isinstance(part.executor, QueueLimiter)]
        return min(left, default=float("inf"))

    def origin(self, handle: RunHandle) -> RunContext | None:
        for executor, part, _ in self.parts_of(handle):
            found = executor.origin(part) if isinstance(executor, HandleResolver) else None
            if found is not None:
                return replace(found, first_rank=0, world_size=None)
        return None

    def links(self, handle: RunHandle, rank: int) -> dict[str, str]:
        part = self._part(handle, rank)
        executor = part.executor
        return executor.links(part.handle, rank - part.first_rank) if isinstance(executor, Linker) else {}

    def _part(self, handle: RunHandle, rank: int) -> PartHandle:
        for part in self.parts_of(handle):
            if rank in part.ranks:
                return part
        raise RunNotFound(f"the run on {handle.scope} has no rank {rank}", executor=self.name, operation="logs")

    def _planned(self, plan: Plan) -> list[tuple[Any, Plan, int]]:
        """The executor, the plan and the first rank of each part."""
        found, first_rank = list[tuple[Any, Plan, int]](), 0
        for number, part in enumerate(part_plans(plan)):
            found.append((self._starter(number, part.executor), part, first_rank))
            first_rank += part.replicas
        return found

    def _starter(self, number: int, name: str) -> Any:
        """The executor of a part that is to be started; its handle follows from the plan, so that it can be undone."""
        executor = self._executor(number, name)
        if not isinstance(executor, Starter):
            raise ConfigError(f"`{name}` cannot run a part: only its service knows the names of what it starts")
        return executor

    def _executor(self, number: int, name: str) -> Executor:
        """The executor of a part: the one that the caller gave, or one from the registry."""
        if number < len(self._given) and self._given[number].name == name:
            return self._given[number]
        if name == self.name:
            raise ConfigError(f"a part of a run is on one backend, and not on `{name}`")
        if name not in self._made:
            self._made[name] = registry.executor(name, **self._settings.get(name, {}))
        return self._made[name]


def _status_or_error(part: PartHandle) -> RunStatus | BackendError | ConfigError:
    try:
        return part.executor.status(part.handle)
    except (BackendError, ConfigError) as exc:
        return exc


def _raise_if_none_answers(answers: Sequence[RunStatus | BackendError | ConfigError]) -> None:
    errors = [answer for answer in answers if not isinstance(answer, RunStatus)]
    if errors and len(errors) == len(answers):
        raise errors[0]


def _joined(parts: Sequence[PartHandle], answers: Sequence[RunStatus | BackendError | ConfigError]) -> RunStatus:
    """The status of a run; the store is read for the parts that have an error, if their executor can read it."""
    statuses = map(_without_error, parts, answers)
    return joined_status((part.executor.name, status) for part, status in zip(parts, statuses, strict=True))


def _without_error(part: PartHandle, answer: RunStatus | BackendError | ConfigError) -> RunStatus:
    if isinstance(answer, RunStatus):
        return answer
    if isinstance(part.executor, StoreReader):
        return part.executor.stored_status(part.handle, answer.message)
    return unanswered(part.handle, answer.message)


def _refusals(part: PartHandle, ranks: Sequence[int]) -> dict[str, str]:
    """Stop these replicas of a part. Returns those that may still run, and why."""
    everyone = len(ranks) == part.handle.replicas
    try:
        part.executor.cancel(part.handle, None if everyone else ranks)
    except StopFailed as exc:
        return exc.refusals
    except AtollError as exc:  # also an error of this machine's setup: the other parts are stopped all the same
        return {str(part.handle): exc.message}
    return {}
