"""The mean of an array by name: every rank calls with the same name, every rank gets the same bits.

For code that wants an all-reduce and nothing else: any dtype, many names at once, any number of turns under one name.
Every rank counts, with equal weight. float32 and smaller floats are summed in float32, the rest in float64, in rank
order; whole numbers come back rounded, ties to even. Own objects are deleted once every rank is known to be past them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.errors import CorruptUpdate, QuorumLost
from atoll.rounds.codec import as_bytes
from atoll.rounds.codec_bf16 import from_bf16_bits, to_bf16_bits
from atoll.rounds.layout import Grid, numpy_dtype
from atoll.rounds.meeting import Meeting
from atoll.rounds.ops import Gather, Steps
from atoll.rounds.seal import Frame, open_frame, seal_frame

CHUNK = 2 << 20
_SMALL_BYTES = 1 << 24
_WIDTH = 4


@dataclass
class Ledger:
    """Which of our objects are still needed by whom. Numbers count a rank's own calls, in the order they began."""

    world_size: int
    next_number: int = 0
    running: set[int] = field(default_factory=set)
    turns: dict[str, int] = field(default_factory=dict)
    kept: dict[int, tuple[list[str], list[int]]] = field(default_factory=dict)
    """Our call → the keys it wrote, and the number of the same call at each rank."""
    finished: list[int] = field(default_factory=list)
    """For each rank: all its calls with a lower number are over."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, name: str) -> tuple[int, int, int]:
        """(number, turn under this name, what of ours is finished)."""
        with self.lock:
            number, self.next_number = self.next_number, self.next_number + 1
            turn, self.turns[name] = self.turns.get(name, 0), self.turns.get(name, 0) + 1
            floor = min(self.running, default=number)
            self.running.add(number)
            return number, turn, floor

    def end(self, number: int, keys: list[str], numbers: list[int], finished: list[int]) -> list[str]:
        """Our call is over; back come the keys that nobody needs any more."""
        with self.lock:
            self.running.discard(number)
            self.kept[number] = (keys, numbers)
            self.finished = [max(pair) for pair in zip(self.finished or [0] * self.world_size, finished, strict=True)]
            free = [
                n
                for n, (_, theirs) in self.kept.items()
                if all(t < f for t, f in zip(theirs, self.finished, strict=True))
            ]
            return [key for n in free for key in self.kept.pop(n)[0]]


@dataclass
class Call:
    """One averaging under way."""

    meeting: Meeting
    session: str
    name: str
    number: int
    turn: int
    floor: int
    array: NDArray[Any]
    dtype: str
    shape: tuple[int, ...]
    numbers: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grid = Grid(self.array.size, CHUNK)
        self.began = self.meeting.io.clock.monotonic()

    @property
    def is_scattered(self) -> bool:
        return self.meeting.world_size > 2 and self.array.nbytes > _SMALL_BYTES

    def header(self, chunk: int) -> dict[str, Any]:
        """What every object of this call says about itself."""
        return {
            "session": self.session, "name": self.name, "turn": self.turn, "dtype": self.dtype,
            "shape": list(self.shape), "chunk": chunk,
        }  # fmt: skip


def mean(
    meeting: Meeting, session: str, ledger: Ledger, name: str, array: NDArray[Any], dtype: str, shape: Sequence[int]
) -> Steps[NDArray[Any]]:
    """The mean of the flat `array`, whose bits are those of `dtype` (bfloat16 as uint16)."""
    number, turn, floor = ledger.begin(name)
    call = Call(meeting, session, name, number, turn, floor, array, dtype, tuple(shape))
    chunks = range(max(1, len(call.grid)))  # an empty array still has one object, which says that it is there
    yield Gather([_publish(call, chunk) for chunk in chunks], _WIDTH)
    result = np.empty_like(array)
    if call.is_scattered:
        rank, count = meeting.rank, meeting.world_size
        yield Gather([_reduce(call, i, result, is_published=True) for i in chunks if i % count == rank], _WIDTH)
        yield Gather([_fetch(call, i, result) for i in chunks if i % count != rank], _WIDTH)
    else:
        yield Gather([_reduce(call, i, result, is_published=False) for i in chunks], _WIDTH)
    everyone = range(meeting.world_size)
    done = ledger.end(number, call.written, [call.numbers[r] for r in everyone], [call.finished[r] for r in everyone])
    for key in done:
        yield from meeting.io.delete(key)
    return result


def _publish(call: Call, chunk: int) -> Steps[None]:
    header = {
        **call.header(chunk), "kind": "part", "rank": call.meeting.rank, "number": call.number, "finished": call.floor,
    }  # fmt: skip
    key = call.meeting.keys.part(call.session, call.name, call.turn, call.meeting.rank, chunk)
    values = call.array[_span(call, chunk)]
    call.written.append(key)
    yield from call.meeting.io.put(key, seal_frame(header, [as_bytes(values)]))


def _reduce(call: Call, chunk: int, result: NDArray[Any], *, is_published: bool) -> Steps[None]:
    """Average a chunk from every rank's part, in rank order."""
    total: NDArray[Any] | None = None
    for first in range(0, call.meeting.world_size, 8):
        ranks = range(first, min(first + 8, call.meeting.world_size))
        parts: list[NDArray[Any]] = yield Gather([_part(call, rank, chunk) for rank in ranks], 8)
        for part in parts:
            wide = _widened(part, call.dtype)
            total = wide.copy() if total is None else np.add(total, wide, out=total)
    assert total is not None
    narrow = _narrowed(total, call.meeting.world_size, call.dtype)
    if is_published:
        everyone = range(call.meeting.world_size)
        header = {
            **call.header(chunk), "kind": "mean",
            "numbers": [call.numbers[r] for r in everyone], "finished": [call.finished[r] for r in everyone],
        }  # fmt: skip
        key = call.meeting.keys.mean(call.session, call.name, call.turn, chunk)
        call.written.append(key)
        yield from call.meeting.io.put(key, seal_frame(header, [as_bytes(narrow)]))
    result[_span(call, chunk)] = narrow


def _fetch(call: Call, chunk: int, result: NDArray[Any]) -> Steps[None]:
    """Take a chunk of the mean from its owner, or compute it when that takes long."""
    io, pauses = call.meeting.io, call.meeting.pauses()
    key = call.meeting.keys.mean(call.session, call.name, call.turn, chunk)
    asked = io.clock.monotonic()
    while io.clock.monotonic() - asked < min(20.0, call.meeting.timeout_s / 2):
        data = yield from io.probe(key)
        frame = None if data is None else _frame_or_none(data, "mean")
        if frame is not None:
            _check(call, frame, chunk, -1)
            _learn(call, frame.header["numbers"], frame.header["finished"])
            result[_span(call, chunk)] = np.frombuffer(frame.payload, dtype=call.array.dtype)
            return
        yield from io.sleep(next(pauses))
    yield from _reduce(call, chunk, result, is_published=True)


def _part(call: Call, rank: int, chunk: int) -> Steps[NDArray[Any]]:
    """One rank's values of a chunk, waited for."""
    if rank == call.meeting.rank:
        call.numbers[rank], call.finished[rank] = call.number, call.floor
        return call.array[_span(call, chunk)]
    io, pauses = call.meeting.io, call.meeting.pauses()
    key = call.meeting.keys.part(call.session, call.name, call.turn, rank, chunk)
    while True:
        data = yield from io.probe(key)
        frame = None if data is None else _frame_or_none(data, "part")
        if frame is not None:
            _check(call, frame, chunk, rank)
            call.numbers[rank], call.finished[rank] = int(frame.header["number"]), int(frame.header["finished"])
            return np.frombuffer(frame.payload, dtype=call.array.dtype)
        if io.clock.monotonic() - call.began >= call.meeting.timeout_s:
            message = f"rank {rank} did not bring `{call.name}` (turn {call.turn}) in {call.meeting.timeout_s:g} s"
            raise QuorumLost(message, round_no=call.turn, missing=[rank])
        yield from io.sleep(next(pauses))


def _check(call: Call, frame: Frame, chunk: int, rank: int) -> None:
    """The object is of this very call, and its array is like ours."""
    whose = "the mean" if rank < 0 else f"rank {rank}"
    for name, wanted in call.header(chunk).items():
        if (found := frame.header.get(name)) != wanted:
            message = f"`{call.name}`: {name} is {found!r} at {whose}, {wanted!r} here"
            raise CorruptUpdate(message, round_no=call.turn, rank=rank, check=name)
    span = _span(call, chunk)
    if len(frame.payload) != (span.stop - span.start) * call.array.dtype.itemsize:
        raise CorruptUpdate(f"`{call.name}`: {whose} has another length", rank=rank, check="length")


def _frame_or_none(data: Any, kind: str) -> Frame | None:
    """A frame, or None when it does not check out: then it is asked for again until the time is up."""
    try:
        return open_frame(data, kind=kind)
    except CorruptUpdate:
        return None


def _learn(call: Call, numbers: Sequence[int], finished: Sequence[int]) -> None:
    call.numbers |= dict(enumerate(numbers))
    for rank, floor in enumerate(finished):
        call.finished[rank] = max(floor, call.finished.get(rank, 0))


def _span(call: Call, chunk: int) -> slice:
    return slice(*call.grid.span(chunk)) if call.array.size else slice(0, 0)


def _widened(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        return from_bf16_bits(values)
    return values.astype(np.float32 if dtype in ("float32", "float16") else np.float64)


def _narrowed(total: NDArray[Any], count: int, dtype: str) -> NDArray[Any]:
    total = total / total.dtype.type(count)
    if dtype == "bfloat16":
        return to_bf16_bits(total)
    with np.errstate(over="ignore"):
        narrow: NDArray[Any] = (total if dtype.startswith("float") else np.rint(total)).astype(numpy_dtype(dtype))
    return narrow
