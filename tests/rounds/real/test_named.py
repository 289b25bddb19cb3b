"""Averages by name between real processes: right, or an error that names who is missing; and FORMAT.md tells how."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator

import pytest
import xxhash
from named_replica import NAMES, expected, payload
from offspring import Nursery, Place

from services.fault_proxy import Fault, FaultProxy
from services.stores import Service

EXCHANGE = "named_replica:exchange"


def test_all_get_what_all_gave_and_the_page_is_enough_to_read_it(place: Place, nursery: Nursery, run_id: str) -> None:
    common = {"uri": place.uri, "world_size": 3, "turns": 4, "space": run_id}
    children = [nursery.start(EXCHANGE, **common, rank=rank) for rank in range(3)]
    assert {child.wait().value for child in children} == {expected(3, 4)}
    objects = {key: bytes(place.store.get(key)) for key in place.store.list("allreduce/")}
    found = {(head["name"], head["generation"], head["rank"]): body for head, body in parts(objects, run_id, 3)}
    for name in NAMES:
        for rank in range(3):
            assert found[name, 3, rank] == payload(rank, 3, name)


def parts(objects: dict[str, bytes], space: str, world: int) -> Iterator[tuple[dict, bytes]]:
    """Every part, read with nothing but section 10 of the page."""
    prefix = f"allreduce/{space}/{world:05d}/"
    seats = [record(objects[f"{prefix}seats/000000.{rank:05d}.json"], "seat") for rank in range(world)]
    nonce = xxhash.xxh3_128_hexdigest("".join(f"{seat['session']} {seat['token']}\n" for seat in seats).encode())
    for key, data in objects.items():
        if "/parts/" not in key:
            continue
        head, body = frame(data, "part")
        place = f"{prefix}parts/000000-{nonce}/{escaped(head['name'])}/{head['generation']:010d}.{head['rank']:05d}"
        assert (key, head["session"]) == (place, nonce)
        terms = xxhash.xxh3_64_hexdigest(b"mean\nuint8 [40]\n")
        assert head["terms"] == [terms, ""]
        assert head["oldest"] <= head["call"]
        yield head, body


def escaped(name: str) -> str:
    if re.fullmatch("[a-z0-9][a-z0-9_-]{0,63}", name):
        return name
    readable = re.sub("[^a-z0-9]+", "-", name.lower()[:48]).strip("-")
    return f"%{readable}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def record(data: bytes, kind: str) -> dict:
    found = re.search(rb',"xxh3":"([0-9a-f]{16})"\}\Z', data)
    assert found
    assert xxhash.xxh3_64_hexdigest(data[: found.start()] + b"}") == found[1].decode()
    assert json.loads(data)["kind"] == kind
    return json.loads(data)


def frame(data: bytes, kind: str) -> tuple[dict, bytes]:
    magic, version, zero, size, zero_too, length = struct.unpack("<4sHHIIQ", data[:24])
    assert (magic, version, zero, zero_too, len(data)) == (b"ATOL", 1, 0, 0, 32 + size + length)
    head, body = json.loads(data[32 : 32 + size]), data[32 + size :]
    assert (head["kind"], head["xxh3"]) == (kind, xxhash.xxh3_64_hexdigest(body))
    return head, body


def test_a_rank_that_was_killed_is_named(place: Place, nursery: Nursery) -> None:
    common = {"uri": place.uri, "world_size": 3, "turns": 4, "timeout_s": 3.0}
    fate = ["kill", "before", "create", "*/weights/0000000002.*", 1]
    dead = nursery.start(EXCHANGE, **common, rank=1, fate=fate)
    others = [nursery.start(EXCHANGE, **common, rank=rank) for rank in (0, 2)]
    assert dead.wait().is_killed
    for child in others:
        assert child.wait().error == "RanksMissing"
        assert child.came["details"]["missing"] == [1]


@pytest.mark.parametrize("silence_s", [0.0, 60.0], ids=["503", "silence"])
def test_a_store_that_goes_away_for_good_is_an_error_in_its_time(
    s3: Service, nursery: Nursery, silence_s: float
) -> None:
    nursery.environment = s3.environment
    seen = 0

    def later(*_: object) -> bool:
        nonlocal seen
        seen += 1
        return seen > 40

    with FaultProxy(s3.endpoint) as proxy:
        proxy.faults.append(Fault(later, times=float("inf"), silence_s=silence_s))
        uri = s3.uri(s3.new_place(), endpoint=proxy.url)
        common = {"uri": uri, "world_size": 2, "turns": 50, "timeout_s": 4.0}
        for child in [nursery.start(EXCHANGE, **common, rank=rank) for rank in range(2)]:
            assert child.wait(30.0).error in ("StoreUnavailable", "RanksMissing")
