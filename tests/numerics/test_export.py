"""The agreed weights of a run, taken out of the store: the bits of the replicas, in files that other programs load."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diloco_toys import QUICK, SCATTERED, batches, contexts, loss_of, perceptron, side_by_side
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.errors import ConfigError, InvalidSpec, RoundError
from atoll.registry import open_store
from atoll.rounds.client import RoundClient
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Layout
from atoll.rounds.weights import agreed_weights, rounds_held, rounds_text
from atoll.training.weights import Weights

pytestmark = pytest.mark.training


class Normed(nn.Module):
    """Weights, averaged buffers and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = perceptron(), nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x)) * self.scale


def train(ctx, *, rounds=5, make=perceptron, kind=atoll.DiLoCo, **options):
    """The state of the model after each round, as its own tensors."""
    model = make()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen = []
    with kind(model, inner, ctx, **{"inner_steps": 2, "tuning": QUICK, **options}) as outer:
        for batch in outer.steps(batches(ctx.rank, 20), rounds=rounds):
            if len(seen) < outer.round:
                seen.append(copied(model))
            loss_of(model, batch).backward()
            inner.step()
            inner.zero_grad()
    return [*seen, copied(model)]


def copied(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(found, expected):
    assert found
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.shape == expected[name].shape
        assert tensor.view(torch.uint8).equal(expected[name].contiguous().view(torch.uint8)), name


def weights_of(ctx, round_no=None):
    return Weights(agreed_weights(ctx.store, ctx.run_id, round_no))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tuning": SCATTERED, "chunk": 1024, "codec": "int4"},
        {"fragments": 2, "delay": 1, "rounds": 7},
        {"kind": atoll.LocalSGD},
        {"make": lambda: perceptron(dtype=torch.bfloat16)},
        {"make": lambda: perceptron(dtype=torch.float64)},
        {"make": Normed},
    ],
    ids=["plain", "scattered", "fragments", "averaged", "bfloat16", "float64", "buffers"],
)
def test_exported_weights_are_those_of_the_replicas_bit_for_bit(tmp_path, options):
    ctxs = contexts(2)
    first, second = (states[-1] for states in side_by_side(ctxs, lambda ctx: train(ctx, **options)))
    weights = weights_of(ctxs[0])
    assert_same_bits(weights, first)
    assert weights.round_no == options.get("rounds", 5)
    weights.save(tmp_path / "model.safetensors")
    assert_same_bits(load_file(tmp_path / "model.safetensors"), second)


def test_every_round_that_the_store_still_has_can_be_exported_and_the_error_lists_them():
    [ctx] = contexts(1)
    states = train(ctx, rounds=9, checkpoint=3, snapshot=3)
    held = rounds_held(ctx.store, RoundKeys(ctx.run_id)).buildable()
    assert held[0] == 0
    assert held[-1] == 9
    assert 1 not in held
    for number in held[1:]:
        assert_same_bits(weights_of(ctx, number), states[number - 1] if number < 9 else states[-1])
    assert_same_bits(weights_of(ctx, 0), copied(perceptron()))
    for number, wanted in ((1, "gone"), (10, "gone")):
        with pytest.raises(RoundError) as caught:
            weights_of(ctx, number)
        assert (caught.value.reason, caught.value.round_no) == (wanted, number)
        assert rounds_text(held) in caught.value.hint


def test_rounds_are_listed_in_spans():
    assert rounds_text([0, 3, 4, 5, 9]) == "0, 3-5 and 9"
    assert rounds_text([7]) == "7"


def test_the_weights_of_a_running_run_are_those_of_its_last_round():
    [ctx] = contexts(1)
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.DiLoCo(model, inner, ctx, inner_steps=1, tuning=QUICK) as outer:
        with pytest.raises(RoundError) as caught:
            weights_of(ctx)
        assert caught.value.reason == "no_round"
        for number, batch in enumerate(outer.steps(batches(0, 5), rounds=3)):
            if number:
                assert_same_bits(weights_of(ctx), copied(model))
            loss_of(model, batch).backward()
            inner.step()
    assert weights_of(ctx).round_no == 3


def test_a_run_without_rounds_or_without_an_outer_step_has_no_weights():
    [ctx] = contexts(1)
    ctx.store.put("runs/toy/run.json", b"{}")
    with pytest.raises(RoundError) as caught:
        weights_of(ctx)
    assert caught.value.reason == "not_joined_yet"
    layout = Layout.of([("w", [4], "float32")])
    with RoundClient(ctx.store, "toy", 0, 1, layouts=[layout]) as client:
        client.join([np.zeros(4, np.float32).tobytes()])
        client.exchange(0, np.ones(4, np.float32), weight=1.0)
    with pytest.raises(RoundError) as caught:
        weights_of(ctx)
    assert caught.value.reason == "no_outer_step"


def test_a_file_is_replaced_only_by_force_and_a_failed_export_leaves_nothing(tmp_path):
    [ctx] = contexts(1)
    train(ctx, rounds=1)
    target = tmp_path / "sub" / "model.safetensors"
    weights_of(ctx).save(target)
    before = target.read_bytes()
    with pytest.raises(ConfigError) as caught:
        weights_of(ctx).save(target)
    assert caught.value.reason == "exists"
    train(replace(ctx, run_id="other"), rounds=2)
    weights_of(replace(ctx, run_id="other")).save(target, force=True)
    assert target.read_bytes() != before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError) as caught:
        weights_of(ctx).save(tmp_path / "file" / "model.safetensors")
    assert caught.value.reason == "cannot_write"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "model.safetensors", "sub"]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> SimpleNamespace:
    """A small GPT-2 with frozen embeddings that two replicas trained, and the folder that it came from."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(3)
    GPT2LMHeadModel(config).save_pretrained(folder / "base")
    (folder / "base" / "tokenizer.json").write_text("{}")
    ctxs = contexts(2, store=str(folder / "store"), run_id="gpt")

    models = [GPT2LMHeadModel.from_pretrained(folder / "base") for _ in ctxs]  # which threads cannot do

    def body(ctx):
        model = models[ctx.rank]
        model.transformer.wpe.weight.requires_grad = False
        inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        tokens = torch.arange(17) * (ctx.rank + 5) % 61
        with atoll.DiLoCo(model, inner, ctx, inner_steps=2, tuning=QUICK) as outer:
            for batch in outer.steps([tokens[None, :16]], rounds=3):
                model(batch, labels=batch).loss.backward()
                inner.step()
                inner.zero_grad()
        return copied(model)

    trained, _ = side_by_side(ctxs, body)
    return SimpleNamespace(folder=folder, base=folder / "base", trained=trained, ctx=ctxs[0], kind=GPT2LMHeadModel)


def test_a_small_gpt2_is_loaded_by_from_pretrained(gpt2, tmp_path):
    weights = weights_of(gpt2.ctx)
    assert weights.has_frozen
    assert weights.save(tmp_path / "out", like=gpt2.base) == ["transformer.wpe.weight"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(p.name for p in gpt2.base.iterdir())
    loaded = gpt2.kind.from_pretrained(tmp_path / "out")
    assert_same_bits(copied(loaded), gpt2.trained)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_a_folder_of_the_model_without_its_head_has_other_names_and_is_loaded_too(gpt2, tmp_path):
    bare = gpt2.kind.from_pretrained(gpt2.base).transformer
    bare.save_pretrained(tmp_path / "bare")  # `wte.weight` for `transformer.wte.weight`, as on the Hub
    weights = weights_of(gpt2.ctx)
    assert weights.save(tmp_path / "out", like=tmp_path / "bare") == ["wpe.weight"]
    assert_same_bits(copied(gpt2.kind.from_pretrained(tmp_path / "out")), gpt2.trained)
    loaded = type(bare).from_pretrained(tmp_path / "out")
    assert_same_bits(copied(loaded), {name.removeprefix("transformer."): t for name, t in gpt2.trained.items()})

    # A run of the model without its head, and the folder of the whole model.
    weights._tensors = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    assert weights.save(tmp_path / "whole", like=gpt2.base) == ["transformer.wpe.weight"]
    assert_same_bits(copied(gpt2.kind.from_pretrained(tmp_path / "whole")), gpt2.trained)


@pytest.mark.parametrize("has_frozen", [False, True])
def test_a_second_copy_of_a_shared_parameter_in_the_folder_gets_its_new_values(gpt2, tmp_path, has_frozen):
    from safetensors.torch import save_file

    shutil.copytree(gpt2.base, tmp_path / "like")
    tensors = load_file(gpt2.base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    tensors["zeros"] = tensors["transformer.ln_f.bias"].clone()
    save_file(tensors, tmp_path / "like" / "model.safetensors", metadata={"format": "pt"})
    weights = weights_of(gpt2.ctx)
    weights.has_frozen = has_frozen
    taken = weights.save(tmp_path / "out", like=tmp_path / "like")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert taken == [*(["lm_head.weight"] if has_frozen else []), "transformer.wpe.weight", "zeros"]
    assert found["zeros"].equal(tensors["zeros"])
    assert found["lm_head.weight"].equal(tensors["lm_head.weight"]) is has_frozen
    assert found["lm_head.weight"].equal(found["transformer.wte.weight"]) is not has_frozen


def test_a_file_alone_and_the_code_that_made_the_model_are_enough(gpt2, tmp_path):
    weights_of(gpt2.ctx).save(tmp_path / "model.safetensors")
    model = gpt2.kind.from_pretrained(gpt2.base)
    result = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not result.unexpected_keys
    assert_same_bits(copied(model), gpt2.trained)


def test_a_folder_that_does_not_fit_is_refused_with_every_reason(gpt2, tmp_path):
    from safetensors.torch import save_file

    like = tmp_path / "like"
    with pytest.raises(ConfigError) as caught:
        weights_of(gpt2.ctx).save(tmp_path / "out", like=like)
    assert caught.value.reason == "like"
    like.mkdir()
    (like / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        weights_of(gpt2.ctx).save(tmp_path / "out", like=like)
    assert caught.value.reason == "like"
    tensors = load_file(gpt2.base / "model.safetensors")
    tensors["transformer.wte.weight"] = torch.zeros(3, 3)
    del tensors["transformer.ln_f.bias"]
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, like / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (like / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidSpec) as wrong:
        weights_of(gpt2.ctx).save(tmp_path / "out", like=like)
    assert set(wrong.value.fields) == {"transformer.ln_f.bias", "transformer.wte.weight"}
    assert not (tmp_path / "out").exists()


def test_the_runs_of_an_older_version_are_exported_too():
    store = open_store(str(Path(__file__).parents[1] / "wire_v1" / "store"))
    runs = [key.split("/")[1] for key in store.list("runs/") if key.endswith("/sync/agreement.json")]
    assert runs
    for run_id in runs:
        assert np.isfinite(agreed_weights(store, run_id).values).all()
