"""`atoll backends`: the registered executors and stores, whether each one loads here, and what it supports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache

from atoll import registry
from atoll.cli.app import command
from atoll.cli.output import Cell, Column, Output, Table, one_line
from atoll.executors.base import Capabilities
from atoll.registry import install_command

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*;.*extra *== *['\"]([A-Za-z0-9._-]+)['\"]")


_STYLES = {"ready": "good", "not installed": "warn", "broken": "bad"}


@dataclass(frozen=True)
class Adapter:
    """A row of the registry, after an attempt to load it."""

    kind: str
    name: str
    path: str
    extra: str | None
    state: str
    """`ready`, `not installed` or `broken`."""
    problem: str = ""
    can: tuple[str, ...] = ()


@command("Set up", short_help="List backends and stores: what they support, what they need.")
def backends_command(out: Output) -> None:
    """List all executors and stores, built in or from other packages, and whether each one loads here."""
    found = _adapters()
    out.data({"adapters": [asdict(adapter) for adapter in found]})
    for kind in ("executor", "store"):
        rows = tuple(_row(adapter) for adapter in found if adapter.kind == kind)
        columns = (Column(kind), Column("state"), Column("extra"), Column("notes", is_flexible=True))
        table = Table(columns, rows).without_empty_columns()
        out.text(out.table_text(table) + ("\n" if kind == "executor" else ""))


def _row(adapter: Adapter) -> tuple[Cell, ...]:
    notes = adapter.problem or "; ".join(adapter.can)
    return (
        Cell(adapter.name, "bold"),
        Cell(adapter.state, _STYLES[adapter.state]),
        Cell(f"atoll[{adapter.extra}]" if adapter.extra else "", "dim"),
        Cell(one_line(notes)),
    )


def _adapters() -> list[Adapter]:
    """All registered executors and stores."""
    return [_loaded(kind, name, row) for kind in ("executor", "store") for name, row in registry.known(kind).items()]


def _abilities(capabilities: Capabilities) -> Iterator[str]:
    """The capabilities as short texts."""
    yield f"code: {', '.join(sorted(capabilities.code))}"
    if capabilities.images:
        yield "images"
    if capabilities.resources:
        yield "cpus and memory"
    if capabilities.gpus is not None:
        yield f"gpus: {', '.join(sorted(capabilities.gpus)) or 'none'}"
    if capabilities.secret_schemes:
        yield f"secrets: {', '.join(f'{scheme}:' for scheme in sorted(capabilities.secret_schemes))}"
    if capabilities.max_restarts is not None:
        yield f"at most {capabilities.max_restarts} restarts"
    if capabilities.max_replicas is not None:
        yield f"at most {capabilities.max_replicas} replicas"
    if capabilities.cancels_together:
        yield "all replicas of a run stop together"


def _loaded(kind: str, name: str, row: registry.Row) -> Adapter:
    try:
        adapter = registry.load(kind, name)
        can = tuple(_abilities(adapter.capabilities)) if kind == "executor" else ()
    except Exception as exc:  # noqa: BLE001  a plug-in that fails in any way is listed as broken
        problem = getattr(exc, "message", "") or f"{type(exc).__name__}: {exc}"
        return Adapter(kind, name, row.path, row.extra, "broken", problem)
    missing = [package for package in _packages_of(row.extra) if not _is_installed(package)]
    if missing:
        problem = f"not installed: {', '.join(missing)}; install with: {install_command(row.extra or '')}"
        return Adapter(kind, name, row.path, row.extra, "not installed", problem, can)
    return Adapter(kind, name, row.path, row.extra, "ready", can=can)


@cache
def _packages_of(extra: str | None) -> tuple[str, ...]:
    """The packages that an extra of Atoll requires, from the metadata of the installed package."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("atoll") or []
    except PackageNotFoundError:
        return ()
    found = (_REQUIREMENT.match(line) for line in lines)
    return tuple(match[1] for match in found if match and match[2] == extra)


def _is_installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
