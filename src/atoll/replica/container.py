"""Prepare one replica in a container: read its context, register its attempt, and write the supervisor's plan.

An image's own command line may start a replica without Atoll's variables:

    python -m atoll.replica --rendezvous s3://bucket/exp --world-size 4 \\
        --trainer-module train --trainer-fn main --trainer-kwargs-json '{"lr": 0.1}'

The rank always comes from the environment. The first replica writes `run.json` from the flags; the flags of the others
must say the same.

A service may restart a container with the same variables, so each start takes the next free attempt of its rank in the
store, and the uploader records the attempts that the supervisor starts by itself. Attempts count from 0 over all
containers of a rank, so `ATOLL_MAX_RESTARTS` limits them together: a container that takes attempt 2 of at most 3
restarts has one restart left, whether a failure or a lost machine ended the attempts before.
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
    GRACE,
    LABEL,
    MAX_RESTARTS,
    RANK,
    RENDEZVOUS,
    RUN_ID,
    STORE,
    TIMEOUT,
    WORLD_SIZE,
    ReplicaContext,
)
from atoll.errors import AtollError, ConfigError, KeyExists
from atoll.keys import RunKeys
from atoll.replica.spool import Spool, write_json
from atoll.spec import DAY_S, Code, RunSpec

_RANK_VARIABLES = (RANK, "JOB_COMPLETION_INDEX", "RANK")


def prepare(argv: list[str], environ: MutableMapping[str, str]) -> Spool:
    """Complete the environment, write the plan, and return the spool for the supervisor."""
    flags = _parse(argv)
    max_restarts = _max_restarts(environ)
    _merge_flags(environ, flags)
    context = ReplicaContext.from_environment(environ)
    environ[ATTEMPT] = str(in_child_process(lambda: _register(flags, context)))
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
        "echo": True,
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
    parser.add_argument("--trainer-fn", help="function to call")
    parser.add_argument("--trainer-kwargs-json", default="{}", help="its arguments, as a JSON object")
    return parser.parse_args(argv)


def _merge_flags(environ: MutableMapping[str, str], flags: argparse.Namespace) -> None:
    """Set variables from flags. A value given by both must be the same."""
    if (flags.trainer_module is None) != (flags.trainer_fn is None):
        raise ConfigError("--trainer-module and --trainer-fn must be given together")
    rank = next((environ[name] for name in _RANK_VARIABLES if environ.get(name)), None)
    if rank is not None:
        environ.setdefault(RANK, rank)
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


def in_child_process(task: Callable[[], int]) -> int:
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
        return int(report["result"])
    error = AtollError(report["message"], hint=report["hint"])
    error.exit_code = report["exit_code"]
    raise error


def _register(flags: argparse.Namespace, context: ReplicaContext) -> int:
    """Write `run.json` if flags name the entry point, and take the next free attempt of this rank."""
    if flags.trainer_module is not None:
        _write_run(flags, context)
    keys = RunKeys(context.run_id, context.launch)
    for attempt in itertools.count(context.attempt):
        try:
            record = {"host": os.uname().nodename, "at": time.time()}
            context.store.create(keys.start(context.rank, attempt), json.dumps(record).encode())
        except KeyExists:
            continue
        return attempt
    raise AssertionError("unreachable: itertools.count does not end")


def _write_run(flags: argparse.Namespace, context: ReplicaContext) -> None:
    """Write `run.json` from the flags, or check that the existing one is the same."""
    from atoll.journal import record_run

    try:
        args = json.loads(flags.trainer_kwargs_json)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"--trainer-kwargs-json is not JSON: {exc}") from exc
    entry = f"{flags.trainer_module}:{flags.trainer_fn}"
    spec = RunSpec.build(
        entry, run_id=context.run_id, args=args, code=Code.in_place(os.getcwd()), replicas=context.world_size
    )
    record_run(context.store, spec, executor="container")
