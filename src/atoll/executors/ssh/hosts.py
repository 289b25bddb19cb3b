"""Pure: the addresses of hosts, such as `me@gpu2:2222`, and which ranks each host gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_ADDRESS = re.compile(
    rf"(?:(?P<user>{_NAME})@)?(?P<name>{_NAME}|\[[0-9A-Fa-f:.]{{2,45}}(?:%{_NAME})?\])(?::(?P<port>[0-9]{{1,5}}))?"
)
_LONGEST = 255
RULE = "an address `[USER@]HOST[:PORT]`, such as `gpu1` or `me@gpu2:2222`"


@dataclass(frozen=True)
class Host:
    """One host: a name of ssh's configuration, of DNS, or an IP address; user and port if they are given."""

    name: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return f"{f'{self.user}@' if self.user else ''}{name}{f':{self.port}' if self.port else ''}"


def parsed(text: object) -> Host | None:
    """The host at this address; None if it is none. No part of it can begin with a dash, as an option of ssh does."""
    found = _ADDRESS.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    if found is None:
        return None
    port = None if found["port"] is None else int(found["port"])
    if port is not None and not 0 < port < 65_536:
        return None
    return Host(found["name"].strip("[]"), found["user"], port)


def repeated(addresses: Sequence[str]) -> list[str]:
    """The addresses that a list has more than once."""
    return sorted({each for each in addresses if list(addresses).count(each) > 1})


def blocks(replicas: int, hosts: int) -> list[range]:
    """The replicas of each host, as blocks in order: 5 replicas on 2 hosts are 0 to 2 and 3 to 4.

    The sizes differ by at most one, and a host without a replica is left out.
    """
    used = min(replicas, hosts)
    size, larger = divmod(replicas, used)
    starts = [index * size + min(index, larger) for index in range(used + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
