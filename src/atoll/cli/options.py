"""Options that several commands share, and what their values look like."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from atoll import units
from atoll.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def duration(text: str) -> float:
    """`90`, `90s`, `15m`, `2h`, `1d` -> seconds."""
    try:
        return units.parse_duration(text)
    except ValueError as exc:
        raise click.BadParameter(f"`{text}`: {exc}.") from exc


def complete_run(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Run ids of the local index."""
    from atoll.runs.index import everything

    return [known.run_id for known in everything() if known.run_id.startswith(incomplete)]


def complete_backend(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from atoll.registry import known

    return [name for name in known("executor") if name.startswith(incomplete)]


run_argument = click.argument("run", shell_complete=complete_run)

store_option = click.option(
    "--store", metavar="URI", help="Where the run is kept; not needed for runs started on this machine."
)


def pairs(given: Sequence[str], option: str, *, as_json: bool = False) -> dict[str, Any]:
    """`("a=1", "b=x")` as a mapping; with `as_json`, values that are JSON are read as JSON, others are texts."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} {text}: write it as `{option} NAME=VALUE`")
        if name in found:
            raise ConfigError(f"{option} {name} is given twice: which one is it?")
        found[name] = json_or_text(value) if as_json else value
    return found


def json_or_text(value: str) -> Any:
    """`3`, `1e-3`, `true`, `[1, 2]`, `"3"` as JSON; anything else is the text itself."""
    try:
        return json.loads(value, parse_constant=_not_a_constant)
    except ValueError:
        return value


def _not_a_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
