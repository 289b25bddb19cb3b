"""Every exception Atoll raises, drawn as one tree. Exit codes of the command line are in brackets.

AtollError
├── ConfigError [2]            fix your input; nothing was started (also a ValueError)
│   ├── UsageError             the command line is not valid
│   ├── InvalidSpec            one or more fields, each with its value and the rule it breaks
│   │   ├── EntryMissing       the module of the entry point has no such function (also a RuntimeError)
│   │   └── LaunchRefused      the service refuses a launch of the replica protocol (also a RuntimeError)
│   ├── UnknownName            an executor, store, GPU or codec that does not exist; suggests a similar name
│   ├── Unsupported            this backend cannot do this placement; every reason at once
│   ├── MissingExtra           an optional package is not installed (also an ImportError and a RuntimeError)
│   └── Conflict               this run id belongs to a run with other content or other settings
├── BackendError [3]           the service that runs replicas refused or failed (also a RuntimeError)
│   ├── AuthError              credentials are missing, expired or not allowed to do this
│   ├── CapacityError          no quota or no machines
│   ├── SubmitError            starting failed half-way; .left_running names what could not be undone
│   ├── StopFailed             not every replica could be stopped; .left_running names those that may still run
│   ├── RunNotFound            the backend has no such run
│   └── BackendUnavailable     no answer, throttled or broken; trying again may work
├── StoreError [4]             the object store refused or failed (also a RuntimeError)
│   ├── KeyNotFound            (also a FileNotFoundError)
│   ├── KeyExists              (also a FileExistsError)
│   ├── BadKey                 not a valid key (also a ValueError)
│   ├── StoreRefused           credentials or permissions
│   └── StoreUnavailable       no answer, throttled or broken; trying again may work
├── RoundError [5]             replicas could not agree on a round
│   ├── QuorumLost             too few updates before the deadline, or a rank that the round needs is dead
│   │   └── RanksMissing       not every rank contributed to a mean by name (also a TimeoutError)
│   ├── PartsDiffer            ranks gave tensors that cannot be combined
│   ├── CorruptUpdate          an object failed a check; names the rank and the check
│   ├── LeftBehind             the objects of this round are deleted; continue from a snapshot
│   └── Fenced                 a newer attempt of this rank is running
├── RunFailed [1]              the run ended and not every replica succeeded; .result has the details
├── WaitTimeout [124]          the run is still going when the wait's deadline passed
└── InternalError [70]         a bug in Atoll; please report it

Classes differ only where a caller would act differently. Adapters translate vendor exceptions at the call with
`translating`; the vendor's exception stays available as `__cause__`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from atoll.result import RunResult
    from atoll.status import RunStatus

logging.getLogger("atoll").addHandler(logging.NullHandler())  # here, because every other module imports this one

_SIMILAR = 0.75
"""difflib's ratio from which a name counts as a misspelling: one wrong letter of four."""


class AtollError(Exception):
    """Base of every error Atoll raises on purpose. `hint` is the next step, if there is one.

    `reason` is a stable word where one class has several causes, and empty where the class says enough.
    """

    exit_code = 70

    def __init__(self, message: str, *, reason: str = "", hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.hint = hint

    @property
    def code(self) -> str:
        """The class name: a stable word for machine output."""
        return type(self).__name__

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class ConfigError(AtollError, ValueError):
    """Your input has to change. Nothing was started."""

    exit_code = 2


class UsageError(ConfigError):
    """The command line is not valid."""


class InvalidSpec(ConfigError):
    """A specification breaks one or more rules. `problems` has one line for each, `fields` the field of each.

    A problem is written `field=value: rule`, or `field: rule`.
    """

    def __init__(self, what: str, problems: Sequence[str], *, hint: str | None = None) -> None:
        self.problems, self.fields = tuple(problems), _fields(problems)
        super().__init__(_listed(f"{what} is not valid", self.problems), hint=hint)


class EntryMissing(InvalidSpec, RuntimeError):
    """The module of the entry point has no such function."""


class LaunchRefused(InvalidSpec, RuntimeError):
    """The service refuses a launch of the replica protocol. Nothing was started."""


class UnknownName(ConfigError):
    """A name that is not registered; the message suggests a similar one."""

    def __init__(self, kind: str, name: str, known: Sequence[str], *, hint: str | None = None) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        meant = did_you_mean(name, known)
        listed = ", ".join(f"`{k}`" for k in sorted(known))
        super().__init__(f"unknown {kind} `{name}`{f'{meant} Known' if meant else '; known'}: {listed}", hint=hint)


class Unsupported(ConfigError):
    """A backend cannot do what the placement asks. `problems` has every reason."""

    def __init__(self, executor: str, run_id: str, problems: Sequence[str], *, hint: str | None = None) -> None:
        self.executor, self.run_id = executor, run_id
        self.problems, self.fields = tuple(problems), _fields(problems)
        super().__init__(_listed(f"cannot plan run `{run_id}` on `{executor}`", self.problems), hint=hint)


class MissingExtra(ConfigError, ImportError, RuntimeError):
    """An optional package is not installed, or cannot be imported because of `problem`."""

    def __init__(self, package: str, *, extra: str, problem: str = "") -> None:
        from atoll.registry import install_command

        self.extra = extra
        what = f"cannot be imported: {problem}" if problem else "is not installed"
        super().__init__(f"`{package}` {what}", hint=install_command(extra))


class Conflict(ConfigError):
    """The run id belongs to a run with other content. `differences` has one line for each.

    `what` replaces the first line of the message. `reason` is `cancelled` if the run was cancelled earlier.
    """

    def __init__(
        self,
        run_id: str,
        differences: Sequence[str] = (),
        *,
        what: str | None = None,
        reason: str = "",
        hint: str | None = None,
    ) -> None:
        self.run_id, self.differences = run_id, tuple(differences)
        head = what or f"run `{run_id}` already exists with other content"
        message = _listed(head, self.differences, noun="difference") if differences else head
        super().__init__(message, reason=reason, hint=hint or "choose another run id, or leave it out to get a new one")


class BackendError(AtollError, RuntimeError):
    """The service that runs replicas refused or failed."""

    exit_code = 3
    retryable = False

    def __init__(
        self, message: str, *, executor: str = "", operation: str = "", reason: str = "", hint: str | None = None
    ) -> None:
        self.executor, self.operation = executor, operation
        super().__init__(message, reason=reason, hint=hint)


class AuthError(BackendError):
    """Credentials are missing, expired or not allowed to do this."""


class CapacityError(BackendError):
    """The backend has no quota or no machines for this."""


class SubmitError(BackendError):
    """Starting failed half-way. `left_running` names every replica that may run; empty means that none does.

    `created` names the replicas that the failed submit created or may have created, without those of other launchers.
    """

    def __init__(
        self,
        message: str,
        *,
        left_running: Sequence[str] = (),
        created: Sequence[str] = (),
        executor: str = "",
        hint: str | None = None,
    ):
        self.left_running, self.created = tuple(left_running), tuple(created)
        super().__init__(message + self.tail, executor=executor, operation="submit", hint=hint)

    @property
    def tail(self) -> str:
        """The end of the message, which says what may still run."""
        return f"; may still run: {', '.join(self.left_running)}" if self.left_running else "; nothing is left running"


class StopFailed(BackendError):
    """Not every replica could be stopped. `refusals` has the reason for each name in `left_running`."""

    def __init__(self, what: str, refusals: Mapping[str, str], *, executor: str = "", hint: str | None = None) -> None:
        self.refusals, self.left_running = dict(refusals), tuple(refusals)
        lines = [f"  {name}: {reason}" for name, reason in refusals.items()]
        count = f"{len(lines)} replica{'s' if len(lines) != 1 else ''} may still run"
        super().__init__(
            "\n".join([f"{what}: {count}", *lines]),
            executor=executor,
            operation="cancel",
            hint=hint or "repeat the cancel; it stops what is left and does nothing to the rest",
        )


class RunNotFound(BackendError):
    """The backend has no such run."""


class BackendUnavailable(BackendError):
    """The backend gave no answer, throttled us or broke. Trying again may work."""

    retryable = True


class StoreError(AtollError, RuntimeError):
    """The object store refused or failed."""

    exit_code = 4
    retryable = False

    def __init__(
        self, message: str, *, uri: str = "", key: str = "", reason: str = "", hint: str | None = None
    ) -> None:
        self.uri, self.key = uri, key
        super().__init__(message, reason=reason, hint=hint)


class KeyNotFound(StoreError, FileNotFoundError):
    """No object has this key."""

    def __init__(self, key: str, *, uri: str = "") -> None:
        super().__init__(f"no object `{key}` in {uri or 'the store'}", uri=uri, key=key)


class KeyExists(StoreError, FileExistsError):
    """`create` found that the key is taken."""

    def __init__(self, key: str, *, uri: str = "") -> None:
        super().__init__(f"object `{key}` already exists in {uri or 'the store'}", uri=uri, key=key)


class BadKey(StoreError, ValueError):
    """Not a valid key: empty, absolute, or with `.` or `..` parts."""

    def __init__(self, key: str, rule: str) -> None:
        super().__init__(f"bad key {key!r}: {rule}", key=key)


class StoreRefused(StoreError):
    """The store does not let us do this: credentials or permissions."""


class StoreUnavailable(StoreError):
    """The store gave no answer, throttled us or broke. Trying again may work."""

    retryable = True


class RoundError(AtollError):
    """Replicas could not agree on a round."""

    exit_code = 5

    def __init__(self, message: str, *, round_no: int = -1, reason: str = "", hint: str | None = None) -> None:
        self.round_no = round_no
        super().__init__(message, reason=reason, hint=hint)


class QuorumLost(RoundError):
    """Too few updates arrived before the deadline. `missing` names the ranks.

    `timed_out` is False if the round gave up before the deadline, because no more updates could arrive. If it gave up
    because ranks that it needs are dead, `dead` names them, and `reason` is `dead`.
    """

    def __init__(
        self,
        message: str,
        *,
        round_no: int,
        missing: Sequence[int] = (),
        timed_out: bool = True,
        dead: Sequence[int] = (),
        hint: str | None = None,
    ) -> None:
        self.missing, self.timed_out, self.dead = tuple(missing), timed_out, tuple(dead)
        super().__init__(message, round_no=round_no, reason="dead" if dead else "", hint=hint)


class CorruptUpdate(RoundError):
    """An object failed a check. `rank` is the rank that wrote it, `check` the name of the check."""

    def __init__(self, message: str, *, round_no: int = -1, rank: int = -1, check: str = "") -> None:
        self.rank, self.check = rank, check
        super().__init__(message, round_no=round_no)


class LeftBehind(RoundError):
    """The other ranks passed this round and its objects are deleted: load the latest snapshot and replay from there."""

    def __init__(self, message: str, *, round_no: int, latest: int) -> None:
        self.latest = latest
        super().__init__(message, round_no=round_no, hint="load the latest snapshot, then replay")


class Fenced(RoundError):
    """A newer attempt of this rank is running; this process must stop."""


class RanksMissing(QuorumLost, TimeoutError):
    """The deadline passed before every rank contributed."""


class PartsDiffer(RoundError):
    """Ranks gave tensors that cannot be combined. `words` describes the tensors of each rank."""

    def __init__(self, name: str, generation: int, words: Mapping[int, str]) -> None:
        self.name, self.words = name, dict(words)
        groups: dict[str, list[int]] = {}
        for rank, description in sorted(words.items()):
            groups.setdefault(description, []).append(rank)
        listed = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in groups.items())
        hint = "every rank must give the same shapes and dtypes under a name, made from the same state"
        super().__init__(f"ranks disagree on `{name}`: {listed}", round_no=generation, hint=hint)


class RunFailed(AtollError):
    """The run is over and not every replica succeeded."""

    exit_code = 1

    def __init__(self, message: str, *, result: RunResult | None = None, hint: str | None = None) -> None:
        self.result = result
        super().__init__(message, hint=hint)


class WaitTimeout(AtollError, TimeoutError):
    """The wait's deadline passed before the run was over.

    `status` is the last `RunStatus` that was read; None if no status was read.
    """

    exit_code = 124

    def __init__(
        self, message: str, *, status: RunStatus | None = None, reason: str = "", hint: str | None = None
    ) -> None:
        self.status = status
        super().__init__(message, reason=reason, hint=hint)


class InternalError(AtollError):
    """A bug in Atoll."""

    exit_code = 70

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="this is a bug in Atoll; please report it with the lines above")


@contextmanager
def translating(table: dict[type[Exception], type[AtollError]], message: str, **attributes: str) -> Iterator[None]:
    """Translate vendor exceptions that the block raises. The first matching row applies: put narrow types first."""
    try:
        yield
    except tuple(table) as exc:
        for vendor, ours in table.items():
            if isinstance(exc, vendor):
                raise ours(f"{message}: {exc}", **attributes) from exc
        raise


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` may be a misspelling of; None if no name is similar. Ignores case."""
    from difflib import get_close_matches

    others = {other.lower(): other for other in known if other != name}
    found = get_close_matches(name.lower(), others, n=3, cutoff=_SIMILAR)
    swapped = [other for other in found if sorted(other) == sorted(name.lower())]  # two letters in the wrong order
    return others[(swapped or found)[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`, did you mean `x`?`, or an empty string."""
    meant = closest(name, known)
    return f", did you mean `{meant}`?" if meant else ""


def _fields(problems: Sequence[str]) -> tuple[str, ...]:
    """The field of each problem: `rank` of `rank=5: at most 3`."""
    return tuple(re.split("=|: ", problem, maxsplit=1)[0].strip("` ") for problem in problems)


def _listed(head: str, lines: Sequence[str], noun: str = "problem") -> str:
    count = f"{len(lines)} {noun}{'s' if len(lines) != 1 else ''}"
    return "\n".join([f"{head}: {count}", *(f"  {line}" for line in lines)])


T = TypeVar("T")


class Problems:
    """Collects `ConfigError`s that do not depend on each other, so that the user sees all of them at once."""

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def trying(self, make: Callable[[], T]) -> T | None:
        """The result of `make()`; None if it raised `ConfigError`, which is kept."""
        try:
            return make()
        except ConfigError as exc:
            self._errors.append(exc)
            return None

    def raise_any(self, what: str) -> None:
        """Raise a single error as it is, and several as one `InvalidSpec` about `what`."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            lines: list[str] = []
            for error in self._errors:
                lines += error.problems if isinstance(error, InvalidSpec | Unsupported) else [error.message]
            hints = dict.fromkeys(error.hint for error in self._errors if error.hint)
            raise InvalidSpec(what, lines, hint="; ".join(hints) or None) from self._errors[0]
