"""Lines from the sealed pieces of a log in the store: works when the machine is long gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from atoll._time import Clock
from atoll.witness import Witness


def lines(
    witness: Witness,
    rank: int,
    *,
    tail: int | None,
    since: float | None,
    attempt: int | None,
    is_over: Callable[[], bool] | None,
    clock: Clock,
) -> Iterator[str]:
    """Lines of one attempt (the newest unless said otherwise). With `is_over`, go on until it is true.

    `since` is exact to the age of a sealed piece: a few seconds more may come, never less.
    """
    if attempt is None:
        attempt = max(witness.attempts(rank), default=0)
    if is_over is not None:
        yield from _split(witness.follow_log(rank, attempt=attempt, since=since, is_over=is_over, clock=clock))
        return
    found = _split(witness.log(rank, attempt=attempt, since=since))
    yield from found if tail is None else deque(found, maxlen=tail)


def _split(pieces: Iterable[bytes]) -> Iterator[str]:
    partial = b""
    for piece in pieces:
        *whole, partial = (partial + piece).split(b"\n")
        yield from map(_text, whole)
    if partial:
        yield _text(partial)


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "backslashreplace")
