"""`atoll join`: run one replica of a run on this machine, until it ends."""

from __future__ import annotations

import shlex

import click

from atoll.cli.app import Interrupted, command
from atoll.cli.launch_options import run_argument, store_option
from atoll.cli.output import Output
from atoll.cli.runs import find_place, suggesting
from atoll.errors import RunFailed
from atoll.result import ReplicaOutcome
from atoll.runs.join import Claimed, run_here
from atoll.status import Reason, ReplicaState


@command("Start", short_help="Run one replica of a run on this machine.")
@run_argument
@store_option
@click.option("--rank", type=click.IntRange(0), metavar="N", help="The rank to take.  [default: the next free one]")
def join_command(out: Output, run: str, store: str | None, rank: int | None) -> None:
    """Run one replica of RUN on this machine until it ends; its output is shown here.

    RUN was started with `--on join` and waits for machines. The replica appears in `status`, `top` and `logs` wherever
    the store can be read, and `atoll cancel` ends it. Ctrl-C, SIGTERM or a closed terminal ends it within its grace and
    frees the rank for another machine. Exit code 0 if the replica succeeded, 1 if it failed, was cancelled or left.
    """
    run_id, opened = find_place(run, store)
    claims: list[Claimed] = []

    def show(claimed: Claimed) -> None:
        claims.append(claimed)
        again = f", attempt {claimed.attempt}" if claimed.attempt else ""
        out.event("joined", _identity(claimed))
        out.say(f"joined run `{run_id}` as rank {claimed.rank} of {claimed.world_size}{again}; Ctrl-C leaves it")

    try:
        with suggesting(run, store):
            outcome = run_here(opened, run_id, rank=rank, echo=not out.is_json, on_claim=show)
    except KeyboardInterrupt:
        what = "nothing was joined"
        if claims:
            what = f"rank {claims[-1].rank} of run `{run_id}` is free for another machine"
        raise Interrupted(message=what) from None
    out.data({**_identity(claims[-1]), "outcome": outcome.to_json()})
    _raise_for(run_id, outcome)
    out.say(f"rank {outcome.rank} of run `{run_id}` succeeded", "good")


def _identity(claimed: Claimed) -> dict[str, object]:
    return {
        "run_id": claimed.run_id,
        "store": claimed.store,
        "rank": claimed.rank,
        "attempt": claimed.attempt,
        "world_size": claimed.world_size,
    }


def _raise_for(run_id: str, outcome: ReplicaOutcome) -> None:
    if outcome.state is ReplicaState.SUCCEEDED:
        return
    what = f"rank {outcome.rank} of run `{run_id}`"
    if outcome.reason is Reason.PREEMPTED:
        raise RunFailed(f"this machine left {what}: {outcome.message}", hint=f"`atoll status {shlex.quote(run_id)}`")
    ended = f"was {outcome.state}" if outcome.state is ReplicaState.CANCELLED else str(outcome.state)
    hint = f"`atoll logs {shlex.quote(run_id)} --rank {outcome.rank}` shows its output"
    raise RunFailed(f"{what} {ended}: {outcome.message}", hint=hint)
