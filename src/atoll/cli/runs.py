"""Finds the run that a command names, by run id or handle, with the settings of this folder."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

from atoll import journal, registry
from atoll.disk import folder_of
from atoll.errors import AtollError, RunNotFound, closest
from atoll.executors.base import Linker
from atoll.handle import RunHandle
from atoll.runs import config, index
from atoll.runs.attach import attach
from atoll.runs.config import Config
from atoll.runs.run import Run
from atoll.runs.stored import StoredRun
from atoll.stores.base import Store

log = logging.getLogger("atoll.cli")
_MOST_SUGGESTED = 1000


def find_run(name: str, store: str | None, launch: int | None = None) -> Run:
    """The run with this id or handle: in `store`, otherwise in the store of the local index or the configured one.

    Its newest launch, or the one with this number.
    """
    settings, where = config.load(), store
    if store is None and "://" not in name and index.find(name) is None:
        where = settings.get("store")
    # The address may contain a password, so it is not logged.
    log.debug("run %s: reading it from %s", name, "the given store" if where else "the store of the local index")
    with suggesting(name, store):
        if launch is not None:
            return _find_launch(name, where, launch, settings)
        return attach(name, store=where, settings=_executor_settings(settings, name, where))


def _find_launch(name: str, store: str | None, launch: int, settings: Config) -> Run:
    """One launch of a run, with the settings of its own backend."""
    run_id, opened = find_place(name, store)
    journal.launch_at(opened, run_id, launch)  # raises if there is none
    backend = journal.read_launch(opened, run_id, launch).executor
    return attach(run_id, store=opened.uri, settings=settings.executor_settings(backend), launch=launch)


def replica_links(run: Run, ranks: Iterable[int]) -> dict[int, dict[str, str]]:
    """Web pages about these ranks, by name; none if the run was not started, or its backend has no such pages."""
    try:
        handle = run.handle
    except RunNotFound:
        return {}
    executor = run.executor
    return {rank: executor.links(handle, rank) for rank in ranks} if isinstance(executor, Linker) else {}


@contextmanager
def suggesting(name: str, store: str | None) -> Iterator[None]:
    """Add to `RunNotFound` where the run was searched, and which run or store may be meant; `store` is `--store`."""
    try:
        yield
    except RunNotFound as exc:
        raise _not_found(exc, name, store) from exc


def _not_found(error: RunNotFound, name: str, store: str | None) -> RunNotFound:
    """The error, with the searched places, and what the local index has: this run elsewhere, or a similar name."""
    known = index.everything()
    if "://" in name or error.reason == "launch":  # a handle: its backend and the index were asked
        return error
    asked, searched = _searched(name, store, len(known))
    message = f"no run `{name}`; searched: {searched}"
    if others := [run.store for run in known if run.run_id == name and run.store != asked.uri]:
        return RunNotFound(message, hint=f"the run is in {others[0]}: leave out --store, or give this address")
    places = {run.run_id: run.store for run in reversed(known)}
    present = _run_ids(asked)
    close = closest(name, [run_id for run_id in (*places, *present) if run_id != name])
    if close is None:
        return RunNotFound(message, hint=_where_to_look(asked, has_runs=bool(present), has_index=bool(known)))
    is_there = close in present or places[close] == asked.uri
    where = f" --store {shlex.quote(asked.uri)}" if is_there and close not in places else ""
    hint = f"`{close}` is in {asked.uri if is_there else places[close]}: `atoll status {shlex.quote(close)}{where}`"
    return RunNotFound(f"{message}; did you mean `{close}`?", hint=hint)


def _searched(name: str, store: str | None, runs: int) -> tuple[Store, str]:
    """The store in which the run was searched, and all searched places as text."""
    if store is not None:
        asked = registry.open_store(store)
        return asked, f"{asked.uri} (--store)"
    if (known := index.find(name)) is not None:
        return registry.open_store(known.store), f"{known.store} (its store according to the local index)"
    setting = config.load().settings["store"]
    asked = registry.open_store(setting.value)
    origin = "the default store" if setting.origin == "default" else f"`store` of {setting.origin}"
    return asked, f"the local index ({runs} run{'' if runs == 1 else 's'}), {asked.uri} ({origin})"


def _run_ids(store: Store) -> list[str]:
    """Runs of the store, to suggest one of them; none if the store does not answer."""
    try:
        return list(islice(journal.run_ids(store), _MOST_SUGGESTED))
    except AtollError as exc:
        log.debug("cannot list the runs of a store: %s", exc.message)
        return []


def _where_to_look(asked: Store, *, has_runs: bool, has_index: bool) -> str:
    """The commands that list runs, of those places that have any."""
    lists = [f"`atoll ps --store {shlex.quote(asked.uri)}` lists the runs of that store"] if has_runs else []
    lists += ["`atoll ps` lists the runs started on this machine"] if has_index else []
    return "; ".join([*lists, "add `--store URI` for a run in another store"])


def find_place(name: str, store: str | None) -> tuple[str, Store]:
    """The run id and the store of a run, for commands that do not need its backend."""
    if "://" in name:
        run = find_run(name, store)
        return run.id, run.store
    known = index.find(name) if store is None else None
    return name, registry.open_store(store or (known.store if known else config.load().get("store")))


def have_all_ended(store: Store, run_id: str) -> bool:
    """Whether the store has the outcome of every replica; False for a run that was not launched."""
    try:
        replicas = journal.read_run(store, run_id)["spec"]["placement"]["replicas"]
    except RunNotFound:
        return False
    launch = journal.newest_launch(store, run_id).number
    return len(StoredRun(store, run_id, launch).outcomes()) >= int(replicas)


def _executor_settings(settings: Config, name: str, store: str | None) -> dict[str, object]:
    """The configured settings of the run's backend; finds out which one it is only if any backend is configured."""
    if not settings.table("executors"):
        return {}
    if "://" in name:
        return settings.executor_settings(RunHandle.parse(name).executor)
    known = index.find(name) if store is None else None
    if known is not None:
        return settings.executor_settings(RunHandle.parse(known.handle).executor)
    opened = registry.open_store(store or "")
    newest = journal.newest_launch(opened, name)
    return settings.executor_settings(journal.read_launch(opened, name, newest.number).executor)


def is_missing(store: Store) -> bool:
    """Whether this is a folder that does not exist, perhaps because of a typing error."""
    folder = folder_of(store.uri)
    return folder is not None and not os.path.isdir(folder)
