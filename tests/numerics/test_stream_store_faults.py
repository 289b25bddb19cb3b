"""Streaming over a real S3 server that loses, cuts and falsifies answers: the bits of a run without faults."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from diloco_toys import SCATTERED, batches, contexts, side_by_side, train
from torch import nn

import atoll
from atoll.registry import open_store
from services.fault_proxy import Fault, FaultProxy
from services.stores import Service

pytestmark = pytest.mark.training

COUNT, ROUNDS = 3, 6
STREAMS = {
    "blocking": {"inner_steps": 2},
    "both": {"inner_steps": 4, "fragments": 2, "delay": 1, "alpha": 0.25},
    "eager": {"inner_steps": 2, "eager": True},
}
SPOILT: list[Callable[[bytes], bytes]] = [
    lambda body: body[: len(body) // 2],
    lambda body: body[:-1] + bytes([body[-1] ^ 4]) if body else body,
]


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def trained(uri: str | None, stream: dict[str, object], codec: str) -> set[bytes]:
    """The final weights of all replicas."""

    def body(ctx: atoll.ReplicaContext) -> bytes:
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        options = {"codec": codec, "chunk": 1024, "tuning": SCATTERED, "checkpoint": None, **stream}
        with atoll.DiLoCo(model, inner, ctx=ctx, **options) as outer:
            return train(outer, model, inner, batches(ctx.rank, 40), ROUNDS)[-1]

    return set(side_by_side(contexts(COUNT, store=uri), body))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("stream", STREAMS)
def test_faults_on_the_way_change_no_bit(
    stream: str,
    codec: str,
    seaweed: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    open_store(seaweed.uri(seaweed.new_place())).put("first", b"")  # the server makes the bucket at the first write
    rng = random.Random(f"{stream} {codec}")

    def meets(method: str, path: str, headers: dict[str, str]) -> bool:
        return method == "GET" and "/rounds/" in path and rng.random() < 0.05

    with FaultProxy(seaweed.endpoint) as proxy:
        proxy.faults += [Fault(meets, times=1000, spoil=spoil) for spoil in SPOILT]
        proxy.faults += [Fault(meets, times=1000, is_reset=True), Fault(meets, times=1000, status=503)]
        found = trained(seaweed.uri(seaweed.new_place(), endpoint=proxy.url), STREAMS[stream], codec)
        assert sum(fault.used for fault in proxy.faults) > 10
    assert found == trained(None, STREAMS[stream], codec)
    assert len(found) == 1
