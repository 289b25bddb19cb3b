"""RunHandle: one line of text that identifies a run at its backend."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlsplit

from atoll.errors import ConfigError

_EXECUTOR = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True)
class RunHandle:
    """`executor://scope/native-id?replicas=N`. Contains no secret; any process can use it."""

    executor: str
    scope: str
    """The part of the backend that has the run: a host, a namespace, a region."""
    native_id: str
    replicas: int
    first_rank: int = 0
    """The rank of the first replica; above 0 for a later part of a run on several backends."""

    def __str__(self) -> str:
        scope, native = quote(self.scope, safe=""), quote(self.native_id, safe="/")
        first = f"&first={self.first_rank}" if self.first_rank else ""
        return f"{self.executor.replace('_', '-')}://{scope}/{native}?replicas={self.replicas}{first}"

    @classmethod
    def parse(cls, text: str) -> RunHandle:
        """The handle whose `str` is `text`; `ConfigError` if `text` is not a handle."""
        try:
            parts = urlsplit(text)
        except ValueError:
            parts = urlsplit("")
        executor = parts.scheme.replace("-", "_")
        query = parse_qs(parts.query)
        replicas, first = query.get("replicas", [""])[0], query.get("first", ["0"])[0]
        scope, native = unquote(parts.netloc), unquote(parts.path.removeprefix("/"))
        numbers = all(text.isdecimal() and len(text) < 8 for text in (replicas, first))
        if not (_EXECUTOR.match(executor) and native and numbers and int(replicas) > 0):
            raise ConfigError(
                f"`{text}` is not a run handle", hint="a handle looks like `local://host/exp-7f3k?replicas=4`"
            )
        return cls(executor, scope, native, int(replicas), int(first))
