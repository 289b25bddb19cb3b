"""The journal of a launch, in the store: what is to run, the intent to start it, and the handle once it runs.

    run.json ──> launch/intent.json ──> (submit) ──> launch/handle.json

Each is created once and never changed, so a second launcher with the same run id sees how far the first one came and
goes on from there. Submitting again is safe because executors adopt what already exists. Once somebody has asked the
run to stop there is also `launch/cancelled.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll import keys
from atoll.errors import Conflict, KeyExists, KeyNotFound, RunNotFound
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.spec import RunSpec
from atoll.status import ON_REQUEST

if TYPE_CHECKING:
    from atoll.stores.base import Store

FORMAT = 1
_ABSENT = object()
"""Stands for what one of two records does not have; null is something else."""


def record_run(store: Store, spec: RunSpec, *, executor: str) -> bool:
    """Create `run.json`. False if the very same run is there already; `Conflict` if another one is."""
    record = {"format": FORMAT, "spec": spec.to_json(), "executor": executor}
    store.put(keys.index_key(spec.run_id), spec.run_id.encode())  # first, so that a run is never there unlisted
    try:
        store.create(RunKeys(spec.run_id).run(), _encode({**record, "created_at": time.time()}))
    except KeyExists:
        present = read_run(store, spec.run_id)
        differences = list(_differences({k: present[k] for k in ("executor", "spec")}, _plain(record)))
        if differences:
            raise Conflict(spec.run_id, differences) from None
        return False
    return True


def read_run(store: Store, run_id: str) -> dict[str, Any]:
    """The record of a run; `RunNotFound` if the store has none."""
    try:
        return _decode(store.get(RunKeys(run_id).run()))
    except KeyNotFound as exc:
        raise RunNotFound(
            f"no run `{run_id}` in {store.uri}", hint=f"`atoll ps --store {store.uri}` lists what is there"
        ) from exc


def record_intent(store: Store, run_id: str, request: Mapping[str, Any]) -> None:
    """Say that this request is about to be sent. `Conflict` if another launcher has said so of another request."""
    intent = {"host": socket.gethostname(), "pid": os.getpid(), "at": time.time(), "request_sha256": _digest(request)}
    try:
        store.create(RunKeys(run_id).intent(), _encode(intent))
    except KeyExists:
        check_intent(store, run_id, request)


def check_intent(store: Store, run_id: str, request: Mapping[str, Any]) -> None:
    """Raise `Conflict` if what was about to be started is not this request, and so not ours to adopt or to stop."""
    present = _decode(store.get(RunKeys(run_id).intent()))
    if present["request_sha256"] != _digest(request):
        there = f"{present['host']} (pid {present['pid']})"
        raise Conflict(
            run_id,
            [f"launch: begun on {there}, with another place or setting than here, and not finished"],
            hint=f"launch or cancel it again from where that was: {there}",
        )


def has_intent(store: Store, run_id: str) -> bool:
    """Whether a submit was about to happen."""
    return _is_there(store, RunKeys(run_id).intent())


def record_handle(store: Store, run_id: str, handle: RunHandle) -> RunHandle:
    """Make the handle known. Returns the one that counts: the first that was recorded."""
    try:
        store.create(RunKeys(run_id).handle(), _encode({"handle": str(handle), "at": time.time()}))
    except KeyExists:
        return read_handle(store, run_id) or handle
    return handle


def read_handle(store: Store, run_id: str) -> RunHandle | None:
    """The handle, or None if no submit has finished yet."""
    try:
        return RunHandle.parse(_decode(store.get(RunKeys(run_id).handle()))["handle"])
    except KeyNotFound:
        return None


class Cancel(NamedTuple):
    """What was said when the run was asked to stop."""

    why: str
    """A sentence about a replica."""
    over: tuple[int, ...] = ()
    """Ranks that had ended by themselves."""


def record_cancel(store: Store, run_id: str, cancel: Cancel) -> None:
    """Say that the run was asked to stop, and why: the backend is not told, and may forget. The first word counts."""
    try:
        store.create(RunKeys(run_id).cancelled(), _encode({"at": time.time(), **cancel._asdict()}))
    except KeyExists:
        pass


def read_cancel(store: Store, run_id: str) -> Cancel | None:
    """What was said when the run was asked to stop; None if it was not."""
    try:
        found = _decode(store.get(RunKeys(run_id).cancelled()))
    except KeyNotFound:
        return None
    why = found.get("why")
    return Cancel(why if isinstance(why, str) else ON_REQUEST, tuple(found.get("over", ())))


def is_cancelled(store: Store, run_id: str) -> bool:
    """Whether somebody asked the run to stop."""
    return _is_there(store, RunKeys(run_id).cancelled())


def run_ids(store: Store) -> Iterator[str]:
    """Every run of the store."""
    for key in store.list(keys.index_prefix()):
        part = key.removeprefix(keys.index_prefix())
        yield bytes(store.get(key)).decode() if part.startswith("~") else part


def _differences(present: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """One line for each place where the two records differ."""
    if isinstance(present, Mapping) and isinstance(wanted, Mapping):
        for name in sorted({*present, *wanted}):
            if name == "format":
                continue
            yield from _differences(present.get(name, _ABSENT), wanted.get(name, _ABSENT), f"{where}.{name}")
    elif present != wanted:
        yield f"{where.removeprefix('.spec').removeprefix('.')}: there {_said(present)}, here {_said(wanted)}"


def _digest(request: Mapping[str, Any]) -> str:
    # Which interpreter asks is no content: `python train.py` and `atoll` may name the same one differently.
    return hashlib.sha256(_encode({k: v for k, v in request.items() if k != "command"})).hexdigest()


def _is_there(store: Store, key: str) -> bool:
    try:
        store.get(key)
    except KeyNotFound:
        return False
    return True


def _said(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = json.dumps(value, ensure_ascii=False)
    return f"`{text if len(text) <= 100 else text[:97] + '…'}`"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")


def _decode(data: Any) -> dict[str, Any]:
    return json.loads(bytes(data).decode("utf-8", "surrogatepass"))  # type: ignore[no-any-return]
