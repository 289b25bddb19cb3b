"""The mean by name, compared with plain formulas: every dtype, shape and way a tensor can lie in memory."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from allreduce_ranks import bits, side_by_side, values

from atoll.errors import ConfigError, InvalidSpec
from atoll.stores.memory import MemoryStore
from atoll.testing.store_contract import unpickling_forbidden
from atoll.training.allreduce import ObjectStoreAllReduce


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_rank_gets_the_sum_in_rank_order_divided_once(world_size):
    found = side_by_side(world_size, lambda ar: ar.allreduce(values(ar.rank), "w"))
    total = values(0)
    for rank in range(1, world_size):
        total = total + values(rank)
    assert {bits(tensor) for tensor in found} == {bits(total / world_size)}
    oracle = np.mean([values(rank).double().numpy() for rank in range(world_size)], axis=0)
    np.testing.assert_allclose(found[0].double().numpy(), oracle, rtol=1e-5, atol=1e-5)


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_summed_wide_and_rounded_once(dtype):
    def own(rank):
        return values(rank).clamp(-100, 100).to(dtype)

    found = side_by_side(3, lambda ar: ar.allreduce(own(ar.rank), "w"))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = ((own(0).to(wide) + own(1).to(wide) + own(2).to(wide)) / 3).to(dtype)
    assert {bits(tensor) for tensor in found} == {bits(expected)}
    assert found[0].dtype == dtype


def test_float16_does_not_overflow_on_the_way():
    found = side_by_side(4, lambda ar: ar.allreduce(torch.full((2,), 60_000.0, dtype=torch.float16), "w"))
    assert found[0].tolist() == [60_000.0, 60_000.0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_are_averaged_part_by_part_also_when_conjugated(dtype):
    def own(rank):
        return torch.complex(values(rank, dtype=torch.float64), values(rank, seed=1, dtype=torch.float64)).to(dtype)

    found = side_by_side(3, lambda ar: ar.allreduce(own(ar.rank).conj(), "w"))
    expected = (own(0) + own(1) + own(2)).conj() / 3
    torch.testing.assert_close(found[0].resolve_conj(), expected.resolve_conj())
    assert len({bits(tensor.resolve_conj()) for tensor in found}) == 1


WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_mean_of_whole_numbers_is_exact_and_rounded_half_to_even(dtype, world_size):
    limits, numbers = torch.iinfo(dtype), str(dtype).removeprefix("torch.")
    rows = [[limits.max, limits.min, 1, 2, 7, limits.max], [limits.max, limits.min, 2, 3, 0, limits.max - 1],
            [limits.max - 1, limits.min + 1, 2, 2, 0, limits.min]]  # fmt: skip
    found = side_by_side(world_size, lambda ar: ar.allreduce(torch.from_numpy(np.array(rows[ar.rank], numbers)), "w"))
    expected = [round(Fraction(sum(column), world_size)) for column in zip(*rows[:world_size], strict=True)]
    assert [tensor.numpy().tolist() for tensor in found] == [expected] * world_size


def test_truth_is_what_most_ranks_say():
    rows = [[True, False, True], [True, False, False], [False, False, True], [True, True, False]]
    found = side_by_side(3, lambda ar: ar.allreduce(torch.tensor(rows[ar.rank]), "w"))
    assert [tensor.tolist() for tensor in found] == [[True, False, True]] * 3
    evenly_split = side_by_side(4, lambda ar: ar.allreduce(torch.tensor(rows[ar.rank]), "w"))
    assert evenly_split[0].tolist() == [True, False, False]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)], ids=str)
def test_any_shape(shape):
    found = side_by_side(2, lambda ar: ar.allreduce(values(ar.rank, shape), "w"))
    assert bits(found[0]) == bits(found[1]) == bits((values(0, shape) + values(1, shape)) / 2)
    assert found[0].shape == shape


def _transposed(base):
    return base.reshape(8, 8).t()


def _every_other(base):
    return base[::2]


def _inside_out(base):
    return base.reshape(4, 4, 4).permute(2, 0, 1)


@pytest.mark.parametrize("view", [_transposed, _every_other, _inside_out])
def test_tensors_that_do_not_lie_in_one_piece_are_changed_where_they_lie(view):
    def body(ar):
        base = values(ar.rank)
        assert not view(base).is_contiguous()
        assert ar.allreduce(part := view(base), "w") is part
        return base

    found = side_by_side(2, body)
    expected = values(0)
    view(expected).copy_((view(values(0)) + view(values(1))) / 2)
    assert bits(found[0]) == bits(expected)


def test_a_parameter_is_changed_in_place_and_keeps_its_gradient_history():
    def body(ar):
        parameter = torch.nn.Parameter(torch.full((3,), float(ar.rank)))
        parameter.grad = torch.ones(3)
        assert ar.allreduce(parameter, "w") is parameter
        return parameter

    for parameter in side_by_side(2, body):
        assert parameter.tolist() == [0.5, 0.5, 0.5]
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.grad.tolist() == [1.0, 1.0, 1.0]


def test_the_same_name_again_is_the_next_mean_and_names_do_not_mix():
    def body(ar):
        first = ar.allreduce(torch.tensor([1.0 * ar.rank]), "a").item()
        other = ar.allreduce(torch.tensor([10.0 * ar.rank]), "b").item()
        again = ar.allreduce(torch.tensor([100.0 * ar.rank]), "a").item()
        return first, other, again

    assert side_by_side(3, body) == [(1.0, 10.0, 100.0)] * 3


NAMES = ["a", "A", "a/b", "a b", "../../etc/passwd", ".", "..", "/", "ключ", "🪸" * 200, "x" * 1024, "a\nb", "%", "CON"]


def test_any_text_is_a_name_and_two_names_are_two_means():
    def body(ar):
        return [ar.allreduce(torch.tensor(float(ar.rank + i)), name).item() for i, name in enumerate(NAMES)]

    assert side_by_side(2, body) == [[i + 0.5 for i in range(len(NAMES))]] * 2


@pytest.mark.parametrize("name", ["", "x" * 1025, "\ud800", 7, None], ids=repr)
def test_what_cannot_be_a_name_is_refused_before_anything_is_sent(name):
    store = MemoryStore()
    with pytest.raises(InvalidSpec, match="name"):
        ObjectStoreAllReduce(store, 0, 2).allreduce(torch.ones(1), name)
    assert list(store.list()) == []


def test_several_tensors_of_several_dtypes_go_in_one_exchange():
    def own(rank):
        whole = torch.tensor([rank, 4], dtype=torch.int64)
        return [values(rank), values(rank, (3, 5), dtype=torch.bfloat16), whole, torch.empty(0), torch.tensor(rank > 0)]

    def body(ar):
        tensors = own(ar.rank)
        ar.allreduce_coalesced(tensors, "all")
        return tensors, ar.counters.requests["create"]

    (first, creates), (second, _) = side_by_side(2, body)
    assert [bits(t) for t in first] == [bits(t) for t in second]
    assert bits(first[0]) == bits((values(0) + values(1)) / 2)
    assert first[2].tolist() == [0, 4]
    assert creates == 2  # a seat and one part


def test_a_broadcast_gives_everyone_the_values_of_the_root_and_is_read_by_all_from_one_object():
    def body(ar):
        tensors = [values(ar.rank), torch.tensor(ar.rank)]
        ar.broadcast(tensors, "start", root=1)
        return [bits(t) for t in tensors], ar.counters.bytes_up

    found = side_by_side(3, body)
    assert [tensors for tensors, _ in found] == [[bits(values(1)), bits(torch.tensor(1))]] * 3
    assert found[1][1] > found[0][1] + 200  # only the root sends its values


def test_nan_and_infinity_are_values_like_others():
    def body(ar):
        return ar.allreduce(torch.tensor([1.0, float("nan") if ar.rank else 1.0, float("inf")]), "w")

    for tensor in side_by_side(2, body):
        assert tensor.isnan().tolist() == [False, True, False]
        assert tensor[2] == float("inf")


def test_nothing_is_unpickled():
    with unpickling_forbidden():
        assert side_by_side(2, lambda ar: ar.allreduce(torch.tensor(float(ar.rank)), "w").item()) == [0.5, 0.5]


def test_one_rank_alone_asks_nothing_of_the_store():
    store = MemoryStore()
    tensor = values(0)
    assert ObjectStoreAllReduce(store, 0, 1).allreduce(tensor, "w") is tensor
    assert bits(tensor) == bits(values(0))
    assert list(store.list()) == []


def test_a_path_object_names_a_folder(tmp_path):
    with ObjectStoreAllReduce(tmp_path, 0, 1) as alone:
        assert alone.uri == tmp_path.as_uri()


def test_a_url_names_the_store(tmp_path):
    def body(ar):
        assert ar.uri == tmp_path.as_uri()
        return ar.allreduce(torch.tensor(float(ar.rank)), "w").item()

    ends = [ObjectStoreAllReduce(tmp_path.as_uri(), rank, 1, timeout_s=5.0) for rank in range(1)]
    assert ends[0].uri == tmp_path.as_uri()
    assert side_by_side(2, body, store=ends[0].store) == [0.5, 0.5]


UNUSABLE = {
    "a list": [1.0],
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "expanded": torch.zeros(1).expand(4),
}


@pytest.mark.parametrize("tensor", UNUSABLE.values(), ids=UNUSABLE)
def test_what_cannot_take_a_mean_in_place_is_refused_before_anything_is_sent(tensor):
    store = MemoryStore()
    with pytest.raises(ConfigError):
        ObjectStoreAllReduce(store, 0, 2).allreduce(tensor, "w")
    assert list(store.list()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 2), "rank=2"),
        ((-1, 2), "rank=-1"),
        ((True, 2), "rank=True"),
        ((0, 0), "world_size=0"),
        ((0, 2.0), "world_size=2.0"),
    ],
)
def test_ranks_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(InvalidSpec, match=words):
        ObjectStoreAllReduce(MemoryStore(), *arguments)


def test_every_bad_setting_is_named_at_once():
    with pytest.raises(InvalidSpec) as caught:
        ObjectStoreAllReduce(MemoryStore(), 5, 2, timeout_s=float("inf"), poll_interval_s=0)
    assert sorted(caught.value.fields) == ["poll_interval_s", "rank", "timeout_s"]
