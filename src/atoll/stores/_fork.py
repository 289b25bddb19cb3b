"""obstore runs threads that a forked child does not have: used in a child, it would hang for ever. Refuse instead."""

from __future__ import annotations

import os

from atoll.errors import StoreError

_first_used_in: int | None = None


def guard_against_fork(uri: str) -> None:
    """Raise in a child that was forked from a process which had already used a cloud store."""
    global _first_used_in
    here = os.getpid()
    if _first_used_in is None:
        _first_used_in = here
    elif _first_used_in != here:
        raise StoreError(
            f"this process was forked from one that had used a cloud store, so it cannot use {uri}",
            uri=uri,
            hint="start workers with the `spawn` or `forkserver` method (DataLoader: multiprocessing_context='spawn'), "
            "or touch the store only in the parent",
        )
