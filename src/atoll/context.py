"""The two contexts: what an executor knows about a run, and what a replica knows about itself.

This module writes and reads the environment variables of replicas, so their names are in one place. It also knows the
folder of this user's state on this machine (`home`), which is only a cache and local spools: the store has the truth.
"""

from __future__ import annotations

import json
import os
import signal
import time
from _thread import get_ident
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.disk import is_full
from atoll.errors import ConfigError, InvalidSpec
from atoll.names import ID_RULE, native_name, run_id_problem
from atoll.validation import COUNT, INDEX, Kind, a, check_fields, plain, shown

if TYPE_CHECKING:
    from atoll.stores.base import Store

RANK, WORLD_SIZE = "REPLICA_RANK", "WORLD_SIZE"
RUN_ID, STORE, ATTEMPT, SPOOL = "ATOLL_RUN_ID", "ATOLL_STORE", "ATOLL_ATTEMPT", "ATOLL_SPOOL"
RENDEZVOUS = "RENDEZVOUS_URI"
"""The name that other tools use for the store; always set, and read if ATOLL_STORE is absent."""
LAUNCH = "ATOLL_LAUNCH_NUMBER"
"""The number of the launch; set from the second launch of a run on."""
LABEL = "ATOLL_LABEL"
"""Marks every process of a run, so that `sweep` finds processes that no record names."""
TIMEOUT, GRACE = "ATOLL_TIMEOUT_S", "ATOLL_GRACE_S"
"""Limits that the supervisor in a container enforces, in addition to those of the service."""
TIMED_OUT = 124
"""The exit code of a container whose supervisor has ended the replica at its time limit."""
TOO_OLD = 80
"""The exit code of a replica that is older than the launcher of its run; see `journal.version_problem`."""
_MOST_SIGNAL = 64
"""The highest signal of Linux."""
MAX_RESTARTS = "ATOLL_MAX_RESTARTS"
"""Restarts of the entry point by the supervisors in all containers of a rank; absent if there are none."""
CLAIM = "ATOLL_CLAIM"
"""The name of the variable with the id of a container's job. If it is set, one container runs a rank and others end."""
CLAIMED = 75
"""The exit code of a container that another container of its rank, or a stop, has made superfluous."""
STORE_STOPS = "ATOLL_STORE_STOPS"
"""If it is `1`, the supervisor in a container looks for requests to stop in the store; see `journal.record_stop`."""
FIRST_RANK, RANK_ENV = "ATOLL_FIRST_RANK", "ATOLL_RANK_ENV"
"""For a part whose service numbers its containers from 0: what `python -m atoll.replica` adds to the rank, and the name
of another variable that has the rank. See `global_rank`."""
PART = "ATOLL_PART"
"""The first rank and the number of replicas of a part of a run, such as `2:3`; absent if one backend has them all."""
RESERVED = (
    RANK,
    WORLD_SIZE,
    RUN_ID,
    STORE,
    ATTEMPT,
    SPOOL,
    RENDEZVOUS,
    LAUNCH,
    LABEL,
    TIMEOUT,
    GRACE,
    MAX_RESTARTS,
    CLAIM,
    STORE_STOPS,
    FIRST_RANK,
    RANK_ENV,
    PART,
)
_RECENT_ROUNDS = 16
_HINT = "`atoll run` and `atoll.launch` start replicas; without them, pass `ctx=ReplicaContext(…)`"


@dataclass(frozen=True)
class RunContext:
    """What an executor knows of a run besides its placement. Replicas read the task from the store."""

    run_id: str
    store_uri: str
    launch: int = 1
    """A run is launched again, with other native names, after an earlier launch was undone."""
    first_rank: int = 0
    """The rank of the executor's first replica; above 0 if the executor runs a later part of a run."""
    world_size: int | None = None
    """The number of replicas of the whole run; None if the executor runs all of them."""

    def ranks(self, replicas: int) -> range:
        """The ranks of the replicas that the executor starts."""
        return range(self.first_rank, self.first_rank + replicas)

    def environment(self, world_size: int) -> dict[str, str]:
        """The variables that every replica gets. `world_size` is the number of replicas that this executor starts; the
        replicas of a part get the number of the whole run."""
        replicas, world_size = world_size, world_size if self.world_size is None else self.world_size
        return {
            RUN_ID: self.run_id,
            STORE: self.store_uri,
            RENDEZVOUS: self.store_uri,
            WORLD_SIZE: str(world_size),
            **({LAUNCH: str(self.launch)} if self.launch > 1 else {}),
            **({PART: f"{self.first_rank}:{replicas}"} if replicas != world_size else {}),
        }

    def native_name(self, *, limit: int = 63, reserve: int = 0) -> str:
        """The name of this launch at a backend; see `names.native_name`. The name of launch 2 ends with `-launch2`,
        and the name of a part whose first rank is 3 with `-from3`."""
        suffix = f"-launch{self.launch}" if self.launch > 1 else ""
        suffix += f"-from{self.first_rank}" if self.first_rank else ""
        return native_name(self.run_id, self.store_uri, limit=limit, reserve=reserve + len(suffix)) + suffix

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> tuple[RunContext, int] | None:
        """The context of a replica with these variables, and the number of replicas that its executor started; None if
        they are not those of a replica."""
        if not {RUN_ID, STORE, WORLD_SIZE} <= variables.keys():
            return None
        world_size = int(variables[WORLD_SIZE])
        first, _, count = variables.get(PART, "").partition(":")
        launch = int(variables.get(LAUNCH, 1))
        if not count:
            return cls(variables[RUN_ID], variables[STORE], launch), world_size
        return cls(variables[RUN_ID], variables[STORE], launch, int(first), world_size), int(count)


def ending_signal(exit_code: int | None) -> int | None:
    """The signal that ended a container with this exit code; None if its program chose the code, such as 255."""
    number = 0 if exit_code is None else exit_code - 128
    return number if 0 < number <= _MOST_SIGNAL else None


def signal_name(number: int) -> str:
    """Such as `SIGKILL`; most real-time signals have no name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def rank_environment(rank: int, rank_env: str = RANK) -> dict[str, str]:
    """The variables that only this rank gets."""
    return {RANK: str(rank), rank_env: str(rank)}


def index_environment(context: RunContext, rank_env: str) -> dict[str, str]:
    """Variables for a part whose service numbers the containers from 0: with them `global_rank` finds the rank."""
    if not context.first_rank:
        return {}
    return {FIRST_RANK: str(context.first_rank), **({RANK_ENV: rank_env} if rank_env != RANK else {})}


def global_rank(environ: MutableMapping[str, str]) -> None:
    """Turn the number of this container in its part, if the service gave it as the rank, into the rank of the run."""
    first, named = environ.pop(FIRST_RANK, None), environ.pop(RANK_ENV, RANK)
    if first is None:
        return
    given = environ.get(RANK, "")
    if not (first.isdecimal() and given.isdecimal()):
        raise ConfigError(f"{FIRST_RANK}={first!r} and {RANK}={given!r} are not two whole numbers")
    environ.update(rank_environment(int(first) + int(given), named))


_KINDS = {
    "run_id": Kind(ID_RULE, lambda value: run_id_problem(value) is None),
    "rank": INDEX,
    "world_size": COUNT,
    "store_uri": Kind(
        "an address or a path of a store", lambda value: isinstance(value, str | os.PathLike) and value != ""
    ),
    "attempt": INDEX,
    "launch": COUNT,
    "rounds_of": Kind("the number of a launch, or None", COUNT.fits, may_be_none=True),
    "from_run": Kind("the id of a run, or None", a(str), may_be_none=True),
    "args": Kind("a mapping of names to values", a(Mapping)),
    "spool": Kind("a folder, or None", lambda value: isinstance(value, str | os.PathLike), may_be_none=True),
}


@dataclass(frozen=True)
class ReplicaContext:
    """What a replica knows about itself. Your function gets it as its first argument, `ctx`."""

    run_id: str
    rank: int
    world_size: int
    store_uri: str
    attempt: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)
    spool: str | None = None
    launch: int = 1
    rounds_of: int | None = None
    """The launch whose rounds this one continues; None if this launch has rounds of its own."""
    from_run: str | None = None
    """The run whose agreed weights this run starts from; None if it starts from the weights of the code."""

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)
        if self.rank >= self.world_size:
            rule = f"below world_size={self.world_size}, for ranks count from 0"
            raise InvalidSpec("ReplicaContext", [f"rank={self.rank}: {rule}"])
        if isinstance(self.store_uri, os.PathLike):
            from atoll.registry import store_uri

            object.__setattr__(self, "store_uri", store_uri(self.store_uri))
        if isinstance(self.spool, os.PathLike):
            object.__setattr__(self, "spool", os.fspath(self.spool))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], args: Mapping[str, Any] | None = None) -> ReplicaContext:
        """Read the context from `environ`; `ConfigError` names every missing or bad variable."""
        store = environ.get(STORE) or environ.get(RENDEZVOUS, "")
        numbers = {
            name: environ.get(name, default)
            for name, default in ((RANK, ""), (WORLD_SIZE, ""), (ATTEMPT, "0"), (LAUNCH, "1"))
        }
        problems = [
            f"{name}={value!r} is not a whole number" for name, value in numbers.items() if not value.isdecimal()
        ]
        if not environ.get(RUN_ID):
            problems.append(f"{RUN_ID} is not set")
        if not store:
            problems.append(f"{STORE} is not set")
        if not problems and int(numbers[RANK]) >= int(numbers[WORLD_SIZE]):
            problems.append(f"{RANK}={numbers[RANK]} is not below {WORLD_SIZE}={numbers[WORLD_SIZE]}")
        if problems:
            raise ConfigError("this process is not a replica: " + "; ".join(problems), hint=_HINT)
        return cls(
            run_id=environ[RUN_ID],
            rank=int(numbers[RANK]),
            world_size=int(numbers[WORLD_SIZE]),
            store_uri=store,
            attempt=int(numbers[ATTEMPT]),
            args=dict(args or {}),
            spool=environ.get(SPOOL),
            launch=int(numbers[LAUNCH]),
        )

    @cached_property
    def store(self) -> Store:
        """The store that the replicas of this run share."""
        from atoll.registry import open_store

        return open_store(self.store_uri)

    def log(self, *, round_no: int | None = None, rounds_total: int | None = None, **metrics: float) -> None:
        """Report progress: `atoll status`, `top` and the live table show it. Cheap; call it at every step.

        `round_no` is the number of finished rounds. With `rounds_total`, the views also show how long the remaining
        rounds will take.
        """
        done, total = _count("round_no", round_no, INDEX), number_of_rounds(rounds_total)
        record: dict[str, Any] = {"round_no": done, "metrics": numbers(metrics)}
        if done is not None and total is not None:
            record |= {"rounds_total": total, **self._pace.note(done)}
        if self.spool is None:
            return
        path = os.path.join(self.spool, "progress.json")
        fresh = f"{path}.{os.getpid()}.{get_ident()}"  # threads and forked workers may call this at the same time
        try:
            with open(fresh, "w") as file:
                json.dump(record, file)
            os.replace(fresh, path)
        except OSError as exc:
            if not is_full(exc):
                raise
            with suppress(OSError):  # training must not end because a report does not fit on the disk
                os.unlink(fresh)

    @cached_property
    def _pace(self) -> Pace:
        return Pace()


class Pace:
    """Measures how long a round takes: the median of the last rounds that this process reported."""

    def __init__(self) -> None:
        self._round_no: int | None = None
        self._began = self._at = 0.0
        self._recent: tuple[float, ...] = ()

    def note(self, round_no: int) -> dict[str, float]:
        """`round_s`, and `round_at`, when `round_no` rounds were finished; empty before a round was measured."""
        now = time.monotonic()
        if round_no != self._round_no:
            before, self._round_no = self._round_no, round_no
            if before is not None and round_no > before:
                self._recent = (*self._recent[1 - _RECENT_ROUNDS :], (now - self._began) / (round_no - before))
            self._began, self._at = now, time.time()
        recent = sorted(self._recent)
        return {"round_s": recent[len(recent) // 2], "round_at": self._at} if recent else {}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as floats; `InvalidSpec` names each metric that is not a number."""
    found, problems = {}, []
    for name, value in metrics.items():
        try:
            found[name] = float(plain(value))
        except (TypeError, ValueError, RuntimeError, OverflowError):  # the third is torch's
            problems.append(f"{name}={shown(value)}: a metric is one number")
    if problems:
        raise InvalidSpec("log", problems)
    return found


def number_of_rounds(given: Any) -> int | None:
    """The argument `rounds_total` of `log`; `InvalidSpec` if it is not a whole number from 1."""
    return _count("rounds_total", given, COUNT)


def _count(name: str, given: Any, kind: Kind) -> int | None:
    count = plain(given)
    if count is not None and not kind.fits(count):
        raise InvalidSpec("log", [f"{name}={shown(given)}: {kind.words}, or None"])
    return count  # type: ignore[no-any-return]


_current: ReplicaContext | None = None


def current() -> ReplicaContext:
    """Return the context of this replica, for scripts, which get no `ctx` argument.

    Raises `ConfigError` in a process that is not a replica.
    """
    return _current or ReplicaContext.from_environment(os.environ)


def make_current(context: ReplicaContext) -> None:
    """Set the context that `current()` returns. The replica calls this before user code runs."""
    global _current
    _current = context


def home() -> Path:
    """`ATOLL_HOME`, else `atoll` in the XDG state folder."""
    if given := os.environ.get("ATOLL_HOME"):
        return Path(given).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "atoll"


def default_store() -> str:
    """The store of runs that name none: `ATOLL_STORE`, else a folder in `home()`."""
    return os.environ.get("ATOLL_STORE") or str(home() / "store")
