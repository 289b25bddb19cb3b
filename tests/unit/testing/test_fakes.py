"""The fake clock and the faulty store do what they are told, and count."""

from __future__ import annotations

import pytest

from atoll.errors import KeyExists, KeyNotFound, StoreRefused, StoreUnavailable
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FakeClock, FaultyStore


def test_sleeping_is_the_only_thing_that_moves_the_clock() -> None:
    clock = FakeClock(start=1000.0)
    clock.sleep(2.5)
    clock.advance(1.0)
    assert (clock.time(), clock.monotonic(), clock.slept) == (1003.5, 3.5, [2.5])


def test_what_is_due_happens_at_its_own_moment_in_order() -> None:
    clock, seen = FakeClock(), []
    clock.call_at(5.0, lambda: seen.append(("five", clock.monotonic())))
    clock.call_at(2.0, lambda: seen.append(("two", clock.monotonic())))
    clock.call_at(9.0, lambda: seen.append(("nine", clock.monotonic())))
    clock.sleep(6.0)
    assert seen == [("two", 2.0), ("five", 5.0)]
    assert clock.monotonic() == 6.0


def test_on_sleep_is_told_before_time_passes() -> None:
    clock = FakeClock()
    seen: list[tuple[float, float]] = []
    clock.on_sleep = lambda seconds: seen.append((seconds, clock.monotonic()))
    clock.sleep(3.0)
    assert seen == [(3.0, 0.0)]


def test_a_fault_before_the_effect_leaves_no_trace() -> None:
    store = FaultyStore(MemoryStore())
    store.fail("put", "a*", nth=2)
    store.put("a1", b"x")
    with pytest.raises(StoreUnavailable, match="`a2`"):
        store.put("a2", b"x")
    store.put("a3", b"x")
    assert list(store.list()) == ["a1", "a3"]


def test_a_fault_after_the_effect_loses_only_the_answer() -> None:
    store = FaultyStore(MemoryStore())
    store.fail("create", after_effect=True)
    with pytest.raises(StoreUnavailable):
        store.create("a", b"x")
    with pytest.raises(KeyExists):
        store.create("a", b"y")
    assert store.get("a") == b"x"


def test_a_refusal_can_be_lost_on_the_way_too() -> None:
    store = FaultyStore(MemoryStore())
    store.create("a", b"x")
    store.fail("create", after_effect=True)
    with pytest.raises(StoreUnavailable):
        store.create("a", b"y")


def test_a_fault_can_be_of_any_kind_and_last_for_ever() -> None:
    store = FaultyStore(MemoryStore())
    store.fail("get", times=None, error=StoreRefused)
    for _ in range(3):
        with pytest.raises(StoreRefused):
            store.get("a")
    store.heal()
    with pytest.raises(KeyNotFound):
        store.get("a")


def test_a_delay_passes_on_the_clock() -> None:
    clock = FakeClock()
    store = FaultyStore(MemoryStore(), clock=clock)
    store.delay(7.0, "put", "slow/*")
    store.put("slow/a", b"x")
    store.put("fast/a", b"x")
    assert clock.slept == [7.0]
    with pytest.raises(ValueError, match="clock"):
        FaultyStore(MemoryStore()).delay(1.0)


def test_what_is_read_can_be_spoiled_and_the_object_is_not() -> None:
    store = FaultyStore(MemoryStore())
    store.put("a", b"\x00\x00\x00\x00")
    store.flip("a", bit=10)
    store.truncate("a", nth=2)
    assert [store.get("a"), store.get("a"), store.get("a")] == [b"\x00\x04\x00\x00", b"\x00\x00", bytes(4)]


def test_requests_and_bytes_are_counted() -> None:
    store = FaultyStore(MemoryStore())
    store.put("a", [b"123", b"45"])
    store.create("b", b"123")
    store.get("a", length=4)
    list(store.list())
    store.delete("a")
    traffic = store.traffic
    assert traffic.requests == {"put": 1, "create": 1, "get": 1, "list": 1, "delete": 1}
    assert (traffic.bytes_up, traffic.bytes_down) == ({"put": 5, "create": 3}, {"get": 4})


def test_before_sees_every_request() -> None:
    store, seen = FaultyStore(MemoryStore()), []
    store.before = lambda verb, key: seen.append((verb, key))
    store.put("a", b"x")
    store.list("p/")
    assert seen == [("put", "a"), ("list", "p/")]
