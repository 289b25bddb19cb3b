"""`atoll doctor ssh`: checks whether a launch from this machine would work. Each check only reads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from atoll._threads import map_in_background
from atoll.errors import AtollError
from atoll.executors.base import Check
from atoll.executors.ssh.connection import Hosts
from atoll.executors.ssh.hosts import Host, parsed
from atoll.executors.ssh.protocol import PROTOCOL, versions_problem
from atoll.executors.ssh.settings import SshSettings
from atoll.validation import settings_hint

_AT_ONCE = 16


def setup_checks(settings: SshSettings, hosts: Hosts) -> list[Check]:
    """The program `ssh`; then for each host the login, Atoll there, and what the local executor there reports."""
    program = shutil.which("ssh")
    if program is None:
        return [Check("ssh", False, "this machine has no program `ssh`", "install OpenSSH's client")]
    found = [Check("ssh", True, program)]
    listed = [host for address in settings.hosts if (host := parsed(address)) is not None]
    if not listed:
        return [*found, Check("hosts", False, "hosts is not set", settings_hint("ssh"), is_input=True)]
    return [*found, *(c for each in map_in_background(lambda h: [*_of(h, hosts)], listed, most=_AT_ONCE) for c in each)]


def _of(host: Host, hosts: Hosts) -> Iterator[Check]:
    try:
        answer = hosts.call(host, "diagnose", "", {})
    except AtollError as exc:
        yield Check(str(host), False, exc.message, exc.hint or "", is_input=exc.exit_code == 2)
        return
    if problem := versions_problem(str(host), {"protocol": PROTOCOL, **answer}, is_start=True):
        yield Check(str(host), False, problem.message, problem.hint or "")
        return
    yield Check(str(host), True, f"{answer['host']}, Atoll {answer['atoll']}, {answer['python']}")
    for name, is_ok, message, hint in answer["checks"]:
        yield Check(f"{host}: {name}", bool(is_ok), str(message), str(hint))
