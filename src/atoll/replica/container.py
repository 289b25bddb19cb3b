"""One replica in a container: its context from variables or flags, a spool of its own, and a plan for the shepherd.

An image's own command line may start it without Atoll's variables:

    python -m atoll.replica --rendezvous s3://bucket/exp --world-size 4 \\
        --trainer-module train --trainer-fn main --trainer-kwargs-json '{"lr": 0.1}'

The rank is always taken from the environment. The first replica to arrive writes `run.json` from the flags; the
others must bring the same.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import MutableMapping
from typing import Any

from atoll.context import LABEL, RANK, RENDEZVOUS, RUN_ID, STORE, WORLD_SIZE, ReplicaContext
from atoll.errors import ConfigError
from atoll.replica.spool import Spool, write_json
from atoll.spec import DAY_S, Code, RunSpec

TIMEOUT, GRACE = "ATOLL_TIMEOUT_S", "ATOLL_GRACE_S"
_RANK_VARIABLES = (RANK, "JOB_COMPLETION_INDEX", "RANK")


def prepare(argv: list[str], environ: MutableMapping[str, str]) -> Spool:
    """Settle the environment, write the plan, and return the spool the shepherd works in."""
    flags = _parse(argv)
    _settle(environ, flags)
    context = ReplicaContext.from_environment(environ)
    if flags.trainer_module is not None:
        _record(flags, context)
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
