"""Handles of the replica protocol: what is in their metadata, and the replica that a handle names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.errors import ConfigError
from atoll.handle import RunHandle
from atoll.runs.run import Run
from atoll.serverless.protocol import ReplicaHandle
from atoll.validation import shown

_NEEDED = ("run_id", "run", "store")


@dataclass(frozen=True)
class Replica:
    """The replica that a handle names; found from the handle alone."""

    rank: int
    run_id: str
    run: RunHandle
    store: str
    launch: int
    native: Mapping[str, Any]
    """The metadata that the backend added, such as the name of the job."""


def metadata_of(run: Run, rank: int, native: Mapping[str, Any], *, submit_ts: float) -> dict[str, Any]:
    """The metadata of a replica's handle. JSON, and enough for another process."""
    return {
        "run_id": run.id,
        "run": str(run.handle),
        "store": run.store.uri,
        "launch": run.launch,
        "rank": rank,
        "submit_ts": submit_ts,
        **native,
    }


def replica_of(handle: ReplicaHandle, executor: str, names: tuple[str, ...]) -> Replica:
    """The replica of a handle. `ConfigError` if the handle is malformed or belongs to another backend."""
    if not all(hasattr(handle, name) for name in ("rank", "backend_name", "metadata")):
        hint = "make a handle from saved JSON with `ReplicaHandle(**saved)`"
        raise ConfigError(f"{shown(handle)} is not a handle", reason="handle", hint=hint)
    if not isinstance(handle.metadata, Mapping):
        raise ConfigError(f"the metadata of the handle is {shown(handle.metadata)}, not a mapping", reason="handle")
    if handle.backend_name not in names:
        raise ConfigError(f"the handle belongs to `{handle.backend_name}`, but this executor is `{names[0]}`")
    given = handle.metadata
    missing = [name for name in _NEEDED if not isinstance(given.get(name), str) or not given[name]]
    if missing:
        raise ConfigError(f"the handle has no {', '.join(missing)}; use handles that `launch_replicas` returned")
    if "\0" in given["store"]:
        raise ConfigError("the store of the handle contains NUL")
    run, launch = RunHandle.parse(given["run"]), given.get("launch", 1)
    if run.executor != executor:
        raise ConfigError(f"the handle names a run on `{run.executor}`, but this executor is `{names[0]}`")
    if type(launch) is not int or launch < 1:
        raise ConfigError(f"launch {launch!r} of the handle is not a whole number from 1")
    if type(handle.rank) is not int or not 0 <= handle.rank < run.replicas:
        raise ConfigError(f"rank {handle.rank!r}: run `{given['run_id']}` has {run.replicas} replicas")
    if given.get("rank", handle.rank) != handle.rank:
        raise ConfigError(f"the handle is of rank {handle.rank}, and its metadata of rank {given['rank']!r}")
    ours = {*_NEEDED, "launch", "rank", "submit_ts", "links"}
    native = {name: value for name, value in given.items() if name not in ours}
    return Replica(handle.rank, given["run_id"], run, given["store"], launch, native)
