"""`atoll estimate`: compute the time and the cost of rounds, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import click

from atoll import units
from atoll.cli.app import command
from atoll.cli.launch_options import duration
from atoll.cli.output import Cell, Column, Output, Table, pairs_text, table_text
from atoll.cli.phases import seconds_text
from atoll.reports.estimate import AS_OF, SERVICES, Estimate, Throughput
from atoll.rounds.codecs import DEFAULT_CODEC

_MODES = {"whole": "each replica downloads every update", "scatter": "scatter-reduce"}


def _parsed(parse: Callable[[str], float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            return parse(text)
        except ValueError as exc:
            raise click.BadParameter(f"`{text}`: {exc}.") from exc

    return convert


@command("Start", short_help="Estimate the time and cost of rounds: bytes, requests, seconds, dollars.")
@click.option("--params", type=_parsed(units.parse_count), required=True, metavar="N", help="Parameters: 350M, 8B.")
@click.option("-n", "--replicas", type=int, required=True, metavar="N", help="How many replicas, 2 to 1024.")
@click.option("--inner-steps", type=int, default=100, metavar="N", show_default=True, help="Steps between rounds.")
@click.option(
    "--step-time", type=duration, default="1s", metavar="TIME", show_default=True, help="Time of one inner step."
)
@click.option(
    "--bandwidth", type=_parsed(units.parse_rate), default="25Gbit", metavar="RATE", show_default=True,
    help="Bandwidth of each replica in each direction: 25Gbit, 400MB/s.",
)  # fmt: skip
@click.option("--codec", default=DEFAULT_CODEC, metavar="NAME", show_default=True, help="Codec of updates.")
@click.option("--mean-codec", metavar="NAME", help="Codec of means.  [default: as updates; int8 for int4]")
@click.option(
    "--latency", type=duration, default="100ms", metavar="TIME", show_default=True, help="Time of a small request."
)
@click.option(
    "--chunk", type=_parsed(units.parse_size), metavar="SIZE", help="Float32 bytes in a chunk, such as 64MiB."
)
@click.option(
    "--mode",
    default="auto",
    metavar="MODE",
    show_default=True,
    help="auto, whole (whole updates) or scatter (scatter-reduce).",
)
@click.option(
    "--connections", type=int, metavar="N", help="Connections of each replica.  [default: as many as fill the network]"
)
@click.option("--fragments", type=int, default=1, metavar="N", show_default=True, help="Streaming: parts of the model.")
@click.option(
    "--delay", type=int, default=0, metavar="N", show_default=True, help="Streaming: inner steps during an exchange."
)
def estimate_command(out: Output, chunk: float | None, **asked: Any) -> None:
    """Estimate a round with these settings: bytes and requests of each replica, seconds, the share of time that
    training waits for the exchange, and dollars for all replicas with S3, GCS and Azure.

    The estimate is a model: it includes the network and the latency of the store, not encoding and not slow machines.
    Nothing is started and no request is sent.
    """
    from atoll.reports.estimate import Setting, estimate

    renamed = {"step_time": "step_time_s", "bandwidth": "bandwidth_bytes_s", "latency": "latency_s"}
    given = {renamed.get(name, name): value for name, value in asked.items()}
    made = estimate(Setting(**given, chunk=None if chunk is None else int(chunk) // 4))
    out.data(made.to_json())
    out.text(_estimate_text(made, colour=out.has_colour()))
    for note in made.notes:
        out.say(f"{out.paint('note:', 'warn', on_stderr=True)} {note}")


def _estimate_text(made: Estimate, *, colour: bool = False) -> str:
    """The settings, a round of one replica, and the cost for all replicas."""
    dollars = table_text(_dollars(made), colour=colour, indent="  ")
    return (
        f"{_question(made)}\n\n{pairs_text(_facts(made), colour=colour)}\n\n{dollars}\n\n"
        f"  requests of all replicas, prices of {AS_OF}; transfer within the region is free, storage is not included"
    )


def _question(made: Estimate) -> str:
    asked = made.setting
    codecs = asked.codec + (f" (means: {asked.means})" if asked.means != asked.codec else "")
    params = _count(asked.params).replace(" G", "B").replace(" ", "")
    link = f"{_count(asked.effective_bytes_s * 8)}bit/s and {seconds_text(asked.latency_s)} to the store"
    steps = f"{asked.inner_steps} inner steps of {seconds_text(asked.step_time_s)}"
    return f"{params} parameters as {codecs}, {asked.replicas} replicas with {link}, {steps}"


def _facts(made: Estimate) -> list[tuple[str, str | Cell]]:
    asked, exchange = made.setting, made.exchange
    part = "update" if asked.fragments == 1 else f"1 of {asked.fragments} fragments"
    puts, gets = exchange.bulk_puts + exchange.record_puts, exchange.bulk_gets + exchange.record_gets
    facts: list[tuple[str, str | Cell]] = [
        ("a round", f"after {seconds_text(made.blocking.compute_s)} of inner steps; {_MODES[exchange.mode]}"),
        (part, f"{units.size_text(exchange.update_bytes)} in {exchange.chunks} chunks"),
        ("each replica", f"{units.size_text(exchange.bytes_up)} up, {units.size_text(exchange.bytes_down)} down"),
        ("", f"{puts:.0f} PUT, {gets:.0f} GET, {ceil(exchange.record_lists)} LIST"),
        ("exchange", f"{seconds_text(exchange.pipelined_s)}; {seconds_text(exchange.phased_s)} without overlap"),
        ("blocking", _exposed(made.blocking)),
    ]  # fmt: skip
    if asked.fragments > 1 or asked.delay:
        facts.append(("streaming", _exposed(made.pace) + f", {100 * made.pace.hidden_share:.0f} % hidden"))
    elif made.blocking.exposed_share > 0.05 and asked.step_time_s > 0:
        steps = ceil(made.blocking.exposed_s / asked.step_time_s)
        if steps <= asked.inner_steps:
            facts.append(("to hide it", f"use streaming with a delay of {steps} steps"))
    return facts


def _exposed(pace: Throughput) -> str:
    return f"{100 * pace.exposed_share:.1f} % of the time exposed ({seconds_text(pace.exposed_s)} a round)"


def _dollars(made: Estimate) -> Table:
    columns = (Column("store"), Column("$ a round", is_right=True), Column("$ an hour", is_right=True))
    rows = tuple((Cell(p.name, "bold"), *(Cell(_dollar_text(amount)) for amount in made.dollars(p))) for p in SERVICES)
    return Table(columns, rows)


def _dollar_text(amount: float) -> str:
    return f"{amount:.2f}" if amount >= 10 else f"{amount:.3f}" if amount >= 0.01 else f"{amount:.2g}"


def _count(value: float) -> str:
    """Such as `350 M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "
