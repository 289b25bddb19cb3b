"""`atoll doctor`: check this machine, a backend and a store with harmless calls; each failed check has a hint."""

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
from atoll.cli.launch_options import complete_backend, pairs
from atoll.cli.output import Cell, Column, Output, Table, one_line
from atoll.cli.watch import store_hint
from atoll.context import RunContext, default_store, home
from atoll.errors import AtollError, BackendError, ConfigError, InvalidSpec, StoreError, UnknownName, Unsupported
from atoll.executors.base import Check, Diagnoser, PermissionLister
from atoll.runs import config
from atoll.runs.config import Config
from atoll.runs.parts import backend_names
from atoll.spec import Placement

_LEAST_PYTHON = (3, 11)
_COMPILERS = "`apt install gcc`, `dnf install gcc`, `xcode-select --install`"
_PACKAGES = ("click", "rich")
_ERRORS: dict[str, type[AtollError]] = {"machine": ConfigError, "backend": BackendError, "store": StoreError}


@dataclass(frozen=True)
class Finding:
    """A check, and what it is about: `machine`, `backend` or `store`."""

    kind: str
    check: Check


@command("Set up", short_help="Check this machine, a backend and a store; say how to fix what fails.")
@click.argument("backend", required=False, shell_complete=complete_backend)
@click.option("--store", metavar="URI", help="The store to check.  [default: the configured one]")
@click.option("--setting", multiple=True, metavar="NAME=VALUE", help="A setting of the backend.")
@click.option("--permissions", is_flag=True, help="Check nothing: print the permissions that a launcher needs.")
def doctor_command(
    out: Output, backend: str | None, store: str | None, setting: tuple[str, ...], permissions: bool
) -> None:
    """Check this machine, the BACKEND (or the configured one) and the store.

    Exit code 0 if all checks pass. Otherwise the first of these: 2 for this machine, its configuration, or an address
    or setting that is wrong, 3 for the backend, 4 for the store.
    """
    findings, settings = _machine_findings()
    names = backend_names(backend or (settings.get("on") if settings else "local"))
    for name in names:
        own = settings.executor_settings(name) if settings else {}
        own |= pairs(setting, "--setting", as_json=True)
        if permissions:
            _print_permissions(out, name, own)
            return
        findings += _backend_findings(name, own)
        if chosen_store := store or _configured_store(settings):
            findings += _reach_findings(name, own, chosen_store)
    findings += _store_findings(store or (settings.get("store") if settings else default_store()))
    out.data({"checks": [{"kind": f.kind, **asdict(f.check)} for f in findings]})
    out.text(_table_text(out, findings))
    _raise_for(findings)


def _print_permissions(out: Output, name: str, settings: Mapping[str, Any]) -> None:
    executor = registry.executor(name, **settings)
    if not isinstance(executor, PermissionLister):
        raise ConfigError(
            f"--permissions: backend `{name}` has no list of permissions",
            hint="its page in docs/ has one, if it needs any",
        )
    found = executor.permissions()
    out.data({"permissions": found.document})
    out.text(found.text)


def _table_text(out: Output, findings: list[Finding]) -> str:
    columns = (Column("check"), Column(""), Column("result", is_flexible=True))
    rows = tuple(
        (
            Cell(f"{f.kind} {f.check.name}"),
            Cell("ok", "good") if f.check.ok else Cell("FAILED", "bad"),
            Cell(one_line(f.check.message)),
        )
        for f in findings
    )
    lines = out.table_text(Table(columns, rows)).split("\n")
    shown = lines[:1]
    for line, finding in zip(lines[1:], findings, strict=True):
        shown.append(line)
        if finding.check.hint:
            shown.append(f"    {out.paint('hint:', 'busy')} {finding.check.hint}")
    return "\n".join(shown)


def _raise_for(findings: list[Finding]) -> None:
    failed = [finding for finding in findings if not finding.check.ok]
    for kind, error in _ERRORS.items():
        if any(("machine" if finding.check.is_input else finding.kind) == kind for finding in failed):
            names = ", ".join(f"{f.kind} {f.check.name}" for f in failed)
            raise error(
                f"{len(failed)} of {len(findings)} checks failed: {names}", hint="follow the hints in the table"
            )


def _machine_findings() -> tuple[list[Finding], Config | None]:
    """Check Python, packages, codecs, home folder and configuration; return the configuration too if it is valid."""
    configuration, settings = _configuration()
    checks = [_python(), _packages(), _codecs(), _home(), configuration]
    return [Finding("machine", check) for check in checks], settings


def _backend_findings(name: str, settings: Mapping[str, Any]) -> list[Finding]:
    """The checks of the backend itself. Raises `UnknownName` for a backend that does not exist."""
    try:
        executor = registry.executor(name, **settings)
    except UnknownName:
        raise
    except ConfigError as exc:
        message = "; ".join(exc.problems) if isinstance(exc, InvalidSpec) else exc.message
        return [Finding("backend", Check(name, False, message, exc.hint or "", is_input=True))]
    if not isinstance(executor, Diagnoser):
        return [Finding("backend", Check(name, True, "it loads; it has no checks of its own"))]
    try:
        checks = executor.diagnose()
    except AtollError as exc:
        checks = [Check(name, False, exc.message, exc.hint or "")]
    return [Finding("backend", check) for check in checks]


def _configured_store(settings: Config | None) -> str | None:
    """The store that the user has configured; None for the default, which only replicas on this machine see."""
    found = settings.settings.get("store") if settings else None
    return None if found is None or found.origin == "default" else str(found.value)


def _reach_findings(name: str, settings: Mapping[str, Any], uri: str) -> list[Finding]:
    """Why replicas on this backend could not open the store, as a plan would refuse it."""
    try:
        context = RunContext("doctor", registry.store_uri(uri))
        registry.executor(name, **settings).plan(context, Placement())
    except Unsupported as exc:
        found = [problem for problem in exc.problems if problem.startswith("store=")]
        return [Finding("store", Check(f"for {name}", False, problem, is_input=True)) for problem in found]
    except AtollError:  # another check reports it
        return []
    return []


def _store_findings(uri: str) -> list[Finding]:
    """Create (also concurrently), read, list and delete a few objects under a prefix of their own."""
    from atoll.stores.probe import probe

    try:
        opened = registry.open_store(uri)
        report = probe(opened)
    except AtollError as exc:
        is_input = isinstance(exc, ConfigError)
        return [Finding("store", Check("probe", False, exc.message, store_hint(exc), is_input=is_input))]
    return [Finding("store", Check("probe", True, f"{opened.uri}: {'; '.join(report.checks)}"))]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    least = ".".join(map(str, _LEAST_PYTHON))
    is_new = sys.version_info[:2] >= _LEAST_PYTHON
    return Check(
        "python", is_new, f"{version} at {sys.executable}", "" if is_new else f"install Python {least} or newer"
    )


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
    """Whether the codecs are compiled. Without it numpy computes the same bits, more slowly."""
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
        cost = "two to five times slower: numpy computes the same bits"
        return Check("codecs", True, f"not compiled, so {cost}; {exc}", _how_to_compile(exc))
    if wrong := [
        name for name in CODECS if isinstance(how := codec(name), BlockCodec) and not agrees_with_numpy(compiled, how)
    ]:
        return Check(
            "codecs", True, f"compiled, but numpy computes {', '.join(wrong)}: the compiled code gave different bits"
        )
    try:
        fused.load()
    except NotUsable as exc:
        cost = "sums and checksums are not, so they are slower: numpy computes the same bits"
        return Check("codecs", True, f"compiled; {cost}; {exc}", _how_to_compile(exc))
    return Check("codecs", True, "compiled, and so are sums and checksums")


def _how_to_compile(reason: Exception) -> str:
    """How to compile the codecs; empty if an installation would not help."""
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
    where = settings.file or "no atoll.toml in this folder; defaults and ATOLL_* variables apply"
    return Check("config", True, "; ".join([where, *settings.warnings])), settings
