"""A fault proxy between real replicas and a real S3 server: the run ends right, or stops with an error's name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from offspring import Nursery
from real_replica import expected

from atoll.registry import open_store
from atoll.rounds.verify import verify
from services.fault_proxy import Fault, FaultProxy
from services.stores import Service

COUNT, ROUNDS = 3, 4
QUICK = {"max_retries": 1, "retry_timeout_s": 20.0, "connect_timeout_s": 2.0, "read_timeout_s": 0.5}
VERBS = ("PUT", "GET", "LIST", "DELETE")
TIMES = {"once": 1, "three in a row": 3}


def flip(body: bytes) -> bytes:
    """One bit in the middle is another."""
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 4]) + body[middle + 1 :] if body else body


def cut(body: bytes) -> bytes:
    return body[: len(body) // 2]


KINDS = {
    "500": Fault(status=500, code="InternalError"),
    "500 after the effect": Fault(status=500, code="InternalError", is_after_effect=True),
    "503": Fault(status=503, code="SlowDown"),
    "409": Fault(status=409, code="OperationAborted"),
    "silence": Fault(silence_s=4.0),
    "silence after the effect": Fault(silence_s=4.0, is_after_effect=True),
    "reset": Fault(is_reset=True),
    "reset after the effect": Fault(is_reset=True, is_after_effect=True),
    "answer cut short": Fault(spoil=cut),
    "upload cut short": Fault(spoil_upload=cut),
    "answer with a flipped bit": Fault(spoil=flip),
    "upload with a flipped bit": Fault(spoil_upload=flip),
}


def verb_of(method: str, path: str) -> str:
    return "LIST" if method == "GET" and "list-type=2" in path else method


def is_sensible(kind: str, verb: str) -> bool:
    """Only uploads have a body to spoil on the way up, only reading has one on the way down."""
    if kind.startswith("upload"):
        return verb == "PUT"
    return verb in ("GET", "LIST") if kind.startswith("answer") else True


def nth_request(verb: str, nth: int) -> Callable[[str, str, dict[str, str]], bool]:
    """The nth request of a verb, and that one's every repetition."""
    seen = 0
    chosen: str | None = None

    def meets(method: str, path: str, headers: dict[str, str]) -> bool:
        nonlocal seen, chosen
        if verb_of(method, path) != verb or ".atoll-probe" in path:
            return False
        seen += 1
        if seen == nth:
            chosen = path
        return path == chosen

    return meets


@pytest.fixture
def proxy(s3: Service) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def run(s3: Service, proxy: FaultProxy, nursery: Nursery, run_id: str) -> Callable[[], list[dict]]:
    nursery.environment = s3.environment
    place = s3.new_place()

    def run() -> list[dict]:
        uri = s3.uri(place, endpoint=proxy.url)
        common = {"uri": uri, "run_id": run_id, "world_size": COUNT, "rounds": ROUNDS, "options": QUICK}
        children = [nursery.start("real_replica:train", **common, rank=rank) for rank in range(COUNT)]
        ends = [child.wait().came for child in children]
        report = verify(open_store(s3.uri(place)), run_id)
        assert report.is_right, report.difference
        return ends

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_faults_on_every_verb_change_nothing(kind: str, proxy: FaultProxy, run: Callable[[], list[dict]]) -> None:
    for verb in VERBS:
        if is_sensible(kind, verb):
            proxy.faults += [
                replace(KINDS[kind], meets=nth_request(verb, 3 * n), times=times)
                for n, times in enumerate(TIMES.values(), start=1)
            ]
    ends = run()
    assert all(fault.used for fault in proxy.faults)
    assert {end.get("error") for end in ends} == {None}, ends
    assert {end["value"]["state"] for end in ends} == {expected(COUNT, ROUNDS)}


@pytest.mark.parametrize("kind", KINDS)
def test_faults_at_random_change_nothing_or_have_a_name(
    kind: str, proxy: FaultProxy, run: Callable[[], list[dict]]
) -> None:
    rng = random.Random(kind)
    rate = 0.01 if "silence" in kind else 0.05
    proxy.faults.append(
        replace(
            KINDS[kind],
            meets=lambda method, path, _: is_sensible(kind, verb_of(method, path)) and rng.random() < rate,
            times=float("inf"),
        )
    )
    for end in run():
        assert end.get("error", "StoreError") in NAMED
        assert "error" in end or end["value"]["state"] == expected(COUNT, ROUNDS)


@pytest.mark.parametrize("kind", ["503", "silence", "reset"])
def test_a_store_that_goes_away_for_good_is_an_error_in_its_time(
    kind: str, s3: Service, proxy: FaultProxy, nursery: Nursery, run_id: str
) -> None:
    """With the settings people have: only the patience of the rounds is short."""
    nursery.environment = s3.environment
    common = {"uri": s3.uri(s3.new_place(), endpoint=proxy.url), "run_id": run_id, "world_size": 2, "rounds": 3}
    away = nth_request("PUT", 12)
    is_away = False

    def goes_away(method: str, path: str, headers: dict[str, str]) -> bool:
        nonlocal is_away
        is_away = is_away or away(method, path, headers)
        return is_away

    silent = replace(KINDS[kind], meets=goes_away, times=float("inf"))
    proxy.faults.append(replace(silent, silence_s=60.0) if kind == "silence" else silent)
    common |= {"tuning": {"retry_s": 2.0}, "quorum": {"deadline_s": 5.0}}
    for child in [nursery.start("real_replica:train", **common, rank=rank) for rank in range(2)]:
        assert child.wait(30.0).error == "StoreUnavailable"


def test_a_list_with_a_flipped_bit_fences_nobody(proxy: FaultProxy, run: Callable[[], list[dict]]) -> None:
    """Every other look at the claims shows a successor that nobody has: in a record that would be caught by its sum."""
    looks = 0

    def meets(method: str, path: str, _: dict[str, str]) -> bool:
        nonlocal looks
        looks += verb_of(method, path) == "LIST" and "claims" in path
        return verb_of(method, path) == "LIST" and "claims" in path and looks % 2 == 0

    def succeeded(body: bytes) -> bytes:
        return body.replace(b".00000.json", b".00001.json")

    proxy.faults.append(Fault(meets, times=float("inf"), spoil=succeeded))
    ends = run()
    assert {end.get("error") for end in ends} == {None}, ends
    assert {end["value"]["state"] for end in ends} == {expected(COUNT, ROUNDS)}
    assert proxy.faults[0].used


def test_a_list_with_a_flipped_bit_makes_nobody_skip_a_number(
    s3: Service, proxy: FaultProxy, nursery: Nursery, run_id: str
) -> None:
    nursery.environment = s3.environment
    common = {"uri": s3.uri(s3.new_place(), endpoint=proxy.url), "run_id": run_id, "rank": 0, "world_size": 1}
    assert nursery.start("real_replica:train", **common, rounds=1).wait().value["incarnation"] == 0

    def lists_claims(method: str, path: str, _: dict[str, str]) -> bool:
        return verb_of(method, path) == "LIST" and "claims" in path

    proxy.faults.append(Fault(lists_claims, spoil=lambda body: body.replace(b"00000.00000.json", b"00000.00004.json")))
    assert nursery.start("real_replica:train", **common, rounds=2, attempt=1).wait().value["incarnation"] == 1
    assert proxy.faults[0].used


def test_an_answer_spoilt_on_its_way_does_not_condemn_the_store(s3: Service, proxy: FaultProxy) -> None:
    def reads_probe(method: str, path: str, _: dict[str, str]) -> bool:
        return method == "GET" and path.endswith("/twice")

    proxy.faults.append(Fault(reads_probe, times=2, spoil=flip))
    open_store(s3.uri(s3.new_place(), endpoint=proxy.url)).create("key", b"")
    assert proxy.faults[0].used == 2


NAMED = {"StoreError", "StoreUnavailable", "CorruptUpdate", "QuorumLost"}
