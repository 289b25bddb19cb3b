"""The settings of `atoll run --on ssh`: their names, defaults and rules.

`validation.check_settings` reads the rules from the annotations before anything is sent. The annotations are not kept
as texts, which would be compiled again for each check.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from atoll.executors.ssh.hosts import RULE, parsed, repeated
from atoll.validation import Kind, a_list_of, a_table_of, between, is_text

OPTIONS = frozenset(
    {
        "AddressFamily",
        "BindAddress",
        "BindInterface",
        "CertificateFile",
        "Ciphers",
        "Compression",
        "ConnectionAttempts",
        "GlobalKnownHostsFile",
        "HostKeyAlgorithms",
        "HostKeyAlias",
        "IPQoS",
        "IdentitiesOnly",
        "IdentityAgent",
        "KexAlgorithms",
        "MACs",
        "ProxyJump",
        "PubkeyAcceptedAlgorithms",
        "ServerAliveCountMax",
        "ServerAliveInterval",
        "UserKnownHostsFile",
    }
)
"""Options of ssh that a setting may give. Those that start programs, forward something or check less are not here."""
_PYTHON = re.compile(r"(~/)?[A-Za-z0-9_./+-]{1,400}")


def _is_python(value: Any) -> bool:
    """Whether every shell passes the path on unchanged: ssh hands its command to the login shell of the user."""
    return isinstance(value, str) and _PYTHON.fullmatch(value) is not None and not value.startswith("-")


_HOST = Kind(RULE, lambda value: parsed(value) is not None)
_OPTION = Kind("an option of ssh that may be set here", lambda value: value in OPTIONS, known=lambda: sorted(OPTIONS))
_LINE = Kind("a text that is not empty", lambda value: is_text(value) and len(value) <= 1000)
_FILE = Kind("a path", lambda value: is_text(value) and len(value) <= 1000 and not value.startswith("-"))
Seconds = Annotated[float, Kind("seconds above 0, at most a day", between(1e-3, 86_400))]
WholeSeconds = Annotated[int, Kind("whole seconds, 1 to 3600", lambda value: type(value) is int and 1 <= value <= 3600)]


@dataclass(frozen=True)
class SshSettings:
    """The settings of a run on a list of hosts. Hosts, users and keys of ssh's own configuration file apply too."""

    hosts: Annotated[Sequence[str], a_list_of(_HOST)] = ()
    """`[USER@]HOST[:PORT]` of each host; ranks are given out in this order, in blocks."""
    python: Annotated[
        str, Kind("the path of an interpreter, of letters, digits and `_./+-`, also from `~/`", _is_python)
    ] = "python3"
    """The interpreter on the hosts that has Atoll, such as `~/venv/bin/python`."""
    identity_file: Annotated[str, _FILE] | None = None
    """The private key that logs in."""
    config_file: Annotated[str, _FILE] | None = None
    """A configuration file of ssh, in place of the user's own."""
    options: Annotated[Mapping[str, str], a_table_of(_LINE, key=_OPTION)] = field(default_factory=dict)
    """Further options of ssh, such as `ProxyJump`."""
    connect_timeout_s: WholeSeconds = 10
    """How long the connection to a host may take."""
    timeout_s: Seconds = 60.0
    """How long a host may take to answer. A stop may take longer, by the grace of the replicas."""
    patience_s: Seconds = 20.0
    """How long a call is repeated while a host cannot be reached."""
    store_is_mounted: bool = False
    """Every host sees the folder of a `file://` store under the same path, on a shared file system."""

    @staticmethod
    def value_problems(given: Mapping[str, Any]) -> Iterator[str]:
        """Hosts that are listed twice, and jump hosts that are no addresses: ssh passes them to a shell."""
        jumps = dict(given.get("options", {})).get("ProxyJump", "none")
        if jumps != "none" and not all(map(parsed, jumps.split(","))):
            yield f"options.ProxyJump={jumps!r}: addresses `[USER@]HOST[:PORT]`, with commas between them"
        for address in repeated(given.get("hosts", ())):
            yield f"hosts={address!r}: listed twice; a host runs several replicas if there are more replicas than hosts"
