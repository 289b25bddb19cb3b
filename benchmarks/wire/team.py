"""N replica processes that do one round after another, each in the way they are told, and say what it took.

A round is timed from a barrier to the end of the last replica. Every result is compared with the true mean.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from wire.arms import Arm, Ours, Seat
from wire.memory import peak_bytes, start_watching
from wire.peers import Gloo, Naive

_TIMEOUT_S = 600.0
_SLICE = 1 << 20
_CHECK_EVERY = 7
"""After the warm-up, which is checked in full, every so many slices of a result are looked at."""


@dataclass(frozen=True)
class RoundState:
    """One replica's part in one round."""

    began: float
    ended: float
    cpu_s: float
    resident_before: int
    resident_peak: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class Round:
    """What one round took, over all replicas."""

    turns: tuple[RoundState, ...] = field(repr=False)

    @property
    def wall_s(self) -> float:
        return max(turn.ended for turn in self.turns) - min(turn.began for turn in self.turns)

    @property
    def cpu_s(self) -> float:
        return sum(turn.cpu_s for turn in self.turns)


@dataclass(frozen=True)
class Plan:
    """What a team is told once."""

    replicas: int
    elements: int
    arms: tuple[str, ...]
    scratch: Path
    endpoints: dict[str, str] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Tuning` for our arms."""
    chunk: int | None = None
    plain: Path | None = None


class Team:
    """`with Team(plan) as team: team.round("gloo")`. Call `warm_up` first: two rounds of every arm."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        context = multiprocessing.get_context("spawn")
        self._barrier = barrier = context.Barrier(plan.replicas)  # dropped here, it would be gone for the replicas too
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(plan.replicas):
            ours, theirs = context.Pipe()
            process = context.Process(target=_replica, args=(rank, plan, barrier, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()

    def warm_up(self) -> dict[str, Team]:
        """Two rounds of every arm: joining, first connections, first pages; then files that are written again for the
        first time. Results are checked in full."""
        for arm in (*self.plan.arms, *self.plan.arms):
            self.round(arm, is_checked_in_full=True)
        return dict.fromkeys(self.plan.arms, self)

    def round(self, arm: str, *, is_checked_in_full: bool = False) -> Round:
        for end in self._ends:
            end.send((arm, is_checked_in_full))
        return Round(tuple(_received(end) for end in self._ends))


def _received(end: Connection) -> RoundState:
    if not end.poll(_TIMEOUT_S):
        raise TimeoutError(f"a replica said nothing for {_TIMEOUT_S:g} s")
    said = end.recv()
    if isinstance(said, str):
        raise RuntimeError(f"a replica failed:\n{said}")
    assert isinstance(said, RoundState)
    return said


def _replica(rank: int, plan: Plan, barrier: Any, end: Connection) -> None:
    try:
        _serve(rank, plan, barrier, end)
    except BaseException:  # noqa: BLE001 - the parent shows it
        barrier.abort()
        with suppress(OSError):
            end.send(traceback.format_exc())


def _serve(rank: int, plan: Plan, barrier: Any, end: Connection) -> None:
    update, out = whole_numbers(plan.elements, rank), np.zeros(plan.elements, dtype=np.float32)
    out.fill(0.0)
    seat = Seat(rank, plan.replicas, update, out, plan.scratch, plan.endpoints, plan.tuning, plan.chunk, plan.plain)
    arms: dict[str, Arm] = {}
    rounds: dict[str, int] = {}
    try:
        while (asked := end.recv()) is not None:
            name, is_checked_in_full = asked
            if name not in arms:
                arms[name] = _made(name)
                arms[name].open(seat)
            round_no = rounds.get(name, 0)
            end.send(_turn(arms[name], seat, round_no, barrier, 1 if is_checked_in_full else _CHECK_EVERY))
            rounds[name] = round_no + 1
    finally:
        for arm in arms.values():
            arm.close()


def _turn(arm: Arm, seat: Seat, round_no: int, barrier: Any, check_every: int) -> RoundState:
    if round_no:  # not earlier: a virtual machine gives memory that stays free for two seconds back to its host
        arm.tidy(round_no - 1)
    arm.prepare(round_no)
    before = start_watching()
    barrier.wait(_TIMEOUT_S)
    cpu, began = _cpu_s(), time.monotonic()
    arm.run(round_no)
    ended, cpu = time.monotonic(), _cpu_s() - cpu
    peak = peak_bytes()
    barrier.wait(_TIMEOUT_S)
    check(seat, check_every, is_sum=arm.is_sum)
    return RoundState(began, ended, cpu, before, peak, arm.facts())


def _made(name: str) -> Arm:
    match name:
        case "gloo":
            return Gloo()
        case "naive":
            return Naive()
        case _:
            return Ours(name)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def whole_numbers(elements: int, rank: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Small whole numbers times rank + 1: sums are exact, so every right result is right in every bit."""
    block = np.random.default_rng(0).integers(-1000, 1000, _SLICE).astype(np.float32) * np.float32(rank + 1)
    return np.resize(block, elements)


def check(seat: Seat, every: int, *, is_sum: bool) -> None:
    own = np.float32(seat.rank + 1)
    share = np.float32(sum(range(1, seat.replicas + 1))) / (np.float32(1) if is_sum else np.float32(seat.replicas))
    for start in range(0, seat.update.size, _SLICE * every):
        wanted = seat.update[start : start + _SLICE] / own * share
        found = seat.out[start : start + _SLICE]
        if not np.allclose(found, wanted, rtol=1e-6, atol=0):
            raise AssertionError(f"rank {seat.rank}: wrong result near element {start}")


def alternate(teams: Mapping[str, Team], repeat: int) -> dict[str, list[Round]]:
    """`repeat` rounds of every arm, each by its team, in turn, so that a busy moment hits everybody."""
    arms = list(teams)
    seen: dict[str, list[Round]] = {arm: [] for arm in arms}
    for turn in range(repeat):
        first = turn % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            seen[arm].append(teams[arm].round(arm))
    return seen
