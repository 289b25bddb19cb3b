"""Pure: the record of the ranks that wait for machines, the handle, and the line that a user pastes on each machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from atoll.context import WORLD_SIZE, RunContext
from atoll.errors import ConfigError
from atoll.executors.base import Capabilities, check
from atoll.handle import RunHandle
from atoll.replica.joined import JoinPart
from atoll.spec import Placement

EXECUTOR = "join"
CAPABILITIES = Capabilities(
    code=frozenset({"bundle", "image"}),
    images=False,
    resources=False,
    gpus=frozenset(),
    secret_schemes=frozenset({"env", "file"}),
    max_replicas=1024,
)
_OWN = {
    "image": "a machine that joins runs its own Python; leave it out",
    "gpu": "a machine that joins uses all GPUs that it has; leave it out",
    "cpus": "a machine that joins uses all that it has; leave it out",
    "memory_gib": "a machine that joins uses all that it has; leave it out",
}
_SCOPE = "machines"


def join_request(
    context: RunContext, placement: Placement, *, silent_s: float
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The request, every reason why it cannot run, and notes for the user."""
    environment = context.environment(placement.replicas)
    part = JoinPart(
        first_rank=context.first_rank,
        replicas=placement.replicas,
        world_size=int(environment[WORLD_SIZE]),
        environment={**environment, **placement.env},
        secrets=dict(placement.secrets),
        rank_env=placement.rank_env,
        timeout_s=placement.timeout_s,
        grace_s=placement.grace_s,
        max_restarts=placement.max_restarts,
        silent_s=silent_s,
    )
    run = {"run_id": context.run_id, "store": context.store_uri, "launch": context.launch}
    return {"run": run, "part": part.to_json()}, list(_problems(context, placement)), list(_notes(context, placement))


def join_line(context: RunContext) -> str:
    """The command that a user runs on each machine."""
    return f"atoll join {shlex.quote(context.run_id)} --store {shlex.quote(context.store_uri)}"


def run_handle(request: dict[str, Any]) -> RunHandle:
    """The handle of a request. It names the store, which has all that is known about the run."""
    run, part = request["run"], request["part"]
    native = f"{run['store'].rstrip('/')}/{run['launch']}/{run['run_id']}"
    return RunHandle(EXECUTOR, _SCOPE, native, part["replicas"], part["first_rank"])


def context_of(handle: RunHandle) -> RunContext:
    """The run of a handle: the inverse of `run_handle`."""
    store, launch, run_id = ["", "", "", *handle.native_id.rsplit("/", 2)][-3:]
    if not store or not launch.isdecimal() or not run_id or int(launch) < 1:
        raise ConfigError(f"`{handle}` is no handle of a run for machines that join: it names no store, launch and run")
    return RunContext(run_id, store, int(launch), handle.first_rank)


def _problems(context: RunContext, placement: Placement) -> Iterator[str]:
    for problem in check(placement, CAPABILITIES):
        head = problem.partition(": ")[0]
        rule = _OWN.get(head.partition("=")[0])
        yield problem if rule is None else f"{head}: {rule}"
    if context.store_uri.startswith("memory:"):
        yield f"store=`{context.store_uri}`: replicas are on other machines, which cannot see the memory of this one"


def _notes(context: RunContext, placement: Placement) -> Iterator[str]:
    machines = "one machine joins" if placement.replicas == 1 else f"each of {placement.replicas} machines joins"
    yield f"{machines} with `{join_line(context)}`"
    if context.store_uri.startswith("file:"):
        yield "the store is a folder: only machines that see it under the same path can join"
    if placement.secrets:
        yield "secrets are read on each machine that joins"
