"""Entry points that the executor contract launches, and the objects in the store by which the suite counts them.

Each process that enters user code creates its own object, so the suite sees a rank that was started twice.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll._time import SYSTEM_CLOCK, Deadline
from atoll.context import ReplicaContext
from atoll.errors import KeyExists, KeyNotFound
from atoll.names import key_name
from atoll.stores.base import Store

HOLD_S = 120.0
"""A replica in `hold` ends by itself after this time, so that a broken adapter leaves no process behind."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Start:
    """One process that entered user code."""

    rank: int
    attempt: int
    pid: int
    host: str


def starts(store: Store, run_id: str) -> list[Start]:
    """Every process of the run that entered user code, by rank."""
    found = [json.loads(bytes(store.get(key))) for key in store.list(f"{_prefix(run_id)}start/")]
    return sorted((Start(**each) for each in found), key=lambda start: (start.rank, start.attempt, start.pid))


def let_go(store: Store, run_id: str) -> None:
    """Allow replicas in `hold` to return."""
    store.put(f"{_prefix(run_id)}go", b"")


def farewells(store: Store, run_id: str) -> list[int]:
    """Ranks in `hold` that received SIGTERM and had time to record it."""
    prefix = f"{_prefix(run_id)}farewell/"
    return [int(key.removeprefix(prefix)) for key in store.list(prefix)]


def echo(ctx: ReplicaContext, **args: Any) -> dict[str, Any]:
    """Return what arrived."""
    _mark(ctx)
    return {"rank": ctx.rank, "world_size": ctx.world_size, "args": args}


def variables(ctx: ReplicaContext, *, names: Sequence[str]) -> dict[str, str | None]:
    """Return the values of environment variables."""
    _mark(ctx)
    return {name: os.environ.get(name) for name in names}


def hold(ctx: ReplicaContext, *, stubborn: bool = False) -> int:
    """Run until `let_go`. On SIGTERM record a farewell and exit; with `stubborn` ignore SIGTERM."""
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _mark(ctx)  # inside `try`: the suite may stop this replica as soon as it sees the mark
        _until_let_go(ctx)
    except SystemExit:
        ctx.store.create(f"{_prefix(ctx.run_id)}farewell/{ctx.rank:05d}", b"")
        raise
    return ctx.rank


def one_round(ctx: ReplicaContext, *, absent: int) -> int:
    """Average in a round that needs every rank. The rank `absent` runs until `let_go` and takes no part."""
    import numpy as np

    from atoll.rounds.client import RoundClient
    from atoll.rounds.layout import Layout
    from atoll.rounds.quorum import Quorum

    _mark(ctx)
    if ctx.rank == absent:
        _until_let_go(ctx)
        return ctx.rank
    values = np.zeros(4, np.float32)
    client = RoundClient(
        ctx.store,
        ctx.run_id,
        ctx.rank,
        ctx.world_size,
        layouts=[Layout.of([("weights", [4], "float32")])],
        attempt=ctx.attempt,
        launch=ctx.launch,
        quorum=Quorum(on_dead_after_s=20.0),
    )
    client.join([values.tobytes()])
    client.exchange(0, values, weight=1.0)
    return ctx.rank


def act(ctx: ReplicaContext, *, parts: Sequence[str]) -> str:
    """Each rank ends as its part says: `return`, `raise`, `sys_exit`, `os_exit`, `sigkill`, or `hold` until let go."""
    _mark(ctx)
    part = parts[ctx.rank]
    if part == "raise":
        raise ValueError(f"rank {ctx.rank} raises, as it was told to")
    if part == "sys_exit":
        sys.exit(3)
    if part == "os_exit":
        os._exit(3)
    if part == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "hold":
        _until_let_go(ctx)
    return part


def fail_once(ctx: ReplicaContext) -> str:
    """Fail in the first process of each rank, and succeed in the next."""
    _mark(ctx)
    try:
        ctx.store.create(f"{_prefix(ctx.run_id)}failed/{ctx.rank:05d}", b"")
    except KeyExists:
        return "second try"
    raise ValueError("the first try fails")


def say(ctx: ReplicaContext, *, lines: Sequence[str], unfinished: str = "", then_hold: bool = False) -> None:
    """Print the lines of this rank, then an unfinished one; on request, hold in between."""
    _mark(ctx)
    for line in lines:
        print(line.replace("{rank}", str(ctx.rank)), flush=True)
    if then_hold:
        _until_let_go(ctx)
    sys.stdout.write(unfinished)
    sys.stdout.flush()


def show(ctx: ReplicaContext, *, names: Sequence[str]) -> None:
    """Print the values of environment variables, then run until `let_go`."""
    for name in names:
        print(f"{name}={os.environ.get(name)}", flush=True)
    _mark(ctx)
    _until_let_go(ctx)


def _until_let_go(ctx: ReplicaContext) -> None:
    deadline = Deadline(HOLD_S, SYSTEM_CLOCK)
    while not _is_there(ctx.store, f"{_prefix(ctx.run_id)}go"):
        if deadline.is_past:
            raise TimeoutError(f"`let_go` was not called within {HOLD_S:g} s")
        deadline.sleep(_POLL_S)


def _mark(ctx: ReplicaContext) -> None:
    start = {"rank": ctx.rank, "attempt": ctx.attempt, "pid": os.getpid(), "host": os.uname().nodename}
    ctx.store.create(f"{_prefix(ctx.run_id)}start/{ctx.rank:05d}-{uuid.uuid4().hex}", json.dumps(start).encode())


def _is_there(store: Store, key: str) -> bool:
    try:
        store.get(key)
    except KeyNotFound:
        return False
    return True


def _prefix(run_id: str) -> str:
    return f"contract/{key_name(run_id)}/"
