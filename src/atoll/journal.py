"""The journal of a run in the store: its spec, and for each launch the intent to start it and how that ended.

    run.json ──> launch/intent.json ──> (submit) ──> launch/handle.json: started, or undone

Each object is created once and never changed, so a second launcher with the same run id sees how far the first one
came and continues from there. Submitting again is safe because executors adopt what already exists. The first write of
`handle.json` decides a launch: a launcher that failed writes that the launch is undone *before* it stops replicas, so
two racing launchers never disagree. After an undone launch the run is launched again, as launch 2, with records below
`launch/2/` and other native names. A run that is over is continued by a launch that `launch/2/resume.json` begins: it
has its own spec and backend, and it continues the rounds of the launch that this record names.

A cancelled launch also has `cancelled.json`; if only single ranks of it were cancelled, it has one
`cancelled/00002.json` for each of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll import __version__, keys
from atoll.errors import ConfigError, Conflict, KeyExists, KeyNotFound, RunNotFound, StoreError
from atoll.handle import RunHandle
from atoll.keys import RunKeys
from atoll.spec import RunSpec
from atoll.status import ON_REQUEST

if TYPE_CHECKING:
    from atoll.stores.base import Store

log = logging.getLogger("atoll.runs")

FORMAT = 1
OTHER_LAUNCHER = "container"
"""The executor in the record of a run whose containers were started by another launcher, and recorded it themselves."""
_ABSENT = object()
"""The value of a name that one of two records does not have; differs from null."""


def record_run(store: Store, spec: RunSpec, *, executor: str) -> bool:
    """Create `run.json`. False if the same run exists already; `Conflict` if a different one does."""
    record = {"format": FORMAT, "spec": spec.to_json(), "executor": executor}
    store.put(keys.index_key(spec.run_id), spec.run_id.encode())  # first, so that every run is listed
    try:
        writer = {"created_at": time.time(), "atoll": __version__}
        store.create(RunKeys(spec.run_id).run(), _encode({**record, **writer}))
    except KeyExists:
        present = read_run(store, spec.run_id)
        differences = _content_differences(present, _plain(record))
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
    if not _has_spec(found):
        raise StoreError(f"the record of run `{run_id}` is damaged: it has no spec", uri=store.uri, reason="damaged")
    return found


def _has_spec(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("spec"), dict) and isinstance(record.get("executor"), str)


def version_problem(record: Mapping[str, Any]) -> str | None:
    """Why this version of Atoll is too old for a run; None if it is not. Versions that differ in the last number agree.

    A replica compares its own version with that of the launcher before it calls the entry point.
    """
    wrote = str(record.get("atoll", ""))
    written = record.get("format", FORMAT)
    if isinstance(written, int) and written <= FORMAT and _series(wrote) <= _series(__version__):
        return None
    return f"the launcher has Atoll {wrote or 'of a later format'}, and this replica the older version {__version__}"


def _series(version: str) -> tuple[int, int]:
    """Major and minor number of a version; (0, 0) if it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (0, 0) if numbers is None else (int(numbers[1]), int(numbers[2]))


class Launch(NamedTuple):
    """One launch of a run, as far as the store knows."""

    number: int = 1
    handle: RunHandle | None = None
    """Set if the launch was started."""
    undone: str | None = None
    """Why the launch was undone; None if it was not."""
    was_there: bool = False
    """Whether the run was started before this launcher came."""
    is_resume: bool = False
    """Whether it continues the rounds of an earlier launch."""
    is_refused: bool = False
    """The backend refused the launch, which was undone then, before its launcher had created anything."""

    @property
    def is_decided(self) -> bool:
        return self.handle is not None or self.undone is not None


def newest_launch(store: Store, run_id: str) -> Launch:
    """The newest launch of a run. A launch follows on an undone one, or as a resume; most runs need two GETs."""
    launch = _decided(store, run_id, 1)
    while launch.is_decided:
        number = launch.number + 1
        is_resume = _is_there(store, RunKeys(run_id, number).resume())
        if not is_resume and launch.undone is None:
            break
        following = _decided(store, run_id, number)._replace(is_resume=is_resume)
        if not (is_resume or following.is_decided or read_intent(store, run_id, number)):
            break
        launch = following
    return launch


class LaunchRecord(NamedTuple):
    """What one launch of a run runs, and where."""

    spec: dict[str, Any]
    executor: str
    rounds_of: int
    """The launch in whose folder its rounds and checkpoints are."""
    at: float | None = None
    """When it was recorded."""


def record_resume(store: Store, spec: RunSpec, *, executor: str, launch: int, rounds_of: int) -> bool:
    """Record that this launch continues the rounds of an earlier one.

    False if another launcher recorded the same launch before; `Conflict` if it recorded another one.
    """
    record = {"format": FORMAT, "spec": spec.to_json(), "executor": executor, "rounds_of": rounds_of}
    try:
        writer = {"created_at": time.time(), "atoll": __version__}
        store.create(RunKeys(spec.run_id, launch).resume(), _encode({**record, **writer}))
    except KeyExists:
        present = read_resume(store, spec.run_id, launch) or {}
        differences = _content_differences(present, _plain(record))
        if differences:
            what = f"run `{spec.run_id}` is being resumed by another command, with other content"
            quoted = shlex.quote(spec.run_id)
            hint = (
                f"`atoll status {quoted}` shows that launch; if its command has ended, `atoll cancel {quoted}` ends it"
            )
            raise Conflict(spec.run_id, differences, what=what, reason="resumed", hint=hint) from None
        return False
    return True


def read_launch(store: Store, run_id: str, launch: int = 1) -> LaunchRecord:
    """What a launch of a run runs, and where; `RunNotFound` if the store has no such run."""
    resume = read_resume(store, run_id, launch)
    record = read_run(store, run_id) if resume is None else resume
    rounds_of = record.get("rounds_of", launch)
    if not _has_spec(record) or not isinstance(rounds_of, int):
        raise StoreError(f"the record of launch {launch} of run `{run_id}` is damaged", uri=store.uri, reason="damaged")
    at = record.get("created_at")
    return LaunchRecord(record["spec"], record["executor"], rounds_of, at if isinstance(at, int | float) else None)


def rounds_of(store: Store, run_id: str, launch: int) -> int:
    """The launch in whose folder the rounds of this launch are: itself, unless it is a resume."""
    return read_launch(store, run_id, launch).rounds_of


def newest_rounds(store: Store, run_id: str) -> int:
    """The launch in whose folder the rounds of the newest launch are."""
    newest = newest_launch(store, run_id)
    return rounds_of(store, run_id, newest.number) if newest.is_resume else newest.number


def read_resume(store: Store, run_id: str, launch: int) -> dict[str, Any] | None:
    """The record of a launch that continues an earlier one; None if it does not."""
    if launch == 1:
        return None
    try:
        return _decode(store.get(RunKeys(run_id, launch).resume()))
    except KeyNotFound:
        return None


def launch_at(store: Store, run_id: str, number: int) -> Launch:
    """The launch with this number; `RunNotFound` if the run has no such launch."""
    newest = newest_launch(store, run_id)
    if not 1 <= number <= newest.number:
        launches = "one launch" if newest.number == 1 else f"launches 1 to {newest.number}"
        raise RunNotFound(f"run `{run_id}` has no launch {number}: it has {launches}", reason="launch")
    return newest if number == newest.number else _decided(store, run_id, number)


def launch_of(store: Store, run_id: str, handle: RunHandle) -> Launch:
    """The launch with this handle; the newest one if the store knows no launch of this handle."""
    newest = newest_launch(store, run_id)
    earlier = (_decided(store, run_id, number) for number in range(newest.number - 1, 0, -1))
    known = (launch for launch in earlier if intended_handle(store, run_id, launch.number) == handle)
    return newest if newest.handle == handle else next(known, newest)


def record_intent(
    store: Store,
    run_id: str,
    request: Mapping[str, Any],
    handle: RunHandle | None,
    *,
    launch: int = 1,
    hourly_usd: float | None = None,
    part_usd: Sequence[float | None] = (),
) -> bool:
    """Record that this request is about to be sent, the handle it leads to, and the price of a replica, if known: of
    the run and, if it has parts, of each part.

    False if another launcher recorded the same request before; `Conflict` if it recorded another one.
    """
    intent = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "at": time.time(),
        "request_sha256": _digest(request),
        **({"handle": str(handle)} if handle is not None else {}),
        **({"hourly_usd": hourly_usd} if hourly_usd is not None else {}),
        **({"part_usd": list(part_usd)} if part_usd else {}),
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


def record_undone(store: Store, run_id: str, why: str, *, launch: int = 1, is_refused: bool = False) -> Launch:
    """Record that the launch is undone, and whether its launcher has surely created nothing.

    Returns what is recorded, which another launcher may have decided."""
    return _decide(store, run_id, launch, {"undone": why, **({"refused": True} if is_refused else {})})


def handle_to_stop(store: Store, run_id: str, launch: int) -> RunHandle | None:
    """The handle of what an undone launch may have left; None if no launcher has created anything for it."""
    if _decided(store, run_id, launch).is_refused and not _is_there(store, RunKeys(run_id, launch).joined()):
        return None
    return intended_handle(store, run_id, launch)


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
    return Launch(number, _handle(record), record.get("undone"), is_refused=record.get("refused") is True)


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
    is_abandoned: bool = False
    """Whether replicas may still run, because the backend could not be asked to stop them."""


def record_cancel(store: Store, run_id: str, cancel: Cancel, *, launch: int = 1) -> None:
    """Record the cancellation and its reason, which the backend does not keep.

    The first record counts, except that the stop of a run and its abandonment replace each other.
    """
    key, record = RunKeys(run_id, launch).cancelled(), _encode({"at": time.time(), **cancel._asdict()})
    try:
        store.create(key, record)
    except KeyExists:
        found = read_cancel(store, run_id, launch=launch)
        if found is not None and found.is_abandoned != cancel.is_abandoned:
            store.put(key, record)


def read_cancel(store: Store, run_id: str, *, launch: int = 1) -> Cancel | None:
    """The record of the cancellation; None if the run was not cancelled."""
    try:
        found = _decode(store.get(RunKeys(run_id, launch).cancelled()))
    except KeyNotFound:
        return None
    why = found.get("why")
    is_abandoned = found.get("is_abandoned") is True
    return Cancel(why if isinstance(why, str) else ON_REQUEST, tuple(found.get("over", ())), is_abandoned)


def is_cancelled(store: Store, run_id: str, *, launch: int = 1) -> bool:
    """Whether a cancellation is recorded."""
    return _is_there(store, RunKeys(run_id, launch).cancelled())


class RankCancel(NamedTuple):
    """The record of the cancellation of one rank."""

    why: str = ON_REQUEST
    """The message of the replica."""
    was_over: bool = False
    """Whether the rank had ended before; then its state stays, and it is only not started again."""


def record_rank_cancel(store: Store, run_id: str, rank: int, cancel: RankCancel, *, launch: int = 1) -> None:
    """Record that this rank was cancelled, and not the others. The first record counts."""
    try:
        key = RunKeys(run_id, launch).cancelled_rank(rank)
        store.create(key, _encode({"at": time.time(), **cancel._asdict()}))
    except KeyExists:
        pass


def read_rank_cancels(store: Store, run_id: str, *, launch: int = 1) -> dict[int, RankCancel]:
    """The record of each rank that was cancelled alone."""
    run_keys = RunKeys(run_id, launch)
    found = {}
    for key in store.list(run_keys.cancelled_ranks_prefix()):
        record = _decode(store.get(key))
        why = record.get("why")
        cancel = RankCancel(why if isinstance(why, str) else ON_REQUEST, record.get("was_over") is True)
        found[run_keys.parse_cancelled_rank(key)] = cancel
    return found


def is_rank_cancelled(store: Store, run_id: str, rank: int, *, launch: int = 1) -> bool:
    """Whether the cancellation of this rank alone is recorded."""
    return _is_there(store, RunKeys(run_id, launch).cancelled_rank(rank))


def record_stop(store: Store, run_id: str, rank: int, *, launch: int = 1) -> None:
    """Ask the supervisor of this rank to stop it, on a machine that only the store reaches. It is not restarted."""
    try:
        store.create(RunKeys(run_id, launch).stop(rank), _encode({"at": time.time()}))
    except KeyExists:
        pass


def read_stops(store: Store, run_id: str, *, launch: int = 1) -> set[int]:
    """The ranks whose stop was requested through the store."""
    run_keys = RunKeys(run_id, launch)
    return {run_keys.parse_stop(key) for key in store.list(run_keys.stops_prefix())}


def is_stop_requested(store: Store, run_id: str, rank: int, *, launch: int = 1) -> bool:
    """Whether the stop of this rank was requested through the store."""
    return _is_there(store, RunKeys(run_id, launch).stop(rank))


def record_deleted(store: Store, run_id: str) -> None:
    """Record that the run is being deleted, so that no launcher starts or continues it."""
    store.put(RunKeys(run_id).deleted(), _encode({"at": time.time()}))


def is_deleted(store: Store, run_id: str) -> bool:
    """Whether it is recorded that the run is being deleted."""
    return _is_there(store, RunKeys(run_id).deleted())


def record_pruned(store: Store, run_id: str) -> None:
    """Record that all but the weights of the run is being deleted, so that no launch continues it."""
    try:
        store.create(RunKeys(run_id).pruned(), _encode({"at": time.time()}))
    except KeyExists:
        pass


def is_pruned(store: Store, run_id: str) -> bool:
    """Whether it is recorded that only the weights of the run are kept."""
    return _is_there(store, RunKeys(run_id).pruned())


class Claim(NamedTuple):
    """The record of a rank's first attempt. The container that creates it runs the rank, and no other one does."""

    job: str = ""
    """The id of the container's job; empty if the service does not tell it."""
    is_barred: bool = False
    """A cancel has created the record instead of a container, so that none runs the rank."""
    at: float | None = None
    """When it was created, by the clock of its creator."""


def read_claim(store: Store, run_id: str, rank: int, *, launch: int = 1) -> Claim:
    """The claim of a rank. `KeyNotFound` if there is none."""
    found = _decode(store.get(RunKeys(run_id, launch).start(rank, 0)))
    at = found.get("at")
    when = float(at) if isinstance(at, int | float) else None
    return Claim(str(found.get("job") or ""), found.get("barred") is True, when)


def bar_rank(store: Store, run_id: str, rank: int, *, launch: int = 1) -> bool:
    """Keep every container from running this rank. False if one has claimed it."""
    try:
        store.create(RunKeys(run_id, launch).start(rank, 0), _encode({"at": time.time(), "barred": True}))
    except KeyExists:
        return read_claim(store, run_id, rank, launch=launch).is_barred
    return True


def run_ids(store: Store) -> Iterator[str]:
    """The id of every run in the store."""
    for key in store.list(keys.index_prefix()):
        part = key.removeprefix(keys.index_prefix())
        yield bytes(store.get(key)).decode() if part.startswith("~") else part


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line for each file of the code that differs, by the digests of the files."""
    words = {True: "is new", False: "has changed"}
    lines = [f"code: `{name}` {words[name not in before]}" for name in now if before.get(name) != now[name]]
    return lines + [f"code: `{name}` is no longer used" for name in before if name not in now]


def _content_differences(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for each place where the content of two records differs; records of older runs have no files."""
    there, here = ({name: _plain(record.get(name)) for name in ("executor", "spec")} for record in (present, wanted))
    files = [_files(there), _files(here)]
    changed = [] if None in files else changed_files(files[0] or {}, files[1] or {})
    return [*_differences(there, here), *changed]


def _files(record: dict[str, Any]) -> dict[str, str] | None:
    """Take the digests of the files of the code out of a record; None if it has none."""
    try:
        return record["spec"]["task"]["code"].pop("files", None)  # type: ignore[no-any-return]
    except (LookupError, TypeError, AttributeError):
        return None


def _differences(present: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """One line for each place where the two records differ."""
    if isinstance(present, Mapping) and isinstance(wanted, Mapping):
        for name in sorted({*present, *wanted}):
            yield from _differences(present.get(name, _ABSENT), wanted.get(name, _ABSENT), f"{where}.{name}")
    elif not _is_same(present, wanted):
        yield f"{where.removeprefix('.spec').removeprefix('.')}: there {_shown(present)}, here {_shown(wanted)}"


def _is_same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal. In Python, `1 == True`; 60 and 60.0 seconds are the same time."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


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
