"""A run that starts from the agreed weights of another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diloco_toys import QUICK, batches, bits, contexts, loss_of, perceptron, side_by_side

import atoll
from atoll.errors import InvalidSpec, RoundError
from atoll.registry import open_store
from atoll.rounds.keys import RoundKeys
from atoll.rounds.origin import Origin, OriginCopy, read_origin
from atoll.rounds.weights import agreed_weights

pytestmark = pytest.mark.training


def train(ctx, *, rounds=3, make=perceptron):
    """The bits of the model when it has joined, and at the end."""
    model = make()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    with atoll.DiLoCo(model, inner, ctx, inner_steps=2, tuning=QUICK) as outer:
        joined = bits(model)
        for batch in outer.steps(batches(ctx.rank, 20), rounds=rounds):
            loss_of(model, batch).backward()
            inner.step()
            inner.zero_grad()
    return joined, bits(model)


@pytest.fixture
def source():
    """A run of two replicas, and its last bits."""
    ctxs = contexts(2, run_id="source")
    (_, end), _ = side_by_side(ctxs, train)
    return ctxs[0], end


def copied_to(ctx, run_id, round_no=None):
    OriginCopy.of(agreed_weights(ctx.store, ctx.run_id, round_no)).upload(ctx.store, run_id)


def test_the_new_run_has_another_number_of_replicas_and_begins_with_the_same_bits(source):
    ctx, end = source
    copied_to(ctx, "new")
    ctxs = [replace(c, from_run="source") for c in contexts(3, store=ctx.store_uri, run_id="new")]
    found = side_by_side(ctxs, train)
    assert [joined for joined, _ in found] == [end] * 3
    assert len({last for _, last in found}) == 1
    assert found[0][1] != end
    restarted = train(replace(ctxs[0], attempt=1), rounds=3)
    assert restarted[1] == found[0][1], "a restart continues with the agreed weights, not with those of the source"


def test_earlier_weights_and_another_type_can_be_chosen(source):
    ctx, _ = source
    copied_to(ctx, "new", 0)
    [new] = contexts(1, store=ctx.store_uri, run_id="new")
    joined, _ = train(replace(new, from_run="source"), make=lambda: perceptron(5, dtype=torch.bfloat16))
    assert joined == bits(perceptron(dtype=torch.bfloat16))


def test_a_model_that_does_not_fit_is_refused_with_the_differences(source):
    ctx, _ = source
    copied_to(ctx, "new")
    [new] = contexts(1, store=ctx.store_uri, run_id="new")
    with pytest.raises(InvalidSpec) as caught:
        train(replace(new, from_run="source"), make=lambda: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()))
    assert set(caught.value.fields) >= {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert RoundKeys("new").agreement() not in list(ctx.store.list("runs/new/"))


@pytest.mark.process
def test_launch_copies_the_weights_and_tells_the_replicas(source, tmp_path, monkeypatch):
    ctx, _ = source
    for key in ctx.store.list("runs/"):
        open_store(str(tmp_path / "store")).put(key, ctx.store.get(key))
    (tmp_path / "job.py").write_text("def f(ctx):\n    return [ctx.from_run, ctx.rounds_of]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    with pytest.raises(InvalidSpec) as caught:
        atoll.prepare("job:f", store="store", from_round=1)
    assert caught.value.fields == ("from_round",)
    with pytest.raises(RoundError) as far:
        atoll.prepare("job:f", store="store", from_run="source", from_round=9)
    assert far.value.reason == "gone"
    run = atoll.launch("job:f", store="store", from_run="source", run_id="new")
    run.wait(60.0)
    assert run.result().raise_for_failures().values == [["source", None]]
    origin, parts = read_origin(run.store, RoundKeys("new"))
    assert run.spec.task.origin == {"run": "source", "round": 3, "digest": origin.blob.digest}
    assert b"".join(parts) == b"".join(OriginCopy.of(agreed_weights(ctx.store, "source")).parts)
    assert Origin.open(origin.seal()) == origin
    assert atoll.attach("new", store=run.store.uri).spec == run.spec
    assert atoll.launch("job:f", store="store", from_run="source", run_id="new").was_there
