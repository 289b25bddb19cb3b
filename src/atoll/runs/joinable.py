"""Which ranks of a run this machine may join as, or why it may not. Reads only, so a refusal has changed nothing."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from atoll import journal
from atoll._time import SYSTEM_CLOCK, Clock
from atoll.entry import Entry
from atoll.errors import ConfigError, Conflict, InvalidSpec, StoreError
from atoll.handle import RunHandle
from atoll.keys import RunKeys, bundle
from atoll.replica.joined import Condition, JoinedRanks, JoinPart, RankRow, read_parts
from atoll.result import ranks_text
from atoll.runs.start import check_not_deleted
from atoll.spec import Code
from atoll.stores.base import Store
from atoll.validation import INDEX, shown

if TYPE_CHECKING:
    from atoll.runs.run import Run

_MAY_WAIT = ("join", "several")
"""Executors whose runs may wait for machines."""


@dataclass(frozen=True)
class Target:
    """The launch that a machine joins, and the ranks that it may take."""

    run_id: str
    launch: int
    handle: RunHandle | None
    parts: tuple[JoinedRanks, ...]
    rank: int | None

    @property
    def secrets(self) -> dict[str, str]:
        return {name: reference for ranks in self.parts for name, reference in ranks.part.secrets.items()}

    def rows(self) -> list[tuple[JoinedRanks, RankRow]]:
        """The ranks that this machine may take, with their parts."""
        found = [(ranks, row) for ranks in self.parts for row in ranks.read()]
        return [each for each in found if self.rank is None or each[1].rank == self.rank]


def waiting_line(run: Run) -> str:
    """What a run that was just started waits for, with the command for each machine; empty if it waits for none."""
    placement = run.spec.placement
    parts = [(part.on, part.replicas) for part in placement.parts] or [(run.executor.name, placement.replicas)]
    count = sum(replicas for on, replicas in parts if on == _MAY_WAIT[0])
    if not count:
        return ""
    line = f"atoll join {shlex.quote(run.id)} --store {shlex.quote(run.store.uri)}"
    return f"waits for {count} machine{'' if count == 1 else 's'} to join; on each: {line}"


def find_target(store: Store, run_id: str, rank: int | None, clock: Clock = SYSTEM_CLOCK) -> Target:
    """Check that this machine can join the run. Raises an error with the reason if not."""
    record = journal.read_run(store, run_id)
    check_not_deleted(store, run_id)
    launch = journal.newest_launch(store, run_id)
    _check_version(store, run_id, launch.number, record)
    quoted = shlex.quote(run_id)
    if cancel := journal.read_cancel(store, run_id, launch=launch.number):
        hint = f"`atoll resume {quoted} --on join` continues it, and machines can join then"
        raise Conflict(run_id, what=f"run `{run_id}` was cancelled: {cancel.why}", reason="cancelled", hint=hint)
    keys = RunKeys(run_id, launch.number)
    parts = read_parts(store, keys)
    found = journal.read_launch(store, run_id, launch.number)
    if not parts and launch.undone is None and (launch.handle is not None or found.executor not in _MAY_WAIT):
        what = f"run `{run_id}` is not for machines that join: it runs on `{found.executor}`"
        hint = "`atoll run … --on join:N` starts a run that waits for machines"
        raise ConfigError(what, reason="not_for_machines", hint=hint)
    if not parts or launch.undone is not None:
        why = f" ({launch.undone})" if launch.undone is not None else ""
        what = f"run `{run_id}` was not started{why}"
        hint = "join again when its launcher has started it, or launch it again with the same run id"
        raise Conflict(run_id, what=what, reason="not_started", hint=hint)
    _check_rank(run_id, rank, parts)
    _check_code(store, run_id, found.spec)
    joined = tuple(JoinedRanks(store, keys, part, clock) for part in parts)
    target = Target(run_id, launch.number, launch.handle, joined, rank)
    if not any(row.condition(ranks.part.max_restarts).is_free for ranks, row in target.rows()):
        raise no_rank(target)
    return target


def _check_version(store: Store, run_id: str, launch: int, record: Mapping[str, Any]) -> None:
    resume = journal.read_resume(store, run_id, launch)
    if problem := journal.version_problem(record if resume is None else resume):
        hint = "install the launcher's version of Atoll on this machine"
        raise ConfigError(problem.replace("this replica", "this machine"), reason="too_old", hint=hint)


def _check_rank(run_id: str, rank: int | None, parts: list[JoinPart]) -> None:
    if rank is None:
        return
    ranks = [each for part in parts for each in part.ranks]
    if not INDEX.fits(rank) or rank not in ranks:
        rule = f"machines join as {ranks_text(ranks)} of run `{run_id}`"
        raise InvalidSpec("the rank of this machine", [f"rank={shown(rank)}: {rule}; without it, the next free one"])


def _check_code(store: Store, run_id: str, spec: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if this machine cannot get the code of the run."""
    try:
        code, entry = Code(**spec["task"]["code"]), Entry.of_record(spec["task"]["entry"])
    except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as exc:
        what = f"the record of run `{run_id}` is damaged, or of another version of Atoll: {exc}"
        raise StoreError(what, uri=store.uri, reason="damaged") from exc
    why = ""
    if code.kind == "bundle" and code.digest is not None:
        if not next(iter(store.list(bundle(code.digest))), None):
            why = f"the bundle {code.digest[:12]} is not in {store.uri}"
    elif entry.script is not None:
        if not os.path.exists(os.path.join(code.root or os.getcwd(), entry.script)):
            why = f"there is no `{entry.script}` in {code.root or os.getcwd()}"
    else:
        name = (entry.module or entry.dotted or "").partition(".")[0]
        path = [folder for folder in (code.root or os.getcwd(), code.path, *sys.path) if folder]
        if name not in sys.builtin_module_names and PathFinder.find_spec(name, path) is None:
            why = f"Python finds no module `{name}`, in {code.root or os.getcwd()} or among the installed packages"
    if why:
        what = f"the code of run `{run_id}` is not on this machine: {why}"
        hint = "install it, or go to its folder; `atoll run --workspace .` sends the code through the store"
        raise ConfigError(what, reason="code", hint=hint)


def no_rank(target: Target) -> Conflict:
    """Why there is no rank for this machine."""
    run_id, rows = target.run_id, target.rows()
    quoted = shlex.quote(run_id)
    taken = [row for ranks, row in rows if row.condition(ranks.part.max_restarts) is not Condition.OVER]
    if not taken:
        what = f"run `{run_id}` is over" if target.rank is None else f"rank {target.rank} of run `{run_id}` is over"
        hint = f"`atoll result {quoted}` shows how it ended; `atoll resume {quoted}` continues a run that is over"
        return Conflict(run_id, what=what, reason="over", hint=hint)
    hosts = ", ".join(f"rank {row.rank} by {row.host}" for row in taken[:4]) + (", …" if taken[4:] else "")
    wait = "a rank is free when its machine leaves, or sends no heartbeat for a while"
    hint = f"`atoll status {quoted}` shows the machines; {wait}"
    if target.rank is not None:
        what = f"rank {target.rank} of run `{run_id}` is taken: {hosts}"
        return Conflict(run_id, what=what, reason="taken", hint=f"{hint}; without `--rank`, the next free one is used")
    return Conflict(run_id, what=f"run `{run_id}` is full: {hosts}", reason="full", hint=hint)
