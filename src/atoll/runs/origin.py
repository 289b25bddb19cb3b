"""Finds the run that another run starts from, and reads its agreed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll import journal, registry
from atoll.errors import InvalidSpec, MissingExtra
from atoll.runs import index
from atoll.runs.attach import attach
from atoll.stores.base import Store
from atoll.validation import INDEX, shown

if TYPE_CHECKING:
    from atoll.rounds.origin import OriginCopy


def origin_of(run: str, round_no: int | None, store: Store) -> OriginCopy:
    """The weights of a run, by id or handle; an id is searched in the local index, then in `store`."""
    if round_no is not None and not INDEX.fits(round_no):
        raise InvalidSpec("this run", [f"from_round={shown(round_no)}: {INDEX.words}"])
    try:
        from atoll.rounds.origin import OriginCopy
        from atoll.rounds.weights import agreed_weights
    except ModuleNotFoundError as exc:
        raise MissingExtra(exc.name or "numpy", extra="train") from exc
    if "://" in run:
        found = attach(run)
        run_id, place = found.id, found.store
    else:
        known = index.find_in(store.uri, run) or index.find(run)
        run_id, place = run, registry.open_store(known.store) if known else store
    return OriginCopy.of(agreed_weights(place, run_id, round_no, launch=journal.newest_rounds(place, run_id)))
