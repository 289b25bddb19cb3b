"""Finding a run that a person named, with the settings of this folder."""

from __future__ import annotations

from atoll import config, index, journal, registry
from atoll.config import Config
from atoll.errors import RunNotFound, did_you_mean
from atoll.handle import RunHandle
from atoll.run import Run, attach
from atoll.stores.base import Store


def find_run(name: str, store: str | None) -> Run:
    """The run with this id or handle, in `store`; else where the local index says, else in the default store."""
    settings = config.load()
    if store is None and "://" not in name and index.find(name) is None:
        store = settings.get("store")
    try:
        return attach(name, store=store, settings=_executor_settings(settings, name, store))
    except RunNotFound as exc:
        elsewhere = [known.store for known in index.everything() if known.run_id == name]
        if elsewhere:
            raise RunNotFound(
                exc.message, hint=f"it is in {elsewhere[-1]}; leave --store out, or give that one"
            ) from exc
        meant = did_you_mean(name, [known.run_id for known in index.everything()])
        raise RunNotFound(exc.message + meant, hint=exc.hint) from exc


def find_place(name: str, store: str | None) -> tuple[str, Store]:
    """The run id and the store of a run, for what needs no backend: its machines may be long gone."""
    if "://" in name:
        run = find_run(name, store)
        return run.id, run.store
    known = index.find(name) if store is None else None
    return name, registry.open_store(store or (known.store if known else config.load().get("store")))


def _executor_settings(settings: Config, name: str, store: str | None) -> dict[str, object]:
    """Only a configured backend needs the extra look at where the run is."""
    if not settings.table("executors"):
        return {}
    if "://" in name:
        return settings.executor_settings(RunHandle.parse(name).executor)
    known = index.find(name) if store is None else None
    if known is not None:
        return settings.executor_settings(RunHandle.parse(known.handle).executor)
    record = journal.read_run(registry.open_store(store or ""), name)
    return settings.executor_settings(record["executor"])
