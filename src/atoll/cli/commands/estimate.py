"""`atoll estimate`: what rounds will take and cost, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from atoll import units
from atoll.cli.app import command
from atoll.cli.options import duration
from atoll.cli.output import Output
from atoll.rounds.codecs import DEFAULT_CODEC


def _parsed(parse: Callable[[str], float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            return parse(text)
        except ValueError as exc:
            raise click.BadParameter(f"`{text}`: {exc}.") from exc

    return convert


@command("Start", short_help="Say what rounds would take and cost: bytes, requests, seconds, dollars.")
@click.option("--params", type=_parsed(units.count), required=True, metavar="N", help="Parameters: 350M, 8B.")
@click.option("-n", "--replicas", type=int, required=True, metavar="N", help="How many replicas, 2 to 1024.")
@click.option("--inner-steps", type=int, default=100, metavar="N", show_default=True, help="Steps between rounds.")
@click.option("--step-time", type=duration, default="1s", metavar="TIME", show_default=True, help="One inner step.")
@click.option(
    "--bandwidth", type=_parsed(units.rate), default="25Gbit", metavar="RATE", show_default=True,
    help="Of each replica, each way: 25Gbit, 400MB/s.",
)  # fmt: skip
@click.option("--codec", default=DEFAULT_CODEC, metavar="NAME", show_default=True, help="How updates travel.")
@click.option("--mean-codec", metavar="NAME", help="How means travel.  [default: as updates; int8 for int4]")
@click.option("--latency", type=duration, default="100ms", metavar="TIME", show_default=True, help="A small request.")
@click.option("--chunk", type=_parsed(units.amount), metavar="SIZE", help="Float32 bytes in a chunk, such as 64MiB.")
@click.option(
    "--mode",
    default="auto",
    metavar="MODE",
    show_default=True,
    help="auto, or force: whole updates, or scatter-reduce.",
)
@click.option("--connections", type=int, metavar="N", help="Of each replica.  [default: as many as fill the network]")
@click.option("--fragments", type=int, default=1, metavar="N", show_default=True, help="Streaming: parts of the model.")
@click.option("--delay", type=int, default=0, metavar="N", show_default=True, help="Streaming: steps meanwhile.")
def estimate_command(out: Output, chunk: float | None, **asked: Any) -> None:
    """Say what a round would take and cost with these settings: bytes and requests of each replica, seconds, the share
    of time that training stands still for it, and dollars for all replicas with S3, GCS and Azure.

    A model, not a measurement: the network and trips to the store are counted, encoding and slow machines are not.
    Nothing is started and nothing is asked.
    """
    from atoll.cli.estimating import estimate_text
    from atoll.reports.estimate import Setting, estimate

    renamed = {"step_time": "step_time_s", "bandwidth": "bandwidth_bytes_s", "latency": "latency_s"}
    given = {renamed.get(name, name): value for name, value in asked.items()}
    made = estimate(Setting(**given, chunk=None if chunk is None else int(chunk) // 4))
    out.data(made.to_json())
    out.text(estimate_text(made, colour=out.has_colour()))
    for note in made.notes:
        out.say(f"{out.paint('note:', 'warn', on_stderr=True)} {note}")
