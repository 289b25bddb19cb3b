"""The runs launched from here: where their stores are, and their handles. Only a cache; losing it is harmless."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from atoll.context import home
from atoll.errors import ConfigError


@dataclass(frozen=True)
class Known:
    """A run this machine has heard of."""

    run_id: str
    store: str
    handle: str
    at: float


def remember(run_id: str, store: str, handle: str) -> None:
    """Note a run. A folder that cannot be written to is no reason to fail."""
    known = Known(run_id, store, handle, time.time())
    name = hashlib.sha256(f"{store}\0{run_id}".encode("utf-8", "surrogatepass")).hexdigest()[:24]
    folder = home() / "index"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".{name}.{os.getpid()}"
        fresh.write_text(json.dumps(asdict(known)), encoding="utf-8")
        fresh.replace(folder / f"{name}.json")
    except OSError:
        return


def everything() -> list[Known]:
    """Every run known here, the newest first."""
    return sorted(_read(), key=lambda known: -known.at)


def find(run: str) -> Known | None:
    """The run with this id or handle; `ConfigError` if the id is known in several stores."""
    found = [known for known in everything() if run in (known.run_id, known.handle)]
    if len(found) > 1:
        stores = ", ".join(f"`{known.store}`" for known in found)
        raise ConfigError(f"run `{run}` is in several stores: {stores}", hint="say which one: `--store URI`")
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
