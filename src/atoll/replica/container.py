"""One replica in a container: its context from variables or flags, a spool of its own, and a plan for the shepherd.

An image's own command line may start it without Atoll's variables:

    python -m atoll.replica --rendezvous s3://bucket/exp --world-size 4 \\
        --trainer-module train --trainer-fn main --trainer-kwargs-json '{"lr": 0.1}'

The rank is always taken from the environment. The first replica to arrive writes `run.json` from the flags; the
others must bring the same. A service may restart a container with the very same variables, so each one takes the next
free attempt of its rank in the store.
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

from atoll.context import ATTEMPT, GRACE, LABEL, RANK, RENDEZVOUS, RUN_ID, STORE, TIMEOUT, WORLD_SIZE, ReplicaContext
from atoll.errors import AtollError, ConfigError, KeyExists
from atoll.keys import RunKeys
from atoll.replica.spool import Spool, write_json
from atoll.spec import DAY_S, Code, RunSpec

_RANK_VARIABLES = (RANK, "JOB_COMPLETION_INDEX", "RANK")


def prepare(argv: list[str], environ: MutableMapping[str, str]) -> Spool:
    """Settle the environment, write the plan, and return the spool the shepherd works in."""
    flags = _parse(argv)
    _settle(environ, flags)
    context = ReplicaContext.from_environment(environ)
    environ[ATTEMPT] = str(apart(lambda: _register(flags, context)))
    context = ReplicaContext.from_environment(environ)
    spool = Spool(tempfile.mkdtemp(prefix="atoll-"))
    environ[LABEL] = str(spool.root)
    write_json(spool.plan, container_plan(context, str(spool.root), environ))
    return spool


def container_plan(context: ReplicaContext, label: str, environ: MutableMapping[str, str]) -> dict[str, Any]:
    """The shepherd's plan for this one rank. Restarts are the backend's business."""
    return {
        "label": label,
        "run_id": context.run_id,
        "store": context.store_uri,
        "ranks": [context.rank],
        "rank_environment": {str(context.rank): {RANK: str(context.rank)}},
        "timeout_s": float(environ.get(TIMEOUT, DAY_S * 30)),
        "grace_s": float(environ.get(GRACE, 10.0)),
        "max_restarts": 0,
        "first_attempt": context.attempt,
        "echo": True,
    }


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m atoll.replica", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rendezvous", metavar="URI", help="the store where replicas meet")
    parser.add_argument("--world-size", type=int, help="how many replicas there are")
    parser.add_argument("--run-id", help="defaults to a name derived from the rendezvous and the trainer")
    parser.add_argument("--trainer-module", help="module with the entry point")
    parser.add_argument("--trainer-fn", help="function to call")
    parser.add_argument("--trainer-kwargs-json", default="{}", help="its arguments, as a JSON object")
    return parser.parse_args(argv)


def _settle(environ: MutableMapping[str, str], flags: argparse.Namespace) -> None:
    """Flags fill in what variables do not say; where both speak they must agree."""
    if (flags.trainer_module is None) != (flags.trainer_fn is None):
        raise ConfigError("--trainer-module and --trainer-fn go together")
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


def apart(work: Callable[[], int]) -> int:
    """Do it in a child and return its answer. Store clients have threads, and the shepherd must stay fit to fork."""
    answer, told = os.pipe()
    if os.fork() == 0:
        try:
            said: dict[str, Any] = {"answer": work()}
        except AtollError as exc:
            said = {"message": f"{exc.code}: {exc.message}", "hint": exc.hint, "exit_code": exc.exit_code}
        except BaseException as exc:  # noqa: BLE001  told to the parent, which raises it
            said = {"message": f"{type(exc).__name__}: {exc}", "hint": None, "exit_code": 70}
        os.write(told, json.dumps(said)[:4000].encode())
        os._exit(0)
    os.close(told)
    with open(answer, "rb") as pipe:
        said = json.loads(pipe.read() or b'{"message": "the process died", "hint": null, "exit_code": 70}')
    os.wait()
    if "answer" in said:
        return int(said["answer"])
    error = AtollError(said["message"], hint=said["hint"])
    error.exit_code = said["exit_code"]
    raise error


def _register(flags: argparse.Namespace, context: ReplicaContext) -> int:
    """Record the run if we were told what it is, and take the next free attempt of our rank."""
    if flags.trainer_module is not None:
        _record(flags, context)
    keys = RunKeys(context.run_id)
    for attempt in itertools.count(context.attempt):
        try:
            record = {"host": os.uname().nodename, "at": time.time()}
            context.store.create(keys.start(context.rank, attempt), json.dumps(record).encode())
        except KeyExists:
            continue
        return attempt
    raise AssertionError("counting never ends")


def _record(flags: argparse.Namespace, context: ReplicaContext) -> None:
    """Write `run.json` from the flags, or check that whoever came first brought the same."""
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
