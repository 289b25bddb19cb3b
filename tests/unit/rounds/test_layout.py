from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import CorruptUpdate, InvalidSpec
from atoll.rounds.layout import ArrayVector, Layout, numpy_dtype
from atoll.rounds.tuning import Grid, default_chunk

LAYOUT = Layout.of([("w", [3, 4], "float32"), ("b", [], "bfloat16"), ("e", [0, 2], "float16")])


def test_sizes_count_elements_and_bytes() -> None:
    assert (LAYOUT.size, LAYOUT.size_bytes) == (13, 50)
    assert numpy_dtype("bfloat16") == np.dtype("<u2")


def test_the_hash_tells_names_shapes_dtypes_and_order_apart() -> None:
    others = [
        [("w", [4, 3], "float32"), ("b", [], "bfloat16"), ("e", [0, 2], "float16")],
        [("v", [3, 4], "float32"), ("b", [], "bfloat16"), ("e", [0, 2], "float16")],
        [("w", [3, 4], "float16"), ("b", [], "bfloat16"), ("e", [0, 2], "float16")],
        [("b", [], "bfloat16"), ("w", [3, 4], "float32"), ("e", [0, 2], "float16")],
    ]
    assert len({LAYOUT.hash, *(Layout.of(other).hash for other in others)}) == 5
    assert Layout.from_json(LAYOUT.to_json()).hash == LAYOUT.hash
    assert all(LAYOUT.differences(Layout.of(other)) for other in others)
    assert not LAYOUT.differences(Layout.from_json(LAYOUT.to_json()))


@pytest.mark.parametrize("bad", [[("w", [1], "complex64")], [("w", [-1], "float32")], [("w", [1], "int8")] * 2])
def test_a_layout_that_makes_no_sense_is_refused(bad: list[tuple[str, list[int], str]]) -> None:
    with pytest.raises(InvalidSpec):
        Layout.of(bad)
    with pytest.raises(CorruptUpdate):
        Layout.from_json({"tensors": [list(tensor) for tensor in bad]})


@given(st.integers(0, 10**7), st.integers(1, 50))
def test_chunks_cover_every_element_once(size: int, thousands: int) -> None:
    grid = Grid(size, 1024 * thousands)
    spans = [grid.span(i) for i in range(min(len(grid), 2000))]
    assert all(a < b for a, b in spans)
    assert all(b == c for (_, b), (c, _) in itertools.pairwise(spans))
    if len(grid) <= 2000:
        assert sum(grid.count(i) for i in range(len(grid))) == size


def test_a_grid_has_no_chunk_beyond_its_last_and_no_odd_chunk_size() -> None:
    with pytest.raises(IndexError):
        Grid(10, 1024).span(1)
    odd: list[Any] = [1000, -1024, 1024.0, "1024"]
    for chunk in odd:
        with pytest.raises(InvalidSpec, match="1024") as caught:
            Grid(10, chunk)
        assert caught.value.fields == ("chunk",)


@given(st.integers(0, 10**11))
def test_default_chunks_are_neither_tiny_nor_huge(size: int) -> None:
    chunk = default_chunk(size)
    assert chunk % 1024 == 0
    assert (1 << 20) <= 4 * chunk <= (64 << 20)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 40), st.integers(0, 40))
def test_parts_read_and_write_like_one_flat_vector(sizes: list[int], a: int, b: int) -> None:
    total = sum(sizes)
    flat = np.arange(total, dtype=np.float32)
    arrays = [part.copy() for part in np.split(flat, np.cumsum(sizes)[:-1])] if sizes else []
    parts = ArrayVector(arrays)
    start, stop = sorted((min(a, total), min(b, total)))
    assert parts.size == total
    assert np.array_equal(parts.read(start, stop), flat[start:stop])
    parts.write(start, -flat[start:stop])
    flat[start:stop] *= -1
    assert np.array_equal(parts.read(0, total), flat)


def test_parts_refuse_what_they_could_not_write_through() -> None:
    with pytest.raises(TypeError):
        ArrayVector([np.zeros(3)])
    with pytest.raises(TypeError):
        ArrayVector([np.zeros((4, 4), np.float32)[:, ::2]])
