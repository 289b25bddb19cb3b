"""Events on their way to the store: none is lost by what happens while others are written."""

from __future__ import annotations

import json
import random

import pytest

from atoll.errors import StoreUnavailable
from atoll.rounds import events as events_module
from atoll.rounds.events import EventLog
from atoll.rounds.io import StoreIO, ThreadedDriver, answer
from atoll.rounds.keys import RoundKeys
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock, FaultyStore

KEYS = RoundKeys("run")


class Desk:
    """A log and where it goes."""

    def __init__(self):
        self.clock = FakeClock()
        self.store = FaultyStore(MemoryStore())
        self.io = StoreIO(self.clock, random.Random(0), retry_s=0.0)
        self.log = EventLog(KEYS, 0, 0, self.clock)

    def flush(self) -> None:
        ThreadedDriver(self.store, self.clock)(self.log.flush(self.io))

    def written(self) -> list[int]:
        """The rounds of all events that are in the store."""
        keys = list(self.store.list(KEYS.events_prefix()))
        return [json.loads(line)["round"] for key in keys for line in bytes(self.store.get(key)).splitlines()]


@pytest.mark.parametrize("segment_bytes", [1, 1 << 16])
def test_what_happens_while_events_are_written_is_written_next(monkeypatch, segment_bytes):
    monkeypatch.setattr(events_module, "SEGMENT_BYTES", segment_bytes)
    desk = Desk()
    desk.log.add("late", 0)
    steps = desk.log.flush(desk.io)
    request = next(steps)
    desk.log.add("late", 1)
    with pytest.raises(StopIteration):
        steps.send(answer(desk.store, request))
    assert desk.written() == [0]
    desk.flush()
    assert desk.written() == [0, 1]


def test_what_could_not_be_written_is_written_next():
    desk = Desk()
    desk.log.add("late", 0)
    desk.store.fail("put", times=None)
    with pytest.raises(StoreUnavailable):
        desk.flush()
    desk.store.heal()
    desk.flush()
    assert desk.written() == [0]
