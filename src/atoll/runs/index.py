"""The index of runs launched on this machine: their stores and handles. A cache: losing it is harmless."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.context import home
from atoll.errors import ConfigError


@dataclass(frozen=True)
class Known:
    """A run in the index."""

    run_id: str
    store: str
    handle: str
    at: float


def remember(run_id: str, store: str, handle: str) -> None:
    """Add a run to the index. A folder that cannot be written is ignored."""
    known = Known(run_id, store, handle, time.time())
    path = _path(run_id, store)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.stem}.{os.getpid()}")
        fresh.write_text(json.dumps(asdict(known)), encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return


def forget(run_id: str, store: str) -> None:
    """Remove a run that was not started."""
    with suppress(OSError):
        _path(run_id, store).unlink(missing_ok=True)


def _path(run_id: str, store: str) -> Path:
    name = hashlib.sha256(f"{store}\0{run_id}".encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return home() / "index" / f"{name}.json"


def find_in(store: str, run_id: str) -> Known | None:
    """The run with this id in this store."""
    return next((known for known in _read() if (known.run_id, known.store) == (run_id, store)), None)


def everything() -> list[Known]:
    """Every run in the index, the newest first."""
    return sorted(_read(), key=lambda known: -known.at)


def find(run: str) -> Known | None:
    """The run with this id or handle; `ConfigError` if several stores have the id."""
    found = [known for known in everything() if run in (known.run_id, known.handle)]
    if len(found) > 1:
        stores = ", ".join(f"`{known.store}`" for known in found)
        raise ConfigError(f"run `{run}` is in several stores: {stores}", hint="choose one: `--store URI`")
    return found[0] if found else None


def _read() -> Iterator[Known]:
    folder = home() / "index"
    for path in folder.glob("*.json") if folder.is_dir() else ():
        try:
            known = Known(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # only a cache
        texts = (known.run_id, known.store, known.handle)
        if all(isinstance(text, str) for text in texts) and isinstance(known.at, int | float):
            yield known
