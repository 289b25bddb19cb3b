"""Delete the objects of a run that is over: all of them, or all but its records and the newest agreed weights.

A marker is written first, so that no launcher starts or continues the run, and a deletion that was interrupted can be
repeated: `run.json` and the marker are deleted last. Objects outside the run, such as code bundles, are not touched.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll import disk, journal, keys
from atoll._threads import map_in_background
from atoll.errors import Conflict, KeyNotFound, MissingExtra, RunNotFound
from atoll.keys import RunKeys
from atoll.runs import index, over
from atoll.stores.base import Store
from atoll.stores.fast import list_sizes

if TYPE_CHECKING:
    from atoll.runs.run import Run

log = logging.getLogger("atoll.runs")

_CONCURRENT = 16
_RECORDS = re.compile(
    r"(?:run|pruned)\.json\Z"
    r"|launch/(?:\d+/)?(?:intent|handle|joined|resume|cancelled)\.json\Z"
    r"|launch/(?:\d+/)?cancelled/"
    r"|(?:launch/\d+/)?(?:outcome|result)/"
)
"""The records of a run that are kept with its weights: what was launched, and how it ended."""


@dataclass(frozen=True)
class Deletion:
    """The objects of a run that a deletion removes."""

    run_id: str
    objects: tuple[str, ...]
    """Their keys, in the order in which they are deleted."""
    size_bytes: int | None
    """None if the store does not say the sizes of objects."""
    keeps_weights: bool = False
    launch: int = 1
    """The newest launch of the run when the deletion was planned."""


def check_is_over(run: Run) -> None:
    """Raise `Conflict` with the reason `running` unless every replica of the newest launch of the run has ended."""
    if journal.is_deleted(run.store, run.id):
        return  # it was over when its deletion began, and its records may be gone
    if journal.newest_launch(run.store, run.id).number != run.launch:  # `run` was resumed since it was read
        run = type(run).stored(run.store, run.id)
    over.check_is_over(run, hint=f"`atoll cancel {shlex.quote(run.id)}` stops it first")


def planned_deletion(store: Store, run_id: str, *, keep_weights: bool = False) -> Deletion:
    """What a deletion would remove; nothing is changed. `RunNotFound` if the store has nothing of the run."""
    run_keys = RunKeys(run_id)
    sizes = dict(list_sizes(store, run_keys.run_prefix))
    if not sizes:
        raise RunNotFound(
            f"no run `{run_id}` in {store.uri}", hint=f"`atoll ps --store {store.uri}` lists what is there"
        )
    if keep_weights:
        kept = _kept(store, run_id, list(sizes))
        chosen = [key for key in sizes if key not in kept]
    else:
        last = (run_keys.run(), run_keys.deleted())
        chosen = [key for key in sizes if key not in last] + [key for key in last if key in sizes]
    known = [size for key in chosen if (size := sizes[key]) is not None]
    size_bytes = sum(known) if len(known) == len(chosen) else None
    return Deletion(run_id, tuple(chosen), size_bytes, keep_weights, journal.newest_launch(store, run_id).number)


def delete(store: Store, planned: Deletion) -> None:
    """Delete these objects of a run that is over. May be repeated after an interruption.

    Raises `Conflict` with the reason `running`, and deletes nothing, if the run was launched again since the plan.
    """
    run_keys = RunKeys(planned.run_id)
    log.info("run %s: delete %d objects", planned.run_id, len(planned.objects))
    if planned.keeps_weights:
        was_marked = journal.is_pruned(store, planned.run_id)
        journal.record_pruned(store, planned.run_id)
        _check_no_new_launch(store, planned, marker=None if was_marked else run_keys.pruned())
        _delete_all(store, planned.objects)
    else:
        was_marked = journal.is_deleted(store, planned.run_id)
        journal.record_deleted(store, planned.run_id)
        _check_no_new_launch(store, planned, marker=None if was_marked else run_keys.deleted())
        last = (run_keys.run(), run_keys.deleted())
        _delete_all(store, [key for key in planned.objects if key not in last])
        for key in (keys.index_key(planned.run_id), *last):
            store.delete(key)
        index.forget(planned.run_id, store.uri)
    _remove_empty_folders(store, run_keys.run_prefix)


def _check_no_new_launch(store: Store, planned: Deletion, *, marker: str | None) -> None:
    """Raise `Conflict` if a launch was recorded after the plan; `marker` is then deleted.

    A launcher records its launch and then looks for the marker, so of the two at least one sees the other.
    """
    run_id, newest = planned.run_id, journal.newest_launch(store, planned.run_id).number
    if newest <= planned.launch:
        return
    if marker is not None:
        store.delete(marker)
    what = f"run `{run_id}` is not deleted, because it has been resumed meanwhile, as launch {newest}"
    raise Conflict(run_id, what=what, reason="running", hint=f"`atoll cancel {shlex.quote(run_id)}` stops it first")


def _delete_all(store: Store, chosen: list[str] | tuple[str, ...]) -> None:
    if store.uri.startswith(("file:", "memory:")):
        for key in chosen:
            store.delete(key)
    elif chosen:
        map_in_background(store.delete, chosen, most=_CONCURRENT)


def _remove_empty_folders(store: Store, prefix: str) -> None:
    """Remove the folders of a `file:` store that the deletion has left empty. Others are not removed."""
    root = disk.folder_of(store.uri)
    if root is None:
        return
    for folder, _, _ in os.walk(os.path.join(root, prefix.rstrip("/")), topdown=False):
        with suppress(OSError):  # not empty
            os.rmdir(folder)


def _kept(store: Store, run_id: str, present: list[str]) -> set[str]:
    """The keys of the records of a run, and of what its newest agreed weights are rebuilt from."""
    prefix = RunKeys(run_id).run_prefix
    kept = {key for key in present if _RECORDS.match(key.removeprefix(prefix))}
    try:
        from atoll.rounds.keys import RoundKeys
        from atoll.rounds.records import Agreement, Snapshot
        from atoll.rounds.weights import rounds_held
    except ModuleNotFoundError as exc:
        raise MissingExtra(exc.name or "numpy", extra="train") from exc
    rounds = RoundKeys(run_id, journal.newest_rounds(store, run_id))
    held = rounds_held(store, rounds)
    base = held.base_of(held.newest)
    try:
        agreement = Agreement.open(store.get(rounds.agreement()))
    except KeyNotFound:  # a run without rounds
        return kept
    if base is None:  # the newest weights cannot be rebuilt, so keep all that there is of the rounds
        return kept | {key for key in present if key.startswith(rounds.prefix)}
    digest = Snapshot.open(store.get(rounds.snapshot(base))).blob.digest if base else agreement.initial.digest
    for key in present:
        if key in (rounds.agreement(), rounds.snapshot(base)) or key.startswith(
            (rounds.claims_prefix(), rounds.blob_prefix(base, digest))
        ):
            kept.add(key)
        elif key.startswith(rounds.rounds_prefix()):
            if int(key.removeprefix(rounds.rounds_prefix()).partition("/")[0]) >= base:
                kept.add(key)
        elif key.startswith(rounds.commits_prefix()) and rounds.parse_commit(key) >= base:
            kept.add(key)
    return kept
