"""`atoll doctor`: would it work here? Each check proves something with a harmless call, and says what to do if not.

The findings of `atoll doctor`: about this machine, a backend, a store.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from shutil import which
from typing import Any

import click

from atoll import __version__, registry
from atoll.cli.app import command
from atoll.cli.launch_options import complete_backend
from atoll.cli.output import Cell, Column, Output, Table, one_line, table_text
from atoll.cli.watch import store_hint
from atoll.context import default_store, home
from atoll.errors import AtollError, BackendError, ConfigError, StoreError, UnknownName
from atoll.executors.base import Check, Diagnoser
from atoll.runs import config
from atoll.runs.config import Config

_LEAST_PYTHON = (3, 11)
_COMPILERS = "`apt install gcc`, `dnf install gcc`, `xcode-select --install`"
_PACKAGES = ("click", "rich")


@dataclass(frozen=True)
class Finding:
    """A check, and what it is about: `machine`, `backend` or `store`."""

    kind: str
    check: Check
    is_input: bool = False
    """What failed was not tried: the words for it have to change, as they would for `run`."""


def machine_findings() -> tuple[list[Finding], Config | None]:
    """Python, packages, codecs, home folder, configuration; and the configuration if it could be read."""
    configuration, settings = _configuration()
    checks = [_python(), _packages(), _codecs(), _home(), configuration]
    return [Finding("machine", check) for check in checks], settings


def backend_findings(name: str, settings: Mapping[str, Any]) -> list[Finding]:
    """What the backend says about itself. A name that does not exist is the caller's mistake, not a finding."""
    try:
        executor = registry.executor(name, **settings)
    except UnknownName:
        raise
    except ConfigError as exc:
        return [Finding("backend", Check(name, False, exc.message, exc.hint or ""), is_input=True)]
    if not isinstance(executor, Diagnoser):
        return [Finding("backend", Check(name, True, "loads; it has no checks of its own"))]
    try:
        checks = executor.diagnose()
    except AtollError as exc:
        checks = [Check(name, False, exc.message, exc.hint or "")]
    return [Finding("backend", check) for check in checks]


def store_findings(uri: str) -> list[Finding]:
    """Create, race, read, list and delete a few objects in a corner of the store; nothing is left behind."""
    from atoll.stores.probe import probe

    try:
        opened = registry.open_store(uri)
        report = probe(opened)
    except AtollError as exc:
        return [Finding("store", Check("probe", False, exc.message, store_hint(exc)), isinstance(exc, ConfigError))]
    return [Finding("store", Check("probe", True, f"{opened.uri}: {'; '.join(report.checks)}"))]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    least = ".".join(map(str, _LEAST_PYTHON))
    is_new = sys.version_info[:2] >= _LEAST_PYTHON
    return Check("python", is_new, f"{version} at {sys.executable}", "" if is_new else f"Python {least} or newer")


def _packages() -> Check:
    from importlib.metadata import PackageNotFoundError, version

    found, missing = [f"atoll {__version__}"], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    hint = f"pip install {' '.join(missing)}" if missing else ""
    return Check("packages", not missing, ", ".join([*found, *(f"{name} is missing" for name in missing)]), hint)


def _codecs() -> Check:
    """Who computes what codecs need. Whoever it is, it works; the question is how fast."""
    if find_spec("numpy") is None or find_spec("xxhash") is None:
        return Check("codecs", True, "numpy and xxhash are not installed; only training and its tools need them")
    from atoll.kernels import fused, native
    from atoll.kernels.native import NotUsable
    from atoll.rounds.codecs import CODECS
    from atoll.rounds.codecs.base import codec
    from atoll.rounds.codecs.blocks import BlockCodec, agrees_with_numpy

    try:
        compiled = native.load()
    except NotUsable as exc:
        cost = "two to five times as slow: numpy does the work, to the same bits"
        return Check("codecs", True, f"not compiled, so {cost}; {exc}", _how_to_compile(exc))
    if wrong := [
        name for name in CODECS if isinstance(how := codec(name), BlockCodec) and not agrees_with_numpy(compiled, how)
    ]:
        return Check(
            "codecs", True, f"compiled, but numpy computes {', '.join(wrong)}: the compiled code gives other bits"
        )
    try:
        fused.load()
    except NotUsable as exc:
        cost = "sums and checksums are not, so slower: numpy does the work, to the same bits"
        return Check("codecs", True, f"compiled; {cost}; {exc}", _how_to_compile(exc))
    return Check("codecs", True, "compiled, and so are sums and checksums")


def _how_to_compile(reason: Exception) -> str:
    """What to install; nothing if that would not change it."""
    from atoll.kernels.native import NotBuilt
    from atoll.registry import reinstall_command

    if not isinstance(reason, NotBuilt):
        return ""
    compiler = (os.environ.get("CC") or "cc").split()[0]
    first = "" if which(compiler) else f"install a C compiler ({_COMPILERS}), then "
    return f"to compile them, {first}run `{reinstall_command()}`"


def _home() -> Check:
    folder = home()
    probe = folder / f".probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as exc:
        return Check("home", False, f"{folder}: {exc.strerror}", "set ATOLL_HOME to a folder you can write to")
    return Check("home", True, str(folder))


def _configuration() -> tuple[Check, Config | None]:
    try:
        settings = config.load()
    except ConfigError as exc:
        return Check("config", False, " ".join(exc.message.split()), "`atoll config` shows each problem"), None
    where = settings.file or "no atoll.toml here; defaults and ATOLL_* variables"
    return Check("config", True, "; ".join([where, *settings.warnings])), settings


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
