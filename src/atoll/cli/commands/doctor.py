"""`atoll doctor`: would it work here? Each check proves something with a harmless call, and says what to do if not."""

from __future__ import annotations

from dataclasses import asdict

import click

from atoll.cli.app import command
from atoll.cli.checkup import Finding, backend_findings, machine_findings, store_findings
from atoll.cli.options import complete_backend
from atoll.cli.output import Output
from atoll.cli.text import Cell, Column, Table, one_line, table_text
from atoll.context import default_store
from atoll.errors import AtollError, BackendError, ConfigError, StoreError

_ERRORS: dict[str, type[AtollError]] = {"machine": ConfigError, "backend": BackendError, "store": StoreError}


@command("Set up", short_help="Check this machine, a backend and a store, with a hint for what fails.")
@click.argument("backend", required=False, shell_complete=complete_backend)
@click.option("--store", metavar="URI", help="The store to try.  [default: the configured one]")
def doctor_command(out: Output, backend: str | None, store: str | None) -> None:
    """Check this machine, the BACKEND (or the configured one) and the store.

    Exit code 0 if all is well, else that of the first kind of trouble: 2 this machine, its configuration, or an address
    or setting that has to change, 3 the backend, 4 the store.
    """
    findings, settings = machine_findings()
    name = backend or (settings.get("on") if settings else "local")
    own = settings.executor_settings(name) if settings else {}
    findings += backend_findings(name, own)
    findings += store_findings(store or (settings.get("store") if settings else default_store()))
    out.data({"checks": [{"kind": f.kind, **asdict(f.check)} for f in findings]})
    out.text(_table_text(out, findings))
    _raise_for(findings)


def _table_text(out: Output, findings: list[Finding]) -> str:
    columns = (Column("check"), Column(""), Column("found", is_flexible=True))
    rows = tuple(
        (
            Cell(f"{f.kind} {f.check.name}"),
            Cell("ok", "good") if f.check.ok else Cell("FAILED", "bad"),
            Cell(one_line(f.check.message)),
        )
        for f in findings
    )
    lines = table_text(Table(columns, rows), width=out.width(), colour=out.has_colour()).split("\n")
    shown = lines[:1]
    for line, finding in zip(lines[1:], findings, strict=True):
        shown.append(line)
        if finding.check.hint:
            shown.append(f"    {out.paint('hint:', 'busy')} {finding.check.hint}")
    return "\n".join(shown)


def _raise_for(findings: list[Finding]) -> None:
    failed = [finding for finding in findings if not finding.check.ok]
    for kind, error in _ERRORS.items():
        if any(("machine" if finding.is_input else finding.kind) == kind for finding in failed):
            names = ", ".join(f"{f.kind} {f.check.name}" for f in failed)
            raise error(f"{len(failed)} of {len(findings)} checks failed: {names}")
