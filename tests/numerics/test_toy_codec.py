"""A codec is added by one module and one row: the toys of this module train, verify, are planned with and suggested."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diloco_toys import QUICK, SCATTERED, batches, contexts, perceptron, side_by_side, train
from numpy.typing import NDArray

import atoll
from atoll.errors import UnknownName
from atoll.registry import open_store
from atoll.reports.estimate import Setting, estimate
from atoll.rounds import codecs
from atoll.rounds.codecs import CodecRow
from atoll.rounds.codecs.base import F32, Codec, codec, codec_names
from atoll.rounds.codecs.tiles import Laid, TiledCodec
from atoll.rounds.context import Tuning
from atoll.rounds.verify import verify
from atoll.training.feedback import is_wanted


class Halves(Laid):
    """A payload of float16 numbers."""

    def __init__(self, payload: memoryview) -> None:
        self._halves = np.frombuffer(payload, dtype="<f2")

    def check(self) -> None:
        pass

    def write(self, start: int, values: F32) -> None:
        self._halves[start : start + values.size] = values

    def read(self, start: int, room: F32) -> F32:
        room[:] = self._halves[start : start + room.size]
        return room


class Half(TiledCodec):
    """The toy: two bytes for each value, and error feedback."""

    name = "half"
    largest = 65504.0
    needs_feedback = True

    def lay(self, payload: memoryview, count: int) -> Halves:
        return Halves(payload)

    def error_bound(self, values: F32) -> NDArray[np.float64]:
        return np.maximum(np.abs(values.astype(np.float64)) * 2.0**-11, 2.0**-25)


CODEC = Half()


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one row that the toy needs."""
    monkeypatch.setitem(codecs.CODECS, "half", CodecRow(__name__, lambda count: 2 * count))
    yield
    codec.cache_clear()


def test_the_toy_is_a_codec_like_the_others() -> None:
    assert isinstance(codec("half"), Codec)
    assert codec_names() == ["fp32", "bf16", "int8", "int4", "half"]


@pytest.mark.training
@pytest.mark.parametrize(("world_size", "tuning"), [(2, QUICK), (3, SCATTERED)])
@pytest.mark.parametrize(("codec", "mean_codec"), [("half", None), ("half", "int8"), ("fp32", "half")])
def test_replicas_train_with_the_toy_and_the_run_verifies(
    codec: str, mean_codec: str | None, world_size: int, tuning: Tuning
) -> None:
    """Two replicas exchange whole updates; three publish means, in the mean codec."""

    def body(ctx: atoll.ReplicaContext) -> list[bytes]:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"codec": codec, "mean_codec": mean_codec, "tuning": tuning, "snapshot": 99}
        with atoll.DiLoCo(model, inner, ctx, inner_steps=2, checkpoint=None, **options) as outer:
            return train(outer, model, inner, batches(ctx.rank, 10), 5)

    replicas = contexts(world_size)
    histories = side_by_side(replicas, body)
    assert all(history == histories[0] for history in histories)
    assert len(set(histories[0])) == 5
    report = verify(open_store(replicas[0].store_uri), "toy")
    assert report.is_right, report.difference
    assert (report.rounds, report.updates) == (5, 5 * world_size)
    assert (report.means > 0) == (tuning is SCATTERED)


def test_error_feedback_is_on_as_the_toy_says() -> None:
    assert is_wanted(None, "half")
    assert not is_wanted(False, "half")


def test_planning_knows_the_size_of_the_toy() -> None:
    made = estimate(Setting(params=1e6, replicas=4, codec="half"))
    assert (made.exchange.update_bytes, made.exchange.mean_bytes) == (2_000_000, 2_000_000)


def test_an_unknown_name_lists_the_toy() -> None:
    with pytest.raises(UnknownName) as caught:
        codec("hafl")
    assert "half" in caught.value.known


def test_no_code_compares_with_the_name_of_a_codec() -> None:
    for path in Path(atoll.__file__).parent.rglob("*.py"):
        compared = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare))
        said = {part.value for node in compared for part in ast.walk(node) if isinstance(part, ast.Constant)}
        assert not said & set(codec_names()), path
