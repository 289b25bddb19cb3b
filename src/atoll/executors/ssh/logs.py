"""Lines of a rank from its host. A lost connection does not end a `follow`: it goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atoll.errors import BackendUnavailable
from atoll.executors.ssh.connection import Hosts
from atoll.executors.ssh.request import Block


def read_lines(hosts: Hosts, block: Block, rank: int, *, tail: int | None, follow: bool) -> Iterator[str]:
    """Lines of a replica; `rank` counts from the first replica of the block.

    A line is given out once. If the rank is restarted while the connection is lost, its new attempt comes next.
    """
    body: dict[str, Any] = {**block.body(), "rank": rank, "tail": tail, "follow": follow}
    tries, silence_s = hosts.tries(), None if follow else hosts.settings.timeout_s
    while True:
        given = 0
        try:
            for answer in hosts.stream(block.host, "logs", block.context.run_id, body, silence_s=silence_s):
                if "at" in answer:
                    body |= {"skip": answer["at"], "attempt": answer["attempt"]}
                elif "line" in answer:
                    given += 1
                    body["skip"] = body.get("skip", 0) + 1
                    yield answer["line"]
            return
        except BackendUnavailable as exc:
            is_new = follow or not given  # without `follow`, the number of lines that were given is not known there
            tries = hosts.tries() if given and follow else tries
            if not is_new or not tries.another(exc):
                raise
