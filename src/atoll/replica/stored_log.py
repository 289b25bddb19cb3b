"""The output of replicas as the uploader has stored it, in chunks, line by line. Needs no backend."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from atoll._time import Clock
from atoll.keys import RunKeys
from atoll.stores.base import Store

_PAUSE_S = 0.5


class StoredLog:
    """The output of all ranks of one launch."""

    def __init__(self, store: Store, keys: RunKeys) -> None:
        self._store, self._keys = store, keys

    def attempts(self, rank: int) -> list[int]:
        """Attempts of a rank that have output, oldest first."""
        prefix = self._keys.log_prefix(rank)
        return sorted({self._keys.parse_log_chunk(key).attempt for key in self._store.list(prefix)})

    def chunks(self, rank: int, *, attempt: int | None = None, since: float | None = None) -> Iterator[bytes]:
        """Uploaded log chunks of a rank, in order: of one attempt or all, from the chunk of time `since` on."""
        return self._new_chunks(rank, attempt, since, [-1])

    def lines(
        self,
        rank: int,
        *,
        tail: int | None,
        since: float | None,
        attempt: int | None,
        is_over: Callable[[], bool] | None,
        clock: Clock,
    ) -> Iterator[str]:
        """Lines of one attempt, by default the newest. With `is_over`, wait for more lines until it is true.

        `since` selects whole chunks, so a few seconds before it may be included. Without `attempt`, the wait also
        yields the lines of attempts that begin meanwhile.
        """
        newest = max(self.attempts(rank), default=0) if attempt is None else attempt
        if is_over is not None:
            yield from _split(self._follow(rank, attempt, [(newest << 60) - 1], since, is_over, clock))
            return
        found = _split(self.chunks(rank, attempt=newest, since=since))
        yield from found if tail is None else deque(found, maxlen=tail)

    def _follow(
        self,
        rank: int,
        attempt: int | None,
        seen: list[int],
        since: float | None,
        is_over: Callable[[], bool],
        clock: Clock,
    ) -> Iterator[bytes]:
        """Log chunks after the position `seen[0]` as they are uploaded, until `is_over()` and there is no new one."""
        while True:
            over = is_over()
            yield from self._new_chunks(rank, attempt, since, seen)
            if over:
                return
            clock.sleep(_PAUSE_S)

    def _new_chunks(self, rank: int, attempt: int | None, since: float | None, seen: list[int]) -> Iterator[bytes]:
        """Chunks after the position `seen[0]`, which moves to the last chunk; an offset uploaded twice counts once."""
        for key in self._store.list(self._keys.log_prefix(rank, attempt)):
            chunk = self._keys.parse_log_chunk(key)
            position = (chunk.attempt << 60) + chunk.offset
            if position > seen[0] and (since is None or chunk.last_ms >= since * 1000):
                seen[0] = position
                yield bytes(self._store.get(key))


def _split(chunks: Iterable[bytes]) -> Iterator[str]:
    partial = b""
    for chunk in chunks:
        *whole, partial = (partial + chunk).split(b"\n")
        yield from map(_text, whole)
    if partial:
        yield _text(partial)


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "backslashreplace")
