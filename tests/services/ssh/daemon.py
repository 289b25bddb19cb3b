"""A real `sshd` of this user on free ports of the loopback: own host keys, user keys and configuration in a folder.

One daemon listens on many ports. What a login finds depends on the port (`Match LocalPort`): a host of its own with its
own ATOLL_HOME, a host without Python, a host that refuses every key, and so on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.programs import listens, running, wait_until

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@dataclass(frozen=True)
class Login:
    """What a login at one port finds."""

    port: int
    variables: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    """Run in place of the requested command, which is then in SSH_ORIGINAL_COMMAND."""
    refuses: bool = False


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return path


def public_key(path: Path) -> str:
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


def configuration(logins: Sequence[Login], *, host_key: Path, user_key: Path, pid_file: Path) -> str:
    lines = [
        *(f"ListenAddress 127.0.0.1:{login.port}" for login in logins),
        f"HostKey {host_key}",
        f"PidFile {pid_file}",
        f"AuthorizedKeysFile {user_key}.pub",
        "StrictModes no",
        "UsePAM no",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PubkeyAuthentication yes",
        "AllowTcpForwarding no",
        "PrintMotd no",
        "KexAlgorithms curve25519-sha256",  # a tenth of the time of the default, which matters for many connections
        "LoginGraceTime 30",
        "MaxStartups 200",
        "MaxSessions 50",
        "LogLevel ERROR",
    ]
    for login in logins:
        lines.append(f"Match LocalPort {login.port}")
        if login.refuses:
            lines.append("    AuthorizedKeysFile none")
        if login.command:
            lines.append(f"    ForceCommand {login.command}")
        if login.variables:
            lines.append("    SetEnv " + " ".join(f'"{name}={value}"' for name, value in login.variables.items()))
    return "\n".join(lines) + "\n"


@contextmanager
def sshd(folder: Path, name: str, logins: Sequence[Login], *, host_key: Path, user_key: Path) -> Iterator[None]:
    """A daemon with these logins until the block ends."""
    config = folder / f"{name}.conf"
    config.write_text(configuration(logins, host_key=host_key, user_key=user_key, pid_file=folder / f"{name}.pid"))
    log = folder / f"{name}.log"
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants this empty folder if root starts it
    with running([SSHD, "-D", "-e", "-f", str(config)], log=log) as process:
        wait_until(lambda: listens(logins[-1].port), process, log)
        yield
