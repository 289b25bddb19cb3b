"""What the views read from a store anybody can write to: spoiled lines are passed over, never a crash."""

from __future__ import annotations

import json

import pytest

from atoll.reports.trace import chrome_trace
from atoll.rounds.keys import RoundKeys
from atoll.rounds.metrics import Outlook, Waiting, round_events, round_records, waiting_for
from atoll.rounds.timeline import PhaseTime, RoundRecord
from atoll.stores.memory import MemoryStore

KEYS = RoundKeys("r")
GOOD = RoundRecord(0, 0, 1, 0, 5.0, 2.0, 1.0, True, True, {"get": PhaseTime(1.0, 1.0, 1, ((0.0, 1.0),))}).to_json()
EVENT = {"event": "round_committed", "by": 0, "round": 1, "time": 5.0}
ODD = ["NaN", "Infinity", "-Infinity", "1e999", "1e300", "9" * 400, '"x"', f'"{"9" * 500}"', "null", "[]", "{}"]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["rank", "round", "time", "exchange_s", "exposed_s", "bytes_up", "phases", "requests"])
def test_a_spoiled_round_is_passed_over(name: str, odd: str) -> None:
    store = MemoryStore()
    spoiled = json.dumps(GOOD | {name: "HERE"}).replace('"HERE"', odd)
    store.put(KEYS.metrics(0, 0, 0), f"{spoiled}\n{json.dumps(GOOD)}\n".encode())
    found = round_records(store, "r")
    assert found[-1] == RoundRecord.from_json(GOOD)
    json.dumps(chrome_trace("r", found), allow_nan=False)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["by", "time", "round"])
def test_a_spoiled_event_is_passed_over(name: str, odd: str) -> None:
    store = MemoryStore()
    spoiled = json.dumps(EVENT | {name: "HERE"}).replace('"HERE"', odd)
    store.put(KEYS.events_prefix() + "00000.00000.000000.jsonl", f"{spoiled}\n{json.dumps(EVENT)}\n".encode())
    found = round_events(store, "r")
    assert EVENT in found
    json.dumps(chrome_trace("r", [], found), allow_nan=False)


def test_what_is_no_json_at_all_and_names_of_others_are_passed_over() -> None:
    store = MemoryStore()
    for prefix in (KEYS.metrics_prefix(), KEYS.events_prefix(), KEYS.commits_prefix(), KEYS.offers_prefix(0)):
        store.put(prefix + "README.txt", b"[" * 100_000)
    store.put(KEYS.metrics(0, 0, 0), b"[" * 100_000 + b"\n\xff\n" + json.dumps(GOOD).encode())
    assert round_records(store, "r") == [RoundRecord.from_json(GOOD)]
    assert round_events(store, "r") == []
    assert waiting_for(store, "r", 2) is None


@pytest.mark.parametrize("odd", [*(odd for odd in ODD if odd != "[]"), "[-1]", "[100000]", "[true]", "[[]]"])
@pytest.mark.parametrize("name", ["by", "for"])
def test_a_spoiled_word_on_whom_a_mean_is_waited_for_is_passed_over(name: str, odd: str) -> None:
    store = MemoryStore()
    store.put(KEYS.commit(4), b"")
    told = {"event": "waiting", "round": 4, "time": 5.0, "until": 9.0, "then": "give_up", "least": None}
    told |= {"by": 0, "for": [1]}
    spoiled = json.dumps(told | {"time": 6.0, name: "HERE"}).replace('"HERE"', odd)
    store.put(KEYS.events(0, 0, 0), f"{json.dumps(told)}\n{spoiled}\n".encode())
    assert waiting_for(store, "r", 2) == Waiting(4, (0,), (1,), Outlook(9.0, False, None), is_committed=True)


def test_the_word_of_a_process_that_was_replaced_counts_no_more() -> None:
    store = MemoryStore()
    told = {"event": "waiting", "by": 0, "time": 5.0, "until": 9.0, "then": "give_up", "least": None}
    store.put(KEYS.commit(4), b"")
    store.put(KEYS.claim(0, 0), b"")
    store.put(KEYS.events(0, 0, 0), json.dumps(told | {"round": 4, "for": [1]}).encode())
    kept = Waiting(4, (0,), (1,), Outlook(9.0, False, None), is_committed=True)
    assert waiting_for(store, "r", 2) == kept
    store.put(KEYS.claim(0, 1), b"")
    assert waiting_for(store, "r", 2) is None
    store.put(KEYS.offer(5, 0, 0), b"")
    store.put(KEYS.events(0, 0, 0), json.dumps(told | {"round": 5}).encode())
    assert waiting_for(store, "r", 2) == Waiting(5, (0,), (1,))
    store.put(KEYS.events(0, 1, 0), json.dumps(told | {"round": 5}).encode())
    assert waiting_for(store, "r", 2) == Waiting(5, (0,), (1,), Outlook(9.0, False, None))


def test_who_is_waited_for_and_waits_itself_is_not_the_one_to_blame() -> None:
    store = MemoryStore()
    store.put(KEYS.commit(4), b"")
    for by, others in ((0, [7]), (7, [5])):
        told = {"event": "waiting", "round": 4, "time": 5.0 + by, "until": 9.0, "then": "give_up", "least": None}
        store.put(KEYS.events(by, 0, 0), json.dumps(told | {"by": by, "for": others}).encode())
    assert waiting_for(store, "r", 8) == Waiting(4, (0, 7), (5,), Outlook(9.0, False, None), is_committed=True)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["round", "time", "until", "then", "least"])
def test_a_spoiled_outlook_is_passed_over(name: str, odd: str) -> None:
    store = MemoryStore()
    store.put(KEYS.offer(0, 0, 0), b"")
    told = {"event": "waiting", "by": 0, "round": 0, "time": 5.0, "until": 9.0, "then": "go_on", "least": 1}
    spoiled = json.dumps(told | {name: "HERE"}).replace('"HERE"', odd)
    store.put(KEYS.events(0, 0, 0), f"{json.dumps(told)}\n{spoiled}\n".encode())
    found = waiting_for(store, "r", 2)
    assert found is not None
    assert found.outlook == Outlook(9.0, True, None if (name, odd) == ("least", "null") else 1)
