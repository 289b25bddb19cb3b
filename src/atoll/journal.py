"""The journal of a run in the store: its spec, and for each launch the intent to start it and how that ended.

    run.json ──> launch/intent.json ──> (submit) ──> launch/handle.json: started, or undone

Each object is created once and never changed, so a second launcher with the same run id sees how far the first one
came and continues from there. Submitting again is safe because executors adopt what already exists. The first write of
`handle.json` decides a launch: a launcher that failed writes that the launch is undone *before* it stops replicas, so
two racing launchers never disagree. After an undone launch the run is launched again, as launch 2, with records below
`launch/2/` and other native names. A cancelled launch also has `cancelled.json`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll import keys
from atoll.errors import ConfigError, Conflict, KeyExists, KeyNotFound, RunNotFound, StoreError
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.spec import RunSpec
from atoll.status import ON_REQUEST

if TYPE_CHECKING:
    from atoll.stores.base import Store

log = logging.getLogger("atoll.runs")

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
        found = _decode(store.get(RunKeys(run_id).run()))
    except KeyNotFound as exc:
        raise RunNotFound(
            f"no run `{run_id}` in {store.uri}", hint=f"`atoll ps --store {store.uri}` lists what is there"
        ) from exc
    if not {"spec", "executor"} <= found.keys():
        raise StoreError(f"the record of run `{run_id}` is damaged: it has no spec", uri=store.uri, reason="damaged")
    return found


class Launch(NamedTuple):
    """One launch of a run, as far as the store knows."""

    number: int = 1
    handle: RunHandle | None = None
    """Set if the launch was started."""
    undone: str | None = None
    """Why the launch was undone; None if it was not."""
    was_there: bool = False
    """Whether the run was started before this launcher came."""


def newest_launch(store: Store, run_id: str) -> Launch:
    """The newest launch of a run. A launch follows only on an undone one, so most runs need one GET."""
    launch = _decided(store, run_id, 1)
    while launch.undone is not None:
        following = _decided(store, run_id, launch.number + 1)
        is_begun = following.handle or following.undone is not None or read_intent(store, run_id, following.number)
        if not is_begun:
            break
        launch = following
    return launch


def launch_of(store: Store, run_id: str, handle: RunHandle) -> Launch:
    """The launch with this handle; the newest one if the store knows no launch of this handle."""
    newest = newest_launch(store, run_id)
    earlier = (_decided(store, run_id, number) for number in range(newest.number - 1, 0, -1))
    known = (launch for launch in earlier if intended_handle(store, run_id, launch.number) == handle)
    return newest if newest.handle == handle else next(known, newest)


def record_intent(
    store: Store, run_id: str, request: Mapping[str, Any], handle: RunHandle | None, *, launch: int = 1
) -> bool:
    """Record that this request is about to be sent, and the handle it leads to.

    False if another launcher recorded the same request before; `Conflict` if it recorded another one.
    """
    intent = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "at": time.time(),
        "request_sha256": _digest(request),
        **({"handle": str(handle)} if handle is not None else {}),
    }
    run_keys = RunKeys(run_id, launch)
    try:
        store.create(run_keys.intent(), _encode(intent))
    except KeyExists:
        check_intent(store, run_id, request, launch=launch)
        store.put(run_keys.joined(), _encode({"host": intent["host"], "pid": intent["pid"]}))
        return False
    return True


def check_intent(store: Store, run_id: str, request: Mapping[str, Any], *, launch: int = 1) -> None:
    """Raise `Conflict` if the recorded intent is for another request, which this launcher must not adopt."""
    present = _decode(store.get(RunKeys(run_id, launch).intent()))
    if present["request_sha256"] != _digest(request):
        there = f"{present['host']} (pid {present['pid']})"
        raise Conflict(
            run_id,
            [f"launch: begun on {there} with another placement or setting, and not finished"],
            hint=f"repeat the launch with those settings, or cancel it: `atoll cancel {run_id}`",
        )


def read_intent(store: Store, run_id: str, launch: int = 1) -> Mapping[str, Any] | None:
    """The intent of a launch; None if no launcher began it. Its `handle` is absent in records of earlier versions."""
    try:
        return _decode(store.get(RunKeys(run_id, launch).intent()))
    except KeyNotFound:
        return None


def intended_handle(store: Store, run_id: str, launch: int = 1) -> RunHandle | None:
    """The handle that an unfinished launch leads to; None if no launcher began it."""
    return _handle(read_intent(store, run_id, launch) or {})


def record_handle(store: Store, run_id: str, handle: RunHandle, *, launch: int = 1) -> Launch:
    """Record that the launch was started. Returns what is recorded, which another launcher may have decided."""
    return _decide(store, run_id, launch, {"handle": str(handle)})


def record_undone(store: Store, run_id: str, why: str, *, launch: int = 1) -> Launch:
    """Record that the launch is undone. Returns what is recorded, which another launcher may have decided."""
    return _decide(store, run_id, launch, {"undone": why})


def read_handle(store: Store, run_id: str) -> RunHandle | None:
    """The handle of the newest launch, or None if no submit has finished yet."""
    return newest_launch(store, run_id).handle


def withdraw_run(store: Store, spec: RunSpec, *, executor: str) -> None:
    """Delete the records of a first launch that started nothing, unless another launcher has recorded an intent.

    The caller has recorded that the launch is undone, so no launcher continues it; one may begin launch 2 meanwhile.
    """
    first, second = RunKeys(spec.run_id), RunKeys(spec.run_id, 2)

    def others_began() -> bool:
        return _is_there(store, first.joined()) or _is_there(store, second.intent())

    if others_began():
        return
    for key in (first.run(), keys.index_key(spec.run_id), first.intent()):
        store.delete(key)
    if others_began():  # while the records were deleted
        record_run(store, spec, executor=executor)
    else:
        store.delete(first.handle())


def _decide(store: Store, run_id: str, launch: int, record: Mapping[str, Any]) -> Launch:
    try:
        store.create(RunKeys(run_id, launch).handle(), _encode({**record, "at": time.time()}))
    except KeyExists:
        log.debug("run %s: launch %d was decided before", run_id, launch)
        return _decided(store, run_id, launch)
    return _launch(launch, record)


def _decided(store: Store, run_id: str, launch: int) -> Launch:
    try:
        found = _decode(store.get(RunKeys(run_id, launch).handle()))
    except KeyNotFound:
        return Launch(launch)
    return _launch(launch, found)


def _launch(number: int, record: Mapping[str, Any]) -> Launch:
    if "handle" not in record and "undone" not in record:
        raise StoreError("the record of a launch is damaged: it has neither a handle nor a reason", reason="damaged")
    return Launch(number, _handle(record), record.get("undone"))


def _handle(record: Mapping[str, Any]) -> RunHandle | None:
    """The handle of a record; None if it has none."""
    try:
        return RunHandle.parse(str(record["handle"])) if record.get("handle") else None
    except ConfigError as exc:
        raise StoreError(f"the record of a launch is damaged: {exc.message}", reason="damaged") from exc


class Cancel(NamedTuple):
    """The record of a cancellation."""

    why: str
    """The message of each replica that is cancelled."""
    over: tuple[int, ...] = ()
    """Ranks that had ended before."""


def record_cancel(store: Store, run_id: str, cancel: Cancel, *, launch: int = 1) -> None:
    """Record the cancellation and its reason, which the backend does not keep. The first record counts."""
    try:
        store.create(RunKeys(run_id, launch).cancelled(), _encode({"at": time.time(), **cancel._asdict()}))
    except KeyExists:
        pass


def read_cancel(store: Store, run_id: str, *, launch: int = 1) -> Cancel | None:
    """The record of the cancellation; None if the run was not cancelled."""
    try:
        found = _decode(store.get(RunKeys(run_id, launch).cancelled()))
    except KeyNotFound:
        return None
    why = found.get("why")
    return Cancel(why if isinstance(why, str) else ON_REQUEST, tuple(found.get("over", ())))


def is_cancelled(store: Store, run_id: str, *, launch: int = 1) -> bool:
    """Whether a cancellation is recorded."""
    return _is_there(store, RunKeys(run_id, launch).cancelled())


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
    """The record in an object; `StoreError` if it is damaged."""
    try:
        found = json.loads(bytes(data).decode("utf-8", "surrogatepass"))
    except ValueError as exc:
        raise StoreError(f"a record of a run is damaged: {exc}", reason="damaged") from exc
    if not isinstance(found, dict):
        raise StoreError("a record of a run is damaged: it is no JSON object", reason="damaged")
    return found
