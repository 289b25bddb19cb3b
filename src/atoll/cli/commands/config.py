"""`atoll config`: every setting and its origin."""

from __future__ import annotations

import json

import click

from atoll.cli.app import command
from atoll.cli.output import Cell, Column, Output, Table, table_text
from atoll.runs import config
from atoll.runs.config import FIELDS, Setting


@command("Set up", short_help="Show every setting and its origin.")
@click.option("--profile", metavar="NAME", help="Apply this [profiles.NAME] table.")
def config_command(out: Output, profile: str | None) -> None:
    """Show the settings that apply in this folder: defaults, then atoll.toml or [tool.atoll], then ATOLL_* variables.

    Options of `run` and `plan` override them.
    """
    settings = config.load(profile=profile)
    rows = tuple(
        (
            Cell(found.key, "bold"),
            Cell(_value_text(found)),
            Cell(found.origin, "dim" if found.origin == "default" else "busy"),
        )
        for found in settings.settings.values()
    )
    out.data(
        {
            "file": settings.file,
            "profile": settings.profile,
            "profiles": list(settings.profiles),
            "settings": {s.key: {"value": s.value, "origin": s.origin} for s in settings.settings.values()},
            "warnings": list(settings.warnings),
        }
    )
    for warning in settings.warnings:
        out.say(f"warning: {warning}")
    columns = (Column("key"), Column("value", is_flexible=True), Column("origin"))
    out.text(table_text(Table(columns, rows), width=out.width(), colour=out.has_colour()))


def _value_text(found: Setting) -> str:
    if found.value is None:
        return ""
    if found.key in FIELDS:
        return FIELDS[found.key].show(found.value)
    return found.value if isinstance(found.value, str) else json.dumps(found.value, default=str)
