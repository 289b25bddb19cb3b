"""`join` runs one replica of a run on this machine, for runs that wait for machines (executor `join`).

The checks come first and change nothing. Then the machine claims an attempt of a free rank in the store, starts a
supervisor for it (`python -m atoll.replica --joined`), and waits for its end. Every attempt is claimed before it
starts, so a failed entry point is restarted here, and not by the supervisor.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from atoll import registry
from atoll.context import LABEL, RESERVED, RunContext, default_store, rank_environment
from atoll.errors import ConfigError, KeyExists, StoreError
from atoll.executors.base import HandleResolver
from atoll.executors.secrets import secret_values
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.replica import processes
from atoll.replica.container import ran_s
from atoll.replica.joined import Condition, JoinedRanks, JoinPart
from atoll.replica.spool import Spool, read_json, read_record, write_json
from atoll.result import ReplicaOutcome
from atoll.runs import index
from atoll.runs.joinable import Target, find_target, no_rank
from atoll.status import Reason, ReplicaState
from atoll.stores.base import Store

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0

log = logging.getLogger("atoll.runs")


@dataclass(frozen=True)
class Claimed:
    """What this machine has claimed."""

    run_id: str
    rank: int
    attempt: int
    world_size: int
    store: str


def join(
    run: str,
    *,
    rank: int | None = None,
    store: str | os.PathLike[str] | None = None,
    echo: bool = True,
) -> ReplicaOutcome:
    """Run one replica of a run that waits for machines on this machine, and return how it ended.

    `run` is an id, which is looked up in `store` or in the local index, or a handle. The replica takes the next free
    rank, or `rank`. With `echo`, its output is printed here. An interrupt, SIGTERM or a closed terminal ends it within
    its grace and frees the rank for another machine.

    Raises `Conflict` (reason `over`, `cancelled`, `full`, `taken`, `not_started` or `deleted`), `ConfigError` (reason
    `not_for_machines`, `too_old` or `code`) or `RunNotFound`; then nothing has changed.
    """
    run_id, opened = _place(run, store)
    return run_here(opened, run_id, rank=rank, echo=echo)


def run_here(
    store: Store,
    run_id: str,
    *,
    rank: int | None = None,
    echo: bool = True,
    on_claim: Callable[[Claimed], None] | None = None,
) -> ReplicaOutcome:
    """`join` for a run in an open store. `on_claim` is called before each start."""
    target = find_target(store, run_id, rank)
    machine = _Machine(store, target, secret_values(target.secrets), echo, on_claim)
    with _signals(machine):
        return machine.run()


def _place(run: str, store: str | os.PathLike[str] | None) -> tuple[str, Store]:
    """The run id and the store of a run."""
    if "://" in run:
        handle = RunHandle.parse(run)
        executor = registry.executor(handle.executor)
        context = executor.origin(handle) if isinstance(executor, HandleResolver) else None
        if context is None:
            raise ConfigError(f"`{run}` does not say which run it is", hint="give the id of the run, and its store")
        return context.run_id, registry.open_store(store or context.store_uri)
    known = index.find(run) if store is None else None
    return run, registry.open_store(store or (known.store if known else default_store()))


class _Machine:
    """This machine while it runs a rank."""

    def __init__(
        self,
        store: Store,
        target: Target,
        secrets: Mapping[str, str],
        echo: bool,
        on_claim: Callable[[Claimed], None] | None,
    ) -> None:
        self._store, self._target, self._secrets, self._echo = store, target, secrets, echo
        self._on_claim = on_claim
        self._keys = RunKeys(target.run_id, target.launch)
        self._child: subprocess.Popen[bytes] | None = None
        self._must_leave = threading.Event()

    def leave(self) -> None:
        """End the replica within its grace, and do not restart it. May be called by a signal handler."""
        self._must_leave.set()
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGTERM)

    def run(self) -> ReplicaOutcome:
        ranks, rank, attempt = self._claim_any()
        while True:
            outcome = self._run_attempt(ranks, rank, attempt)
            row = ranks.read([rank])[0]
            is_ours = row.attempt == attempt and row.outcome is not None
            if not is_ours or row.condition(ranks.part.max_restarts) is not Condition.RESTARTING:
                return outcome
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (row.failures - 1))
            if self._must_leave.wait(pause_s) or not self._claim(ranks, rank, attempt + 1):
                return outcome
            attempt += 1

    def _claim_any(self) -> tuple[JoinedRanks, int, int]:
        """Claim the next attempt of a free rank: one that no machine had, else one whose machine left or is silent."""
        order = [Condition.WAITING, Condition.LEFT, Condition.SILENT]
        while True:
            rows = [(row.condition(ranks.part.max_restarts), ranks, row) for ranks, row in self._target.rows()]
            free = sorted((each for each in rows if each[0].is_free), key=lambda each: order.index(each[0]))
            for condition, ranks, row in free:
                if condition is Condition.SILENT and not ranks.is_confirmed_silent(row.rank):
                    continue  # its clock differs from ours: it does send heartbeats
                if self._claim(ranks, row.rank, row.next_attempt):
                    return ranks, row.rank, row.next_attempt
            if not any(row.condition(ranks.part.max_restarts).is_free for ranks, row in self._target.rows()):
                raise no_rank(self._target)

    def _claim(self, ranks: JoinedRanks, rank: int, attempt: int) -> bool:
        record = {"host": os.uname().nodename, "pid": os.getpid(), "at": time.time(), "joined": True}
        if not ranks.claim(rank, attempt, record):
            return False
        if self._target.handle is not None:
            index.remember(self._target.run_id, self._store.uri, str(self._target.handle))
        log.info("run %s: claimed attempt %d of rank %d", self._target.run_id, attempt, rank)
        return True

    def _run_attempt(self, ranks: JoinedRanks, rank: int, attempt: int) -> ReplicaOutcome:
        """Run an attempt that this machine has claimed. Whatever happens, the attempt has an outcome afterwards."""
        self._child, spool = None, Spool(tempfile.mkdtemp(prefix="atoll-"))
        try:
            if self._on_claim is not None:
                world_size = ranks.part.world_size
                self._on_claim(Claimed(self._target.run_id, rank, attempt, world_size, self._store.uri))
            write_json(spool.plan, self._plan(spool, ranks.part, rank, attempt))
            if not self._must_leave.is_set():
                self._supervise(spool, ranks.part, rank)
            return self._outcome(spool, rank, attempt)
        except BaseException:
            self._end_leftovers(spool)
            self._outcome(spool, rank, attempt)
            raise
        finally:
            self._end_leftovers(spool)
            shutil.rmtree(spool.root, ignore_errors=True)

    def _supervise(self, spool: Spool, part: JoinPart, rank: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "atoll.replica", "--joined", str(spool.root), str(os.getpid())],
            env=self._environment(spool, part, rank),
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C reaches this process alone, which passes it on
        )
        if self._must_leave.is_set():
            self.leave()
        self._wait(self._child)

    def _wait(self, child: subprocess.Popen[bytes]) -> None:
        """Wait for the supervisor; an interrupt makes it leave, and is raised when it has."""
        interrupt: KeyboardInterrupt | None = None
        while child.returncode is None:
            try:
                child.wait()
            except KeyboardInterrupt as exc:
                interrupt = interrupt or exc
                self.leave()
        if interrupt is not None:
            raise interrupt

    def _end_leftovers(self, spool: Spool) -> None:
        """Nothing of this attempt runs when `join` returns, also if the supervisor was killed."""
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
            self._child.wait()
        processes.kill_all(str(spool.root))

    def _outcome(self, spool: Spool, rank: int, attempt: int) -> ReplicaOutcome:
        """How the attempt ended; if the supervisor has not recorded that, this frees the rank in its place."""
        record = read_record(spool.attempt(rank, attempt).outcome)
        if "state" not in record or "rank" not in record:
            self._end_leftovers(spool)
            code = None if self._child is None else self._child.returncode
            why = (
                "this machine left before it started the replica" if code is None else f"its supervisor ended ({code})"
            )
            record = {
                "state": ReplicaState.FAILED,
                "reason": Reason.PREEMPTED,
                "message": why,
                "exit_code": None,
                "error": None,
                "host": os.uname().nodename,
                "ended_at": time.time(),
                "rank": rank,
                "attempt": attempt,
            }
            with suppress(KeyExists, StoreError):
                self._store.create(self._keys.outcome(rank, attempt), json.dumps(record).encode())
        files = spool.attempt(rank, attempt)
        result, progress = read_json(files.result), read_record(files.progress)
        record |= {"round_no": progress.get("round_no"), "metrics": progress.get("metrics", {})}
        return ReplicaOutcome.from_json({**record, "rank": rank, "attempt": attempt, "result": result})

    def _plan(self, spool: Spool, part: JoinPart, rank: int, attempt: int) -> dict[str, Any]:
        used_s = sum(ran_s(self._store, self._keys, rank, each) for each in range(attempt))
        return {
            "label": str(spool.root),
            "run_id": self._target.run_id,
            "launch": self._target.launch,
            "store": self._store.uri,
            "ranks": [rank],
            "rank_environment": {str(rank): rank_environment(rank, part.rank_env)},
            "timeout_s": part.timeout_s,
            "grace_s": part.grace_s,
            "max_restarts": 0,
            "first_attempt": attempt,
            "used_s": used_s,
            "echo": self._echo,
            "store_stops": True,
            "is_claimed": True,
            "beat_s": part.beat_s,
        }

    def _environment(self, spool: Spool, part: JoinPart, rank: int) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in RESERVED}
        own = RunContext(self._target.run_id, self._store.uri, self._target.launch).environment(part.world_size)
        given = {**part.environment, **own, **self._secrets, **rank_environment(rank, part.rank_env)}
        return {**inherited, **given, LABEL: str(spool.root)}


@contextmanager
def _signals(machine: _Machine) -> Iterator[None]:
    """While this is open, SIGTERM and a closed terminal end the replica. Only the main thread can receive signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda *_: machine.leave())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
