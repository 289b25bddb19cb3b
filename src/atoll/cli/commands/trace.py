"""`atoll trace`: write the timeline of a run's rounds to a file for a trace viewer."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import click

from atoll import journal
from atoll.cli.app import command
from atoll.cli.launch_options import run_argument, store_option
from atoll.cli.output import Output, write
from atoll.cli.runs import find_place, have_all_ended, suggesting
from atoll.errors import ConfigError, RoundError, RunNotFound
from atoll.keys import RunKeys
from atoll.names import key_name
from atoll.reports.trace import chrome_trace, events_of, last_rounds
from atoll.rounds.metrics import round_events, round_records
from atoll.stores.base import Store


@command("Look", short_help="Write the timeline of a run's rounds for Perfetto or Chrome.")
@run_argument
@store_option
@click.option(
    "-o", "--out", "file", metavar="FILE", help="The file; - is stdout, *.gz is compressed.  [default: RUN.trace.json]"
)
@click.option("--last", type=click.IntRange(1), metavar="N", help="Only the last N rounds.")
def trace_command(out: Output, run: str, store: str | None, file: str | None, last: int | None) -> None:
    """Write when each rank computed, encoded, uploaded, waited, downloaded, reduced and applied, round by round.

    The file is in the Trace Event Format: open it in ui.perfetto.dev or chrome://tracing. Works after the run, and
    during the run without the current round. Ranks are aligned by their own clocks.
    Exit code 5 before the first round has ended, because there is nothing to write.
    """
    if file == "-" and out.is_json:
        raise ConfigError("--out - and --json both write to stdout", hint="give --out a file name")
    run_id, opened = find_place(run, store)
    launch = journal.newest_rounds(opened, run_id)
    records = round_records(opened, run_id, last=last, launch=launch)
    if not records:
        with suggesting(run, store):
            raise _no_timeline(opened, run_id)
    events = round_events(opened, run_id, launch=launch)
    if last is not None:
        records = last_rounds(records, last)
        events = events_of(records, events)
    made = chrome_trace(run_id, records, events)
    target = file or f"{key_name(run_id)}.trace.json"
    _save(json.dumps(made), target)
    ranks = sorted({record.rank for record in records})
    rounds = sorted({record.round_no for record in records})
    out.data(
        {
            "file": target,
            "ranks": ranks,
            "first_round": rounds[0],
            "last_round": rounds[-1],
            "events": len(made["traceEvents"]),
        }
    )
    if target != "-":
        out.text(target)
    out.say(f"rounds {rounds[0]} to {rounds[-1]} of {len(ranks)} ranks; open it in ui.perfetto.dev or chrome://tracing")


def _save(text: str, target: str) -> None:
    if target == "-":
        write(sys.stdout, text + "\n")
        return
    data = text.encode()
    try:
        Path(target).write_bytes(gzip.compress(data) if target.endswith(".gz") else data)
    except OSError as exc:
        raise ConfigError(f"cannot write `{target}`: {exc.strerror}", hint="choose another file with --out") from exc


def _no_timeline(store: Store, run_id: str) -> RunNotFound | RoundError:
    if next(iter(store.list(RunKeys(run_id).run_prefix)), None) is None:
        return RunNotFound(
            f"no run `{run_id}` in {store.uri}", hint=f"`atoll ps --store {store.uri}` lists the runs there"
        )
    if have_all_ended(store, run_id):
        return RoundError(
            f"run `{run_id}` has no timeline: it has ended, and its replicas recorded no round",
            hint="only training with `DiLoCo`, `LocalSGD` or another outer loop of Atoll has rounds",
            reason="no_rounds",
        )
    return RoundError(
        f"run `{run_id}` has no timeline: none of its rounds has ended, or it has no rounds",
        hint="try again later: a replica writes the record of a round when the next one begins, and when it ends",
        reason="no_round_yet",
    )
