"""Pure: the command of ssh, the plan of a run, and its handle, which has all that later calls need."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.context import RunContext
from atoll.errors import RunNotFound
from atoll.executors.base import Capabilities, Stray, check, store_problems
from atoll.executors.ssh.errors import EXECUTOR
from atoll.executors.ssh.hosts import Host, blocks, parsed
from atoll.executors.ssh.protocol import MODULE
from atoll.executors.ssh.settings import SshSettings
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import ReplicaStatus

MOST_ON_A_HOST = 1024
CAPABILITIES = Capabilities(
    code=frozenset({"bundle", "image"}),
    images=False,
    resources=False,
    secret_schemes=frozenset({"env", "file"}),
)
_FIXED = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "UpdateHostKeys=no",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
    "EscapeChar=none",
    "RequestTTY=no",
    "LogLevel=ERROR",
)
"""Options of each call: no question, no host without a known key, nothing forwarded, bytes unchanged."""
_ALIVE = {"ServerAliveInterval": "5", "ServerAliveCountMax": "3"}
"""A connection without a sign of life of the host for 15 seconds is lost."""


def ssh_command(host: Host, settings: SshSettings, verb: str) -> list[str]:
    """The arguments of one call. ssh takes the first value of an option, so `_FIXED` cannot be replaced."""
    options = [*_FIXED, f"ConnectTimeout={settings.connect_timeout_s}"]
    options += [f"{name}={value}" for name, value in sorted({**_ALIVE, **settings.options}.items())]
    return [
        "ssh",
        *(["-F", os.path.expanduser(settings.config_file)] if settings.config_file else []),
        *(part for option in options for part in ("-o", option)),
        *(["-i", os.path.expanduser(settings.identity_file)] if settings.identity_file else []),
        *(["-p", str(host.port)] if host.port else []),
        *(["-l", host.user] if host.user else []),
        "--",
        host.name,
        f"{settings.python} -P -m {MODULE} {verb}",
    ]


@dataclass(frozen=True)
class Block:
    """The replicas of a run on one host: `ranks` count from the executor's first replica."""

    host: Host
    ranks: range
    context: RunContext

    @property
    def name(self) -> str:
        """The name of what runs there, for errors: the host and the name of the run on it."""
        return f"{self.host}/{self.context.native_name()}"

    def body(self) -> dict[str, Any]:
        """What every request about the block says."""
        context = self.context
        return {
            "run_id": context.run_id,
            "store": context.store_uri,
            "launch": context.launch,
            "first_rank": context.first_rank,
            "world_size": context.world_size,
            "replicas": len(self.ranks),
        }


def blocks_of(context: RunContext, replicas: int, hosts: Sequence[Host]) -> list[Block]:
    """The block of each host that gets replicas, in order."""
    world_size = replicas if context.world_size is None else context.world_size
    return [
        Block(host, ranks, replace(context, first_rank=context.first_rank + ranks.start, world_size=world_size))
        for host, ranks in zip(hosts, blocks(replicas, len(hosts)), strict=False)
    ]


def run_request(
    context: RunContext, placement: Placement, settings: SshSettings
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The request, every reason why it cannot run, and what a user should know before it does."""
    problems = check(placement, CAPABILITIES)
    problems += store_problems(context.store_uri, is_mounted=settings.store_is_mounted)
    hosts = [host for address in settings.hosts if (host := parsed(address)) is not None]
    if not hosts:
        problems.append('hosts: not set; list the hosts, such as hosts=["gpu1", "me@gpu2:2222"]')
        return {}, problems, []
    found = blocks_of(context, placement.replicas, hosts)
    if len(found[0].ranks) > MOST_ON_A_HOST:
        most = MOST_ON_A_HOST * len(hosts)
        problems.append(f"replicas={placement.replicas}: {len(hosts)} hosts run at most {most}")
    request = {
        "command": [ssh_command(block.host, settings, "start") for block in found],
        "run_id": context.run_id,
        "store": context.store_uri,
        "launch": context.launch,
        "world_size": found[0].context.world_size,
        "hosts": [
            {
                "host": str(block.host),
                "ranks": list(block.context.ranks(len(block.ranks))),
                "name": block.context.native_name(),
            }
            for block in found
        ],
        "placement": placement.to_json(),
    }
    idle = [str(host) for host in hosts[len(found) :]]
    notes = [f"{len(idle)} of {len(hosts)} hosts get no replica: {', '.join(idle)}"] if idle else []
    return request, problems, notes


def run_handle(request: dict[str, Any], replicas: int) -> RunHandle:
    """The handle: the hosts in its scope; launch, run id and store as its native id."""
    scope = ",".join(block["host"] for block in request["hosts"])
    native = f"{request['launch']}/{request['run_id']}/{request['store']}"
    return RunHandle(EXECUTOR, scope, native, replicas, request["hosts"][0]["ranks"][0])


def blocks_of_handle(handle: RunHandle, operation: str) -> list[Block]:
    """The blocks of a run. `RunNotFound` if the handle is none of this executor."""
    launch, _, rest = handle.native_id.partition("/")
    run_id, _, store = rest.partition("/")
    hosts = [parsed(address) for address in handle.scope.split(",")]
    known = [host for host in hosts if host is not None]
    if not (launch.isdecimal() and run_id and store and len(known) == len(hosts) <= handle.replicas):
        raise RunNotFound(f"`{handle}` is not a run of this backend", executor=EXECUTOR, operation=operation)
    # The number of all replicas of the run is not needed after the start: it is not part of any name.
    return blocks_of(RunContext(run_id, store, int(launch), handle.first_rank), handle.replicas, known)


def rows_of(block: Block, rows: Sequence[Mapping[str, Any]]) -> list[ReplicaStatus]:
    """The rows that a host reports, with the ranks of the executor and the address of the host."""
    found = [ReplicaStatus.from_json(dict(row)) for row in rows]
    return [replace(row, rank=block.ranks.start + row.rank, host=str(block.host)) for row in found]


def stray_of(host: Host, found: Mapping[str, Any]) -> Stray:
    """What a host reports to run there, with a handle that means this host alone."""
    about = found["context"]
    context = RunContext("unknown", "unknown") if about is None else RunContext(*about)
    native = f"{context.launch}/{context.run_id}/{context.store_uri}"
    handle = RunHandle(EXECUTOR, str(host), native, found["replicas"], context.first_rank)
    message = f"{found['message']}, on host `{host}`"
    return Stray(handle, f"{host}: {found['native_id']}", message, context if found["is_supervised"] else None)
