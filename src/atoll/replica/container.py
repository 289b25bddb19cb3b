"""Prepare one replica in a container: read its context, register its attempt, and write the supervisor's plan.

An image's own command line may start a replica without Atoll's variables:

    python -m atoll.replica --rendezvous s3://bucket/exp --world-size 4 \\
        --trainer-module train --trainer-fn main --trainer-kwargs-json '{"lr": 0.1}'

`python -m atoll.serverless.replica_entrypoint` is the same command, and `--trainer-fn` defaults to `train`. The rank
always comes from the environment. The first replica writes `run.json` from the flags; the flags of the others must say
the same.

A service may restart a container with the same variables, so each start takes the next free attempt of its rank in the
store, and the uploader records the attempts that the supervisor starts by itself. Attempts count from 0 over all
containers of a rank, so `ATOLL_MAX_RESTARTS` limits them together: a container that takes attempt 2 of at most 3
restarts has one restart left, whether a failure or a lost machine ended the attempts before. The same holds for
`ATOLL_TIMEOUT_S`: the time that earlier containers of the rank ran is subtracted, and the time between them is not.

Where a service may start a second container of a rank, `ATOLL_CLAIM` names the variable with the id of the container's
job: the container that creates the rank's first attempt has claimed the rank. A container of another job, or of a run
or rank that was cancelled or undone meanwhile, ends with exit code 75 and runs nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from atoll.context import (
    ATTEMPT,
    CLAIM,
    CLAIMED,
    GRACE,
    LABEL,
    MAX_RESTARTS,
    RANK,
    RENDEZVOUS,
    RUN_ID,
    STORE,
    STORE_STOPS,
    TIMEOUT,
    WORLD_SIZE,
    ReplicaContext,
    global_rank,
)
from atoll.errors import AtollError, ConfigError, KeyExists, KeyNotFound
from atoll.keys import RunKeys
from atoll.replica.spool import Spool, write_json
from atoll.spec import DAY_S, Code, RunSpec
from atoll.stores.base import Store

_TRAINER_FN = "train"
_RANK_VARIABLES = (RANK, "JOB_COMPLETION_INDEX", "RANK")


def prepare(argv: list[str], environ: MutableMapping[str, str]) -> Spool:
    """Complete the environment, write the plan, and return the spool for the supervisor."""
    flags = _parse(argv)
    max_restarts = _max_restarts(environ)
    _merge_flags(environ, flags)
    context = ReplicaContext.from_environment(environ)
    claim = environ.get(environ[CLAIM], "") if environ.get(CLAIM) else None
    registered = in_child_process(lambda: _register(flags, context, claim))
    environ[ATTEMPT] = str(registered["attempt"])
    context = ReplicaContext.from_environment(environ)
    spool = Spool(tempfile.mkdtemp(prefix="atoll-"))
    environ[LABEL] = str(spool.root)
    plan = {
        "label": str(spool.root),
        "run_id": context.run_id,
        "launch": context.launch,
        "store": context.store_uri,
        "ranks": [context.rank],
        "rank_environment": {str(context.rank): {RANK: str(context.rank)}},
        "timeout_s": float(environ.get(TIMEOUT, DAY_S * 30)),
        "grace_s": float(environ.get(GRACE, 10.0)),
        "max_restarts": max_restarts,
        "first_attempt": context.attempt,
        "used_s": registered["used_s"],
        "echo": True,
        "store_stops": environ.get(STORE_STOPS) == "1",
    }
    write_json(spool.plan, plan)
    return spool


def _max_restarts(environ: MutableMapping[str, str]) -> int:
    """The highest number of an attempt that a supervisor of this rank starts by itself."""
    given = environ.get(MAX_RESTARTS) or "0"
    if not given.isdecimal():
        raise ConfigError(f"{MAX_RESTARTS}={given!r} is not a whole number")
    return int(given)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m atoll.replica", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rendezvous", metavar="URI", help="the store that all replicas use")
    parser.add_argument("--world-size", type=int, help="number of replicas")
    parser.add_argument("--run-id", help="defaults to a name derived from the rendezvous and the trainer")
    parser.add_argument("--trainer-module", help="module with the entry point")
    parser.add_argument("--trainer-fn", help=f"function to call; defaults to `{_TRAINER_FN}`")
    parser.add_argument("--trainer-kwargs-json", default="{}", help="its arguments, as a JSON object")
    flags = parser.parse_args(argv)
    if flags.trainer_module is None and flags.trainer_fn is not None:
        raise ConfigError("--trainer-fn needs --trainer-module")
    flags.trainer_fn = flags.trainer_fn or _TRAINER_FN
    return flags


def _merge_flags(environ: MutableMapping[str, str], flags: argparse.Namespace) -> None:
    """Set variables from flags. A value given by both must be the same."""
    rank = next((environ[name] for name in _RANK_VARIABLES if environ.get(name)), None)
    if rank is not None:
        environ.setdefault(RANK, rank)
    global_rank(environ)
    given = {STORE: flags.rendezvous, WORLD_SIZE: flags.world_size, RUN_ID: flags.run_id}
    for name, value in given.items():
        if value is not None and environ.get(name, str(value)) != str(value):
            raise ConfigError(f"the command line says {value}, but {name} is {environ[name]}")
        if value is not None:
            environ[name] = str(value)
    if environ.get(STORE):
        environ.setdefault(RENDEZVOUS, environ[STORE])
    if not environ.get(RUN_ID) and flags.trainer_module is not None:
        environ[RUN_ID] = f"{flags.trainer_module}.{flags.trainer_fn}"


def in_child_process(task: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run the task in a forked child and return its result. Store clients have threads, and this process must fork."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        try:
            report: dict[str, Any] = {"result": task()}
        except AtollError as exc:
            report = {"message": f"{exc.code}: {exc.message}", "hint": exc.hint, "exit_code": exc.exit_code}
        except BaseException as exc:  # noqa: BLE001  the parent raises it
            report = {"message": f"{type(exc).__name__}: {exc}", "hint": None, "exit_code": 70}
        os.write(write_end, json.dumps(report)[:4000].encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        report = json.loads(pipe.read() or b'{"message": "the process died", "hint": null, "exit_code": 70}')
    os.wait()
    if "result" in report:
        return dict(report["result"])
    error = AtollError(report["message"], hint=report["hint"])
    error.exit_code = report["exit_code"]
    raise error


def _register(flags: argparse.Namespace, context: ReplicaContext, claim: str | None) -> dict[str, Any]:
    """Write `run.json` if flags name the entry point, and take the next free attempt of this rank.

    Returns the attempt, and how long the attempts before it ran. `claim` is the id of this container's job, empty if
    the service does not tell it, and None if any may run the rank.
    """
    if flags.trainer_module is not None:
        _write_run(flags, context)
    keys = RunKeys(context.run_id, context.launch)
    if claim is not None and (why := _why_over(context)):
        raise Superfluous(f"rank {context.rank} is not run: {why}")
    record = {"host": os.uname().nodename, "at": time.time(), **({"job": claim} if claim else {})}
    for attempt in itertools.count(context.attempt):
        try:
            context.store.create(keys.start(context.rank, attempt), json.dumps(record).encode())
        except KeyExists:
            if claim is not None and attempt == 0 and (why := _why_claimed(context, claim)):
                raise Superfluous(f"rank {context.rank} is not run: {why}") from None
            continue
        before = range(context.attempt, attempt)
        return {"attempt": attempt, "used_s": sum(ran_s(context.store, keys, context.rank, each) for each in before)}
    raise AssertionError("unreachable: itertools.count does not end")


def ran_s(store: Store, keys: RunKeys, rank: int, attempt: int) -> float:
    """How long an earlier attempt ran, up to its outcome or else its last heartbeat; 0 if it left neither.

    All three times were taken on the machine of that attempt, so that they can be subtracted.
    """
    started = _record(store, keys.start(rank, attempt)).get("at")
    outcome, beat = _record(store, keys.outcome(rank, attempt)), _record(store, keys.beat(rank))
    ended = outcome.get("ended_at") or (beat.get("beat_at") if beat.get("attempt") == attempt else None)
    has_both = all(isinstance(moment, int | float) for moment in (started, ended))
    return max(0.0, float(ended) - float(started)) if has_both else 0.0  # type: ignore[arg-type]


def _record(store: Store, key: str) -> dict[str, Any]:
    """A record of an earlier attempt; empty if there is none that can be read."""
    try:
        found = json.loads(bytes(store.get(key)))
    except (KeyNotFound, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Superfluous(AtollError):
    """This container must not run its rank."""

    exit_code = CLAIMED


def _why_claimed(context: ReplicaContext, job: str) -> str | None:
    """Why the claim of this rank keeps the job from running it; None if it is the job's own, from an earlier try."""
    from atoll import journal

    claim = journal.read_claim(context.store, context.run_id, context.rank, launch=context.launch)
    if claim.is_barred:
        return "it was cancelled"
    return None if job and claim.job == job else f"job `{claim.job or 'unknown'}` runs it"


def _why_over(context: ReplicaContext) -> str | None:
    """Why this rank must not start any more; None if it may."""
    from atoll import journal

    store, run_id, launch = context.store, context.run_id, context.launch
    if journal.is_cancelled(store, run_id, launch=launch):
        return "the run was cancelled"
    if journal.is_rank_cancelled(store, run_id, context.rank, launch=launch):
        return "it was cancelled"
    newest = journal.newest_launch(store, run_id)
    if newest.number > launch:
        return "a later launch of the run has begun"
    return "its launch was undone" if newest.undone is not None else None


def _write_run(flags: argparse.Namespace, context: ReplicaContext) -> None:
    """Write `run.json` from the flags, or check that the existing one is the same."""
    from atoll.journal import OTHER_LAUNCHER, record_run

    try:
        args = json.loads(flags.trainer_kwargs_json)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"--trainer-kwargs-json is not JSON: {exc}") from exc
    entry = f"{flags.trainer_module}:{flags.trainer_fn}"
    # The working folder of a container is its own affair: replicas in other folders belong to the same run.
    spec = RunSpec.build(entry, run_id=context.run_id, args=args, code=Code.image(), replicas=context.world_size)
    record_run(context.store, spec, executor=OTHER_LAUNCHER)
