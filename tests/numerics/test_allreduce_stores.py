"""The same bodies over a folder and a real S3 server: means by name, the outer loop, and torchft's DiLoCo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from allreduce_ranks import bits, side_by_side, values
from torchft_replicas import QUICK, our_managers, run_diloco, small_model, train_step

from atoll.registry import open_store
from atoll.training.allreduce import make_diloco_outer_loop
from services.fault_proxy import Fault, FaultProxy, creates
from services.stores import Service


@pytest.fixture
def s3(seaweed: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    # The server makes the bucket at the first write; until then there is nothing to list.
    open_store(seaweed.uri(seaweed.new_place())).put("first", b"")
    return seaweed


@pytest.fixture(params=["file", pytest.param("s3", marks=[pytest.mark.process, pytest.mark.server])])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URI of an empty store."""
    if request.param == "file":
        return (tmp_path / "store").as_uri()
    service: Service = request.getfixturevalue("s3")
    return service.uri(service.new_place())


def test_means_by_name_job_after_job(place):
    store = open_store(place)

    def body(ar: Any) -> list[bytes]:
        with ar:
            tensors = [values(ar.rank, (50_000,)), torch.tensor([ar.rank, 7]), values(ar.rank, dtype=torch.bfloat16)]
            return [bits(ar.allreduce(tensor, f"t{i}")) for i, tensor in enumerate(tensors)]

    expected = bits((values(0, (50_000,)) + values(1, (50_000,)) + values(2, (50_000,))) / 3)
    for _ in range(2):
        found = side_by_side(3, body, store=store, poll_interval_s=0.01)
        assert found[0] == found[1] == found[2]
        assert found[0][0] == expected
    assert [key.rpartition("/")[2] for key in store.list("allreduce/")] == ["000002.floor"]


@pytest.mark.training
def test_the_outer_loop(place):
    def body(ar: Any) -> bytes:
        model = small_model(seed=ar.rank)
        outer = make_diloco_outer_loop(model, ar)
        outer.agree()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        for round_no in range(3):
            train_step(model, inner, ar.rank, round_no)
            outer()
        return b"".join(bits(parameter) for parameter in model.parameters())

    first, second = side_by_side(2, body, store=open_store(place), poll_interval_s=0.01)
    assert first == second


@pytest.mark.training
def test_diloco_of_torchft_gives_the_bits_it_gives_in_memory(place):
    with our_managers(2) as make:
        expected = run_diloco(make, 2)
    with our_managers(2, store=open_store(place), tuning=QUICK) as make:
        found = run_diloco(make, 2)
    for ours, reference in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[0], reference[0], strict=True))


def parts(method: str, path: str, headers: dict[str, str]) -> bool:
    return method == "GET" and "/parts/" in path


FAULTS = {
    "lost request": lambda: Fault(creates, times=3, status=None),
    "lost answer": lambda: Fault(creates, times=3, status=None, is_after_effect=True),
    "server error after effect": lambda: Fault(
        creates, times=3, status=500, code="InternalError", is_after_effect=True
    ),
    "conflict": lambda: Fault(creates, times=2, status=409, code="ConditionalRequestConflict"),
    "throttled": lambda: Fault(times=6, status=503),
    "flipped bit": lambda: Fault(parts, times=2, spoil=lambda body: body[:-1] + bytes([body[-1] ^ 1])),
    "short body": lambda: Fault(parts, times=2, spoil=lambda body: body[: len(body) // 2]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_on_the_way_to_the_server_changes_nothing(fault, s3):
    mean = bits((values(0) + values(1)) / 2)
    with FaultProxy(s3.endpoint) as proxy:
        store = open_store(s3.uri(s3.new_place(), endpoint=proxy.url))

        def body(ar: Any) -> list[bytes]:
            found = [bits(ar.allreduce(values(ar.rank), "w"))]
            if ar.rank == 0:
                proxy.faults.append(FAULTS[fault]())
            return found + [bits(ar.allreduce(values(ar.rank), "w")) for _ in range(4)]

        assert side_by_side(2, body, store=store, poll_interval_s=0.01) == [[mean] * 5] * 2
        assert proxy.faults[0].times == 0, "the fault did happen"
