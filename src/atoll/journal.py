"""The journal of a launch in the store: the spec of the run, the intent to start it, and the handle of the started run.

    run.json ──> launch/intent.json ──> (submit) ──> launch/handle.json

Each object is created once and never changed, so a second launcher with the same run id sees how far the first one
came and continues from there. Submitting again is safe because executors adopt what already exists. A cancelled run
also has `launch/cancelled.json`.
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
"""The value of a name that one of two records does not have; differs from null."""


def record_run(store: Store, spec: RunSpec, *, executor: str) -> bool:
    """Create `run.json`. False if the same run exists already; `Conflict` if a different one does."""
    record = {"format": FORMAT, "spec": spec.to_json(), "executor": executor}
    store.put(keys.index_key(spec.run_id), spec.run_id.encode())  # first, so that every run is listed
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
    """Record that this request is about to be sent; `Conflict` if a launcher recorded another request."""
    intent = {"host": socket.gethostname(), "pid": os.getpid(), "at": time.time(), "request_sha256": _digest(request)}
    try:
        store.create(RunKeys(run_id).intent(), _encode(intent))
    except KeyExists:
        check_intent(store, run_id, request)


def check_intent(store: Store, run_id: str, request: Mapping[str, Any]) -> None:
    """Raise `Conflict` if the recorded intent is for another request, which this launcher must not adopt or stop."""
    present = _decode(store.get(RunKeys(run_id).intent()))
    if present["request_sha256"] != _digest(request):
        there = f"{present['host']} (pid {present['pid']})"
        raise Conflict(
            run_id,
            [f"launch: begun on {there} with another placement or setting, and not finished"],
            hint=f"launch or cancel it on that machine: {there}",
        )


def has_intent(store: Store, run_id: str) -> bool:
    """Whether a launcher recorded an intent to submit."""
    return _is_there(store, RunKeys(run_id).intent())


def record_handle(store: Store, run_id: str, handle: RunHandle) -> RunHandle:
    """Record the handle. Returns the recorded one, which is the first."""
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
    """The record of a cancellation."""

    why: str
    """The message of each replica that is cancelled."""
    over: tuple[int, ...] = ()
    """Ranks that had ended before."""


def record_cancel(store: Store, run_id: str, cancel: Cancel) -> None:
    """Record the cancellation and its reason, which the backend does not keep. The first record counts."""
    try:
        store.create(RunKeys(run_id).cancelled(), _encode({"at": time.time(), **cancel._asdict()}))
    except KeyExists:
        pass


def read_cancel(store: Store, run_id: str) -> Cancel | None:
    """The record of the cancellation; None if the run was not cancelled."""
    try:
        found = _decode(store.get(RunKeys(run_id).cancelled()))
    except KeyNotFound:
        return None
    why = found.get("why")
    return Cancel(why if isinstance(why, str) else ON_REQUEST, tuple(found.get("over", ())))


def is_cancelled(store: Store, run_id: str) -> bool:
    """Whether a cancellation is recorded."""
    return _is_there(store, RunKeys(run_id).cancelled())


def run_ids(store: Store) -> Iterator[str]:
    """The id of every run in the store."""
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
        yield f"{where.removeprefix('.spec').removeprefix('.')}: there {_shown(present)}, here {_shown(wanted)}"


def _digest(request: Mapping[str, Any]) -> str:
    # The interpreter is not content: `python train.py` and `atoll` may have different paths to the same one.
    return hashlib.sha256(_encode({k: v for k, v in request.items() if k != "command"})).hexdigest()


def _is_there(store: Store, key: str) -> bool:
    try:
        store.get(key)
    except KeyNotFound:
        return False
    return True


def _shown(value: Any) -> str:
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
