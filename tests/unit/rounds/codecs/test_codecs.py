from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.errors import CorruptUpdate, UnknownName
from atoll.rounds.codecs import encoded_bytes, recommended_mean
from atoll.rounds.codecs.base import codec, codec_names
from atoll.rounds.codecs.bf16 import from_bf16_bits, to_bf16_bits

pytestmark = pytest.mark.usefixtures("each_kernel")

floats = hnp.arrays(
    np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@pytest.mark.parametrize("name", codec_names())
@given(values=floats)
def test_what_comes_back_is_within_the_stated_bound(name: str, values: np.ndarray) -> None:
    how = codec(name)
    values = values[np.abs(values) <= how.largest]
    payload = b"".join(how.encode(values))
    assert len(payload) == how.encoded_bytes(values.size)
    back = how.decode(payload, values.size)
    assert back.dtype == np.float32
    assert np.all(np.abs(back.astype(np.float64) - values) <= how.error_bound(values))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("fp32", [0, 4, 1020, 1024, 1028, 4 << 40]),
        ("bf16", [0, 2, 510, 512, 514, 2 << 40]),
        ("int8", [0, 3, 257, 258, 261, (1 << 40) + (1 << 33)]),
        ("int4", [0, 3, 132, 132, 135, (1 << 39) + (1 << 34)]),
    ],
)
def test_a_codec_takes_the_bytes_that_the_format_page_gives(name: str, sizes: list[int]) -> None:
    counts = [0, 1, 255, 256, 257, 1 << 40]
    assert [encoded_bytes(name, count) for count in counts] == sizes
    assert [codec(name).encoded_bytes(count) for count in counts] == sizes


def test_abilities_of_the_codecs() -> None:
    able = {name: codec(name) for name in codec_names()}
    assert [name for name, how in able.items() if how.is_exact] == ["fp32"]
    assert [name for name, how in able.items() if how.payload_is_values] == ["fp32"]
    assert [name for name, how in able.items() if how.needs_feedback] == ["int4"]


@pytest.mark.parametrize("name", codec_names())
def test_decoding_what_was_decoded_changes_nothing(name: str) -> None:
    how = codec(name)
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    once = how.decode(b"".join(how.encode(values)), values.size)
    twice = how.decode(b"".join(how.encode(once)), values.size)
    assert once.tobytes() == twice.tobytes()


@pytest.mark.parametrize("name", codec_names())
@given(values=floats)
def test_given_room_receives_the_same_bytes_and_values(name: str, values: np.ndarray) -> None:
    how = codec(name)
    values = values[np.abs(values) <= how.largest]
    payload, room = b"".join(how.encode(values)), bytearray(how.encoded_bytes(values.size))
    how.encode_into(values, room)
    assert room == payload
    into = np.full(values.size, np.nan, np.float32)
    how.decode_into(payload, into)
    assert into.tobytes() == how.decode(payload, values.size).tobytes()


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_the_wrong_length_is_refused(name: str, change: int) -> None:
    how, room = codec(name), np.zeros(100, np.float32)
    payload = b"\0" * (how.encoded_bytes(100) + change)
    for read in (lambda: how.decode(payload, 100), lambda: how.decode_into(payload, room)):
        with pytest.raises(CorruptUpdate, match="bytes"):
            read()
    with pytest.raises(CorruptUpdate, match="bytes"):
        how.add_into(payload, room)


def test_means_of_coarse_updates_are_finer() -> None:
    assert {name: recommended_mean(name) for name in codec_names()} == {
        "fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8",
    }  # fmt: skip
    with pytest.raises(UnknownName):
        recommended_mean("bf61")


def test_bf16_is_what_torch_makes_of_every_pattern_and_of_every_tie() -> None:
    import torch

    every = np.arange(1 << 16, dtype=np.uint32)
    ties = np.concatenate([every << 16, (every << 16) | 0x8000, (every << 16) | 0x7FFF, (every << 16) | 0x8001])
    values = ties.view(np.float32)
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    ours = to_bf16_bits(values)
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(from_bf16_bits(ours[nan])).all()
    back = torch.from_numpy(ours.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    assert np.array_equal(from_bf16_bits(ours).view(np.uint32)[~nan], back.view(np.uint32)[~nan])


def test_the_largest_value_of_bf16_survives_and_the_next_float_above_its_tie_does_not() -> None:
    how = codec("bf16")
    edge = np.float32([how.largest])
    assert np.isfinite(from_bf16_bits(to_bf16_bits(edge)))[0]
    assert np.isinf(from_bf16_bits(to_bf16_bits(np.float32([3.4e38]))))[0]


def test_an_unknown_codec_says_which_one_may_be_meant() -> None:
    with pytest.raises(UnknownName, match="did you mean `bf16`"):
        codec("bf61")
