"""Streaming DiLoCo against plain arithmetic and against torchft: every bit of every replica after every step."""

from __future__ import annotations

import random
import time

import pytest
import torch
from diloco_toys import QUICK, SCATTERED, batches, bits, contexts, loss_of, perceptron, side_by_side
from stream_reference import simulate
from torch import nn

import atoll
from atoll.errors import ConfigError, Conflict, InvalidSpec
from atoll.registry import open_store
from atoll.rounds.keys import RoundKeys
from atoll.rounds.records import Agreement
from atoll.rounds.verify import verify
from atoll.training.model import balanced

pytestmark = pytest.mark.training

STEPS = 60


def toy() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = perceptron()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def streamed(replicas, *, rounds: int, **options) -> list[tuple[list[bytes], bytes, str]]:
    """For each replica: the bits of its model after each step, at the end, and the digest of the agreed state."""

    def body(ctx: atoll.ReplicaContext) -> tuple[list[bytes], bytes, str]:
        model, inner = toy()
        history: list[bytes] = []
        with atoll.DiLoCo(model, inner, ctx, **{"tuning": QUICK, "codec": "fp32", "snapshot": 99, **options}) as outer:
            for batch in outer.steps(batches(ctx.rank, STEPS), rounds=rounds):
                if outer.inner_step:
                    history.append(bits(model))
                loss_of(model, batch).backward()
                inner.step()
                inner.zero_grad()
            digest = outer.digest
        return history, bits(model), digest

    return side_by_side(replicas, body)


def fragments_of(uri: str) -> list[list[str]]:
    agreement = Agreement.open(open_store(uri).get(RoundKeys("toy").agreement()))
    return [[tensor.name for tensor in layout.tensors] for layout in agreement.layouts]


@pytest.mark.parametrize("tuning", [QUICK, SCATTERED])
@pytest.mark.parametrize(
    ("fragments", "delay", "alpha"),
    [(1, 0, 0.5), (1, 3, 0.0), (1, 6, 0.5), (2, 0, 0.0), (2, 1, 0.5), (2, 3, 0.25), (3, 2, 0.0), (3, 1, 1.0)],
)
def test_streaming_is_the_paper_to_the_bit(fragments, delay, alpha, tuning):
    replicas, rounds = contexts(2), 4 * fragments
    found = streamed(
        replicas, rounds=rounds, inner_steps=6, fragments=fragments, delay=delay, alpha=alpha, tuning=tuning
    )
    names = fragments_of(replicas[0].store_uri)
    assert len(names) == fragments
    data = [batches(rank, STEPS) for rank in range(2)]
    expected = simulate(toy, data, names, stride=6 // fragments, delay=delay, alpha=alpha, rounds=rounds)
    for (history, final, _), replica in zip(found, expected, strict=True):
        assert history == replica.history[:-1]
        assert final == bits(replica.model)
    assert found[0][1:] == found[1][1:]
    report = verify(open_store(replicas[0].store_uri), "toy")
    assert (report.difference, report.rounds) == (None, rounds)
    assert report.states >= rounds


@pytest.mark.parametrize(("fragments", "delay"), [(1, None), (1, 2), (2, None), (3, 1)])
def test_eager_updates_are_their_rule_to_the_bit(fragments, delay):
    replicas, rounds = contexts(2), 4 * fragments
    found = streamed(replicas, rounds=rounds, inner_steps=6, fragments=fragments, delay=delay, eager=True)
    names = fragments_of(replicas[0].store_uri)
    data = [batches(rank, STEPS) for rank in range(2)]
    stride = 6 // fragments
    expected = simulate(toy, data, names, stride=stride, delay=delay or stride, eager=True, rounds=rounds)
    for (history, final, _), replica in zip(found, expected, strict=True):
        assert history == replica.history[:-1]
        assert final == bits(replica.model)
    assert found[0][1:] == found[1][1:]
    assert verify(open_store(replicas[0].store_uri), "toy").is_right


def test_live_weights_differ_between_replicas_while_the_agreed_state_does_not():
    """Otherwise the tests above would not tell streaming from blocking."""
    first, second = streamed(contexts(2), rounds=6, inner_steps=6, fragments=2, delay=2)
    assert all(a != b for a, b in zip(first[0], second[0], strict=True))
    assert first[1:] == second[1:]


@pytest.mark.parametrize("options", [{"fragments": 2, "delay": 1}, {"fragments": 2, "delay": 3}, {"eager": True}])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_replicas_agree_after_every_round_whatever_the_codec_and_the_delays(codec, options):
    def body(ctx: atoll.ReplicaContext) -> list[str]:
        model = perceptron(seed=ctx.rank)  # different: the agreed weights must win
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        chance = random.Random(ctx.rank)
        history = []
        settings = {"inner_steps": 6, "codec": codec, "tuning": SCATTERED, "snapshot": 99, **options}
        with atoll.DiLoCo(model, inner, ctx, **settings) as outer:
            history.append(outer.digest)
            for batch in batches(ctx.rank, 51, size=8 + 4 * ctx.rank):  # other weights in the mean
                time.sleep(chance.random() * 0.005)  # who is late differs from round to round
                loss_of(model, batch).backward()
                inner.step()
                inner.zero_grad()
                if outer.step(weight=float(len(batch[0]))) is not None:
                    history.append(outer.digest)
        return [*history, outer.digest]

    replicas = contexts(3)
    histories = side_by_side(replicas, body)
    assert histories[0] == histories[1] == histories[2]
    rounds = 51 * options.get("fragments", 1) // 6
    assert len(set(histories[0])) == rounds + 1
    report = verify(open_store(replicas[0].store_uri), "toy")
    assert (report.difference, report.rounds, report.updates) == (None, rounds, 3 * rounds)
    assert report.means > 0


def test_without_fragments_and_delay_it_is_the_blocking_loop():
    plain = streamed(contexts(2), rounds=5, inner_steps=4)
    spelled = streamed(contexts(2), rounds=5, inner_steps=4, fragments=1, delay=0, alpha=0.0)
    assert plain == spelled


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_live_weights_are_those_of_torchft(delay, alpha):
    """torchft begins an exchange `delay` steps before the boundary we begin it at; it is let in that much later."""
    from torchft import local_sgd

    from atoll.training.torchft.manager import Manager

    [ctx] = contexts(1)
    [(history, _, _)] = streamed([ctx], rounds=8, inner_steps=6, fragments=2, delay=delay, alpha=alpha)
    model, inner = toy()
    parts = [
        nn.ParameterList([dict(model.named_parameters())[n] for n in names]) for names in fragments_of(ctx.store_uri)
    ]
    manager = Manager(f"{ctx.store_uri}-torchft", 0, 1, run_id="toy")
    nesterov = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    theirs = local_sgd.DiLoCo(
        manager, parts, inner, nesterov, sync_every=6, fragment_sync_delay=delay, fragment_update_alpha=alpha
    )
    manager.disallow_state_dict_read()  # joins now: later it would take back the steps that come first here
    manager.allow_state_dict_read()
    data, expected = batches(0, STEPS), []
    for step, batch in enumerate(data[: len(history)]):
        if step == delay:
            theirs.__enter__()
        loss_of(model, batch).backward()
        inner.step()
        inner.zero_grad()
        expected.append(bits(model))
    theirs.__exit__(None, None, None)
    manager.shutdown()
    assert history == expected


def test_fragments_are_whole_tensors_of_about_equal_size():
    assert balanced([5, 1, 9, 2, 3], 1) == [[0, 1, 2, 3, 4]]
    assert balanced([5, 1, 9, 2, 3], 2) == [[0, 3, 4], [1, 2]]
    sizes = [10, 10, 10, 1, 1, 1, 0]
    groups = balanced(sizes, 3)
    assert sorted(i for group in groups for i in group) == list(range(7))
    assert [sum(sizes[i] for i in group) for group in groups] == [11, 11, 11]
    assert all(group == sorted(group) for group in groups)
    with pytest.raises(ConfigError, match=r"fragments=4: .*\b3\b"):
        balanced([3, 0, 3, 3], 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 4}, "fragments=4: .*inner_steps=6"),
        ({"fragments": 0}, "fragments=0"),
        ({"fragments": 7}, "fragments=7"),
        ({"delay": 7}, "delay=7.*= 6"),
        ({"fragments": 3, "delay": 3}, "delay=3.*= 2"),
        ({"delay": -1}, "delay=-1"),
        ({"delay": 1.5}, "delay=1.5"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"alpha": 0.0, "delay": 6}, "alpha=0.*delay=6"),
        ({"eager": "no"}, "eager='no'"),
        ({"error_feedback": "yes"}, "error_feedback='yes'"),
        ({"codec": 4}, "codec=4"),
        ({"outer": "nesterov"}, "outer='nesterov'"),
        ({"chunk": 0}, "chunk=0: .*1024"),
        ({"chunk": 1000}, "chunk=1000: .*1024"),
        ({"eager": True, "delay": 0}, "eager"),
        ({"eager": True, "alpha": 0.5}, "alpha=0.5"),
        ({"fragments": 6}, r"fragments=6: .*\b4\b"),
    ],
)
def test_settings_that_make_no_stream_are_refused_before_anything_happens(options, message):
    model, inner = toy()
    [ctx] = contexts(1)
    with pytest.raises(ConfigError, match=message):
        atoll.DiLoCo(model, inner, ctx, inner_steps=6, tuning=QUICK, **options)
    assert not list(ctx.store.list())


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(InvalidSpec) as caught:
        atoll.DiLoCo(*toy(), contexts(1)[0], inner_steps=6, fragments=4, alpha=2.0)
    assert caught.value.fields == ("fragments", "alpha")


def test_replicas_that_overlap_differently_are_told():
    first, second = contexts(2)
    atoll.DiLoCo(*toy(), first, inner_steps=4, delay=2, tuning=QUICK).close()
    with pytest.raises(Conflict) as caught:
        atoll.DiLoCo(*toy(), second, inner_steps=4, delay=3, tuning=QUICK)
    assert [line.partition(":")[0] for line in caught.value.differences] == ["stream.delay"]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.inner(x))))


@pytest.mark.parametrize("options", [{"delay": 2}, {"eager": True}, {"delay": 1, "outer": atoll.Average()}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_statistics_go_with_the_fragments_and_the_end_is_the_same_everywhere(options, dtype):
    replicas = contexts(2)

    def body(ctx: atoll.ReplicaContext) -> tuple[bytes, list[float]]:
        model = Normed().to(dtype)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        with atoll.DiLoCo(model, inner, ctx, inner_steps=6, fragments=3, tuning=QUICK, snapshot=99, **options) as outer:
            for batch in outer.steps(batches(ctx.rank, STEPS), rounds=15):
                loss = loss_of(model, batch)
                loss.backward()
                inner.step()
                inner.zero_grad()
                losses.append(loss.item())
        assert all(torch.isfinite(t.float()).all() for t in model.state_dict().values())
        return b"".join(t.float().numpy().tobytes() for n, t in model.state_dict().items() if "num" not in n), losses

    (first, losses), (second, _) = side_by_side(replicas, body)
    assert first == second
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    agreement = Agreement.open(open_store(replicas[0].store_uri).get(RoundKeys("toy").agreement()))
    assert len(agreement.settings["averaged_from"]) == 3
    report = verify(open_store(replicas[0].store_uri), "toy")
    assert (report.difference, report.rounds) == (None, 15)
    assert report.states >= 15


def test_each_update_weighs_all_that_was_trained_of_its_fragment():
    [ctx] = contexts(1)
    model, inner = toy()
    weighed = []
    with atoll.DiLoCo(model, inner, ctx, inner_steps=6, fragments=3, delay=1, tuning=QUICK) as outer:
        for step, batch in enumerate(batches(0, 25)):
            loss_of(model, batch).backward()
            inner.step()
            outcome = outer.step(weight=10.0 if step < 6 else 1.0)
            weighed += [] if outcome is None else [outcome.weights[0]]
    # Fragment after fragment: the first cycle is shorter, then each covers six steps.
    assert weighed[:6] == [20.0, 40.0, 60.0, 2 + 40.0, 4 + 20.0, 6.0]


def test_the_count_of_inner_steps_does_not_depend_on_what_is_under_way():
    [ctx] = contexts(1)
    model, inner = toy()
    with atoll.DiLoCo(model, inner, ctx, inner_steps=6, fragments=2, delay=2, tuning=QUICK) as outer:
        counted = []
        for batch in batches(0, 20):
            loss_of(model, batch).backward()
            inner.step()
            outer.step()
            counted.append(outer.inner_step)
        assert counted == list(range(1, 21))
        assert outer.round == 6


def test_streaming_learns_about_as_well_as_blocking():
    def final_loss(**options) -> float:
        def body(ctx: atoll.ReplicaContext) -> float:
            model, inner = toy()
            with atoll.DiLoCo(model, inner, ctx, tuning=QUICK, checkpoint=None, **options) as outer:
                rounds = 20 * options.get("fragments", 1)
                for batch in outer.steps(batches(ctx.rank, 200), rounds=rounds):
                    loss_of(model, batch).backward()
                    inner.step()
                    inner.zero_grad()
            with torch.no_grad():
                return sum(loss_of(model, batch).item() for batch in batches(9, 20)) / 20

        return side_by_side(contexts(2), body)[0]

    untrained = sum(loss_of(perceptron(), batch).item() for batch in batches(9, 20)) / 20
    blocking = final_loss(inner_steps=8)
    assert blocking < 0.3 * untrained
    for options in ({"fragments": 2, "delay": 2}, {"eager": True}, {"fragments": 4, "delay": 2, "alpha": 0.0}):
        assert final_loss(inner_steps=8, **options) < 0.4 * untrained, options
