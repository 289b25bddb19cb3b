"""The record of a round: which time counts for what, and how it reaches the store."""

from __future__ import annotations

import json
import random
import threading

import pytest

from atoll.rounds import timeline as timeline_module
from atoll.rounds.io import StoreIO, ThreadedDriver
from atoll.rounds.keys import RoundKeys
from atoll.rounds.timeline import PhaseTime, RoundRecord
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock, FaultyStore

KEYS = RoundKeys("run")


class Bench:
    """Requests with a clock that is turned by hand, and a store to flush into."""

    def __init__(self, store=None):
        self.clock = FakeClock()
        self.store = store or MemoryStore()
        self.io = StoreIO(self.clock, random.Random(0), retry_s=0.0)
        self.timeline = self.io.timeline
        self.timeline.open(KEYS, 2, 1)
        self.drive = ThreadedDriver(self.store, self.clock)

    def passes(self, phase: str, seconds: float, round_no: int | None = None) -> None:
        began = self.clock.monotonic()
        self.clock.advance(seconds)
        if phase:
            self.timeline.add(phase, began, self.clock.monotonic(), round_no)

    def blocking_round(self, round_no: int) -> None:
        self.passes("compute", 10.0)
        self.timeline.begin(round_no, 0)
        self.passes("encode", 1.0)
        self.passes("put", 2.0)
        self.passes("wait", 0.5)
        self.timeline.end(is_included=True)
        self.passes("apply", 0.25)

    def flush(self) -> None:
        self.drive(self.timeline.flush(self.io))

    def finish(self) -> None:
        self.drive(self.timeline.finish(self.io))

    def records(self) -> list[RoundRecord]:
        keys = list(self.store.list(KEYS.metrics_prefix()))
        lines = [line for key in keys for line in bytes(self.store.get(key)).splitlines()]
        return [RoundRecord.from_json(json.loads(line)) for line in lines]


def test_a_blocking_round_is_exposed_in_full():
    bench = Bench()
    bench.blocking_round(0)
    bench.finish()
    (record,) = bench.records()
    assert (record.rank, record.incarnation, record.round_no, record.fragment) == (2, 1, 0, 0)
    assert (record.is_over, record.is_included) == (True, True)
    assert {name: phase.wall_s for name, phase in record.phases.items()} == {
        "compute": 10.0, "encode": 1.0, "put": 2.0, "wait": 0.5, "apply": 0.25,
    }  # fmt: skip
    assert (record.exchange_s, record.exposed_s, record.hidden_share) == (3.5, 3.5, 0.0)
    assert record.total_s == 13.75
    assert record.time == bench.clock.time() - 3.75
    assert record.phases["compute"].spans == ((-10.0, 10.0),)
    assert record.phases["apply"].spans == ((3.5, 0.25),)


def test_what_goes_on_behind_computing_is_hidden():
    bench = Bench()
    bench.passes("compute", 10.0)
    bench.timeline.begin(0, 0)
    bench.passes("compute", 3.0)  # while the exchange goes on in another thread
    bench.passes("", 1.0)  # the loop waits for the rest
    bench.timeline.end(is_included=True)
    assert (bench.timeline.exchange_s, bench.timeline.exposed_s) == (4.0, 1.0)
    bench.passes("apply", 0.5, 0)
    bench.passes("compute", 6.0)
    bench.timeline.begin(1, 0)
    bench.passes("compute", 2.0)
    bench.timeline.end(is_included=True)
    bench.finish()
    first, second = bench.records()
    assert (first.exchange_s, first.exposed_s, first.hidden_share) == (4.0, 1.0, 0.75)
    assert second.phases["compute"].wall_s == 9.0, "what was computed since the exchange before"
    assert (second.exposed_s, second.hidden_share) == (0.0, 1.0)
    assert bench.timeline.hidden_share == pytest.approx(5 / 6)


def test_side_by_side_is_busy_twice_and_wall_once():
    bench = Bench()
    bench.timeline.begin(0, 0)
    bench.timeline.add("get", 0.0, 2.0)
    bench.timeline.add("get", 1.0, 4.0)
    bench.clock.advance(4.0)
    bench.timeline.end(is_included=True)
    bench.finish()
    assert bench.records()[0].phases["get"] == PhaseTime(5.0, 4.0, 2, ((0.0, 4.0),))


def test_without_any_mark_the_time_between_exchanges_is_computing():
    bench = Bench()
    for round_no in range(2):
        bench.passes("", 7.0)
        bench.timeline.begin(round_no, 0)
        bench.passes("put", 1.0)
        bench.timeline.end(is_included=True)
    bench.finish()
    assert [(r.wall_s("compute"), r.exposed_s) for r in bench.records()] == [(7.0, 1.0)] * 2


def test_an_outer_step_told_after_the_next_exchange_began_counts_for_its_own_round():
    bench = Bench()
    for round_no in range(3):
        bench.timeline.begin(round_no, 0)
        if round_no:
            bench.passes("apply", 0.125 * round_no, round_no - 1)
        bench.passes("put", 1.0)
        bench.timeline.end(is_included=True)
    bench.passes("apply", 0.5, 2)
    bench.finish()
    assert [r.wall_s("apply") for r in bench.records()] == [0.125, 0.25, 0.5]


def test_a_round_is_written_once_the_next_begins_and_not_before():
    bench = Bench()
    bench.blocking_round(0)
    bench.flush()
    assert bench.records() == []
    bench.timeline.begin(1, 0)
    bench.flush()
    assert [r.round_no for r in bench.records()] == [0]


def test_who_waits_for_others_has_written_every_round_before():
    bench = Bench()
    for round_no in range(4):
        bench.timeline.begin(round_no, 0)
        bench.flush()
        if round_no < 3:
            bench.passes("put", 0.5)
            bench.timeline.end(is_included=True)
    assert [r.round_no for r in bench.records()] == [0], "the others came too soon after it"
    for _ in range(20):
        bench.drive(bench.io.sleep(2.0))
    assert [r.round_no for r in bench.records()] == [0, 1, 2]
    assert bench.io.counted().requests["put"] == 2, "there is nothing more to write"


def test_pauses_of_quick_rounds_cost_no_request():
    bench = Bench()
    for round_no in range(100):
        bench.timeline.begin(round_no, 0)
        bench.drive(bench.io.sleep(0.5))
        bench.drive(bench.io.sleep(0.25))
        bench.timeline.end(is_included=True)
        bench.passes("apply", 0.0)
    assert bench.io.counted().requests["put"] == 0


def test_a_pause_is_no_longer_for_what_is_written_meanwhile():
    class SlowStore(MemoryStore):
        def put(self, key, data):
            bench.clock.advance(0.5)
            super().put(key, data)

    bench = Bench(SlowStore())
    bench.blocking_round(0)
    bench.timeline.begin(1, 0)
    bench.drive(bench.io.sleep(2.0))
    began = bench.clock.monotonic()
    bench.drive(bench.io.sleep(2.0))
    assert [r.round_no for r in bench.records()] == [0]
    assert bench.clock.monotonic() - began == 2.0


def test_an_outer_step_told_after_its_round_was_written_counts_for_no_other():
    bench = Bench()
    for round_no in range(2):
        bench.timeline.begin(round_no, 0)
        bench.passes("put", 1.0)
        if round_no == 0:
            bench.timeline.end(is_included=True)
    bench.drive(bench.io.sleep(2.0))
    bench.passes("apply", 0.5, 0)
    bench.timeline.end(is_included=True)
    bench.finish()
    assert [(r.round_no, r.wall_s("apply")) for r in bench.records()] == [(0, 0.0), (1, 0.0)]


def test_fast_rounds_share_an_object():
    bench = Bench()
    for round_no in range(6):
        bench.timeline.begin(round_no, 0)
        bench.flush()
        bench.passes("put", 1.0)
        bench.timeline.end(is_included=True)
    bench.finish()
    assert [r.round_no for r in bench.records()] == list(range(6))
    assert len(list(bench.store.list(KEYS.metrics_prefix()))) == 2


def test_old_objects_go(monkeypatch):
    monkeypatch.setattr(timeline_module, "KEPT_SEGMENTS", 3)
    bench = Bench()
    for round_no in range(8):
        bench.blocking_round(round_no)
        bench.flush()
    bench.finish()
    assert [r.round_no for r in bench.records()] == [5, 6, 7]


def test_a_store_that_fails_loses_nothing_and_raises_nothing():
    store = FaultyStore(MemoryStore())
    bench = Bench(store)
    bench.blocking_round(0)
    bench.timeline.begin(1, 0)
    store.fail("put", times=None)
    bench.flush()
    store.heal()
    bench.timeline.end(is_included=False)
    bench.finish()
    assert [(r.round_no, r.is_included) for r in bench.records()] == [(0, True), (1, False)]


def test_an_exchange_that_never_ended_is_told_as_such():
    bench = Bench()
    bench.timeline.begin(4, 0)
    bench.passes("wait", 30.0)
    bench.finish()
    (record,) = bench.records()
    assert (record.round_no, record.is_over, record.exchange_s) == (4, False, 30.0)


def test_a_round_that_failed_and_is_tried_again_is_there_twice_over_and_not_over():
    bench = Bench()
    bench.timeline.begin(4, 0)
    bench.passes("wait", 30.0)
    bench.timeline.end(is_included=False, is_over=False)
    bench.passes("", 100.0)  # catching up
    bench.timeline.begin(4, 0)
    bench.passes("put", 1.0)
    bench.timeline.end(is_included=True)
    bench.finish()
    assert [(r.round_no, r.is_over, r.exchange_s) for r in bench.records()] == [(4, False, 30.0), (4, True, 1.0)]


def test_bytes_and_requests_of_a_round_are_those_until_the_next_begins():
    bench = Bench()
    bench.timeline.begin(0, 0)
    bench.drive(bench.io.put("a", b"12345"))
    bench.drive(bench.io.get("a"))
    assert bench.drive(bench.io.probe("b")) is None
    bench.timeline.end(is_included=True)
    bench.drive(bench.io.put("snapshot", b"123"))
    bench.timeline.begin(1, 0)
    bench.timeline.end(is_included=True)
    bench.finish()
    first, second = bench.records()
    assert (first.bytes_up, first.bytes_down, first.requests, first.misses) == (8, 5, {"get": 2, "put": 2}, 1)
    assert (second.bytes_up, second.requests) == (0, {})


def test_a_record_stays_small_however_many_requests_a_round_makes():
    bench = Bench()
    bench.timeline.begin(0, 0)
    for _ in range(5_000):
        bench.passes("get", 0.001)
        bench.passes("reduce", 0.002)
        bench.clock.advance(0.003)
    bench.timeline.end(is_included=True)
    bench.finish()
    (record,) = bench.records()
    assert record.phases["get"].count == 5_000
    assert record.phases["get"].busy_s == pytest.approx(5.0)
    assert all(len(phase.spans) <= timeline_module.MOST_SPANS for phase in record.phases.values())
    assert len(json.dumps(record.to_json())) < 5_000


def test_many_threads_may_tell_at_once():
    bench = Bench()
    bench.timeline.begin(0, 0)

    def tell() -> None:
        for number in range(500):
            bench.timeline.add("compute", number, number + 1)
            bench.io.spend("get", 0.0)
            assert bench.timeline.exchange_s == 0.0

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.timeline.end(is_included=True)
    bench.finish()
    assert bench.records()[0].phases["get"].count == 2_000


def test_a_record_survives_its_line():
    record = RoundRecord(
        1, 0, 7, 2, 1_700_000_000.5, 3.25, 1.125, True, False,
        {"put": PhaseTime(2.5, 1.5, 3, ((0.25, 1.0), (2.0, 0.5)))}, 10, 20, {"get": 3}, 1, 2,
    )  # fmt: skip
    assert RoundRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
