"""An estimate as text. Pure."""

from __future__ import annotations

from math import ceil

from atoll import units
from atoll.cli.phases import seconds_text
from atoll.cli.text import Cell, Column, Table, pairs_text, table_text
from atoll.reports.estimate import AS_OF, SERVICES, Estimate, Pace

_WAYS = {"whole": "everyone fetches every update", "scatter": "scatter-reduce"}


def estimate_text(made: Estimate, *, colour: bool = False) -> str:
    """What was asked, what a round is for one replica, and what it costs for all."""
    dollars = table_text(_dollars(made), colour=colour, indent="  ")
    return (
        f"{_question(made)}\n\n{pairs_text(_facts(made), colour=colour)}\n\n{dollars}\n\n"
        f"  requests of all replicas, prices of {AS_OF}; transfer within the region is free, storage is not counted"
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
        ("a round", f"every {seconds_text(made.blocking.compute_s)} of computing; {_WAYS[exchange.mode]}"),
        (part, f"{units.size_text(exchange.update_bytes)} in {exchange.chunks} chunks"),
        ("each replica", f"{units.size_text(exchange.bytes_up)} up, {units.size_text(exchange.bytes_down)} down"),
        ("", f"{puts:.0f} PUT, {gets:.0f} GET, {ceil(exchange.record_lists)} LIST"),
        ("exchange", f"{seconds_text(exchange.pipelined_s)}; {seconds_text(exchange.phased_s)} phase after phase"),
        ("blocking", _exposed(made.blocking)),
    ]  # fmt: skip
    if asked.fragments > 1 or asked.delay:
        facts.append(("streaming", _exposed(made.pace) + f", {100 * made.pace.hidden_share:.0f} % hidden"))
    elif made.blocking.exposed_share > 0.05 and asked.step_time_s > 0:
        steps = ceil(made.blocking.exposed_s / asked.step_time_s)
        if steps <= asked.inner_steps:
            facts.append(("to hide it", f"stream with a delay of {steps} steps"))
    return facts


def _exposed(pace: Pace) -> str:
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
