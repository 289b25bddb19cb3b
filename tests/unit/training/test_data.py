"""Data shared out among replicas, and the cursor that finds the place again."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from atoll.errors import ConfigError
from atoll.training import checkpoint
from atoll.training.data import ShardedLoader, TokenBlocks, shard
from atoll.training.inner import Feed, elements

NUMBERS = list(range(103))


def loader(rank: int, **options) -> ShardedLoader:
    return ShardedLoader(NUMBERS, 5, rank=rank, world_size=4, **options)


def taken(batches, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("epoch", [0, 1])
def test_no_sample_goes_to_two_replicas_and_all_get_equally_many(seed, epoch):
    shares = [shard(103, rank=rank, world_size=4, seed=seed, epoch=epoch) for rank in range(4)]
    assert [len(share) for share in shares] == [25] * 4
    assert len(set().union(*shares)) == 100


def test_every_epoch_and_seed_has_an_order_of_its_own():
    orders = {tuple(shard(103, rank=0, world_size=1, seed=s, epoch=e)) for s in range(4) for e in range(4)}
    assert len(orders) == 16
    assert shard(5, rank=0, world_size=1, seed=None) == [0, 1, 2, 3, 4]


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 5, 7])
def test_a_loader_goes_on_where_another_one_was_stopped(workers, stop):
    whole = taken(Feed(loader(2)), 12)
    first = loader(2, num_workers=workers)
    feed = Feed(first)
    begun = taken(feed, stop)
    saved = feed.state_dict()
    rest = taken(Feed(loader(2, num_workers=workers), saved), 12 - stop)
    assert begun + rest == whole


def test_a_loader_leaves_the_random_numbers_of_the_model_alone():
    before = torch.get_rng_state()
    taken(iter(loader(0)), 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cursor_does_not_fit_other_data():
    with pytest.raises(ConfigError, match="batch_size"):
        ShardedLoader(NUMBERS, 6, world_size=4).load_state_dict(loader(0).state_dict())


@pytest.mark.parametrize(
    "options", [{"rank": 4, "world_size": 4}, {"batch_size": 0}, {"world_size": 40}, {"rank": -1}, {"world_size": 0}]
)
def test_a_loader_that_would_have_no_batches_is_refused(options):
    with pytest.raises(ConfigError):
        ShardedLoader(NUMBERS, **{"batch_size": 5, **options})


def test_blocks_cover_a_stream_once_and_targets_are_one_token_later():
    blocks = TokenBlocks(torch.arange(101, dtype=torch.uint8), 10)
    assert len(blocks) == 10
    assert torch.cat([blocks[i][0] for i in range(10)]).tolist() == list(range(100))
    assert all(torch.equal(x + 1, y) and x.dtype == torch.int64 for x, y in (blocks[i] for i in range(10)))
    with pytest.raises(IndexError):
        blocks[10]
    with pytest.raises(ConfigError):
        TokenBlocks(torch.arange(10), 10)


def test_a_shuffling_dataloader_goes_on_in_the_same_order():
    def fresh() -> DataLoader:
        return DataLoader(TensorDataset(torch.arange(20)), batch_size=3, shuffle=True, collate_fn=lambda b: b)

    torch.manual_seed(5)
    whole = list(itertools.islice(Feed(fresh()), 17))
    torch.manual_seed(5)
    feed = Feed(fresh())
    begun = list(itertools.islice(feed, 10))  # in the second epoch
    saved, state = feed.state_dict(), checkpoint.capture_rng()
    torch.manual_seed(99)
    resumed = Feed(fresh(), saved)
    checkpoint.restore_rng(state)
    assert begun + list(itertools.islice(resumed, 7)) == whole


def test_an_iterator_that_ends_for_good_says_so():
    feed = Feed(iter([1, 2]))
    assert [next(feed), next(feed)] == [1, 2]
    with pytest.raises(ConfigError) as caught:
        next(feed)
    assert caught.value.reason == "exhausted"


def test_fewer_batches_than_before_is_an_error():
    feed = Feed([1, 2, 3])
    next(feed), next(feed)
    with pytest.raises(ConfigError) as caught:
        Feed([1], feed.state_dict())
    assert caught.value.reason == "exhausted"
    with pytest.raises(ConfigError) as caught:
        Feed(loader(0), feed.state_dict())
    assert caught.value.reason == "cursor"


def test_a_batch_weighs_the_elements_of_its_first_tensor():
    assert elements(torch.ones(4, 5)) == 20
    assert elements(("id", [torch.ones(3), torch.ones(9)])) == 3
    assert elements({"n": 1, "x": torch.ones(2, 2)}) == 4
    assert elements("text") == elements(torch.ones(0)) == 1
