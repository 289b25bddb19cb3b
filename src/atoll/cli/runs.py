"""Finds the run that a command names, by run id or handle, with the settings of this folder."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from atoll import journal, registry
from atoll.errors import RunNotFound, closest
from atoll.handle import RunHandle
from atoll.runs import config, index
from atoll.runs.config import Config
from atoll.runs.run import Run, attach
from atoll.runs.stored import StoredRun
from atoll.stores.base import Store

log = logging.getLogger("atoll.cli")


def find_run(name: str, store: str | None) -> Run:
    """The run with this id or handle: in `store`, otherwise in the store of the local index or the configured one."""
    settings = config.load()
    if store is None and "://" not in name and index.find(name) is None:
        store = settings.get("store")
    # The address may contain a password, so it is not logged.
    log.debug("run %s: reading it from %s", name, "the given store" if store else "the store of the local index")
    with suggesting(name, store):
        return attach(name, store=store, settings=_executor_settings(settings, name, store))


@contextmanager
def suggesting(name: str, store: str | None) -> Iterator[None]:
    """Add to `RunNotFound` which run or which store may be meant."""
    try:
        yield
    except RunNotFound as exc:
        raise _not_found(exc, name, store) from exc


def _not_found(error: RunNotFound, name: str, store: str | None) -> RunNotFound:
    """The error, with what the local index has: another store with this run, or a run with a similar name."""
    asked = None if store is None else registry.open_store(store).uri
    known = index.everything()
    if others := [run.store for run in known if run.run_id == name and asked not in (None, run.store)]:
        return RunNotFound(error.message, hint=f"the run is in {others[0]}: leave out --store, or give this address")
    close = closest(name, [run.run_id for run in known if run.run_id != name])
    if close is None:
        return error
    at = [run.store for run in known if run.run_id == close]
    hint = error.hint if asked in at else f"`{close}` is in {at[0]}: `atoll status {shlex.quote(close)}`"
    return RunNotFound(f"{error.message}, did you mean `{close}`?", hint=hint)


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
    record = journal.read_run(registry.open_store(store or ""), name)
    return settings.executor_settings(record["executor"])
