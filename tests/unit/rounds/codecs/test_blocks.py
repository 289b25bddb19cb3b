"""The codecs of whole multiples: their bound, their edges, what they refuse, and that the page's words are true."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.errors import CorruptUpdate
from atoll.kernels import TILE
from atoll.rounds.codecs.base import codec
from atoll.rounds.codecs.blocks import BlockCodec

pytestmark = pytest.mark.usefixtures("each_kernel")

NAMES = ["int8", "int4"]
every = pytest.mark.parametrize("name", NAMES)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = hnp.arrays(np.float32, st.integers(0, 700), elements=finite, fill=st.just(0.0))


def block_codec(name: str) -> BlockCodec:
    how = codec(name)
    assert isinstance(how, BlockCodec)
    return how


def encoded(name: str, values: np.ndarray) -> bytes:
    return b"".join(codec(name).encode(values))


def through(name: str, values: np.ndarray) -> np.ndarray:
    return codec(name).decode(encoded(name, values), values.size)


def normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def as_the_format_page_says(name: str, payload: bytes, count: int) -> np.ndarray:
    """A reader written from the words of the module, one value after the other."""
    block = {"int8": 256, "int4": 128}[name]
    blocks = -(-count // block)
    scales = (np.frombuffer(payload[: 2 * blocks], "<u2").astype(np.uint32) << 16).view(np.float32)
    codes = payload[2 * blocks :]
    values = []
    for i in range(count):
        if name == "int8":
            code = codes[i] - 256 * (codes[i] > 127)
        else:
            group, j = divmod(i, 2048)
            half = (min(2048, count - 2048 * group) + 1) // 2
            byte = codes[1024 * group + j % half]
            nibble = byte >> 4 if j >= half else byte & 15
            code = nibble - 16 * (nibble > 7)
        values.append(np.float32(code) * scales[i // block])
    return np.array(values, np.float32)


@every
@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 255, 257, 2047, 2048, 2049, 4095, 6001])
def test_a_reader_written_from_the_words_reads_the_same(name: str, count: int) -> None:
    payload = encoded(name, normal(count))
    assert len(payload) == codec(name).encoded_bytes(count)
    assert np.array_equal(codec(name).decode(payload, count), as_the_format_page_says(name, payload, count))


@every
@given(values=arrays, exponent=st.integers(-149, 120))
def test_the_bound_holds_at_every_size_of_numbers(name: str, values: np.ndarray, exponent: int) -> None:
    how = codec(name)
    with np.errstate(over="ignore", under="ignore"):
        values = values * np.float32(2.0**exponent) if exponent < 0 else values
    values = np.clip(values, -how.largest, how.largest)
    back = through(name, values)
    assert np.all(np.abs(back.astype(np.float64) - values) <= how.error_bound(values))
    assert np.isfinite(back).all()


@every
@given(values=arrays)
@example(values=np.full(300, 3.9e-34, np.float32))
@example(values=np.full(300, -1e-45, np.float32))
def test_encoding_what_was_decoded_gives_the_same_bytes(name: str, values: np.ndarray) -> None:
    values = np.clip(values, -codec(name).largest, codec(name).largest)
    payload = encoded(name, values)
    assert encoded(name, codec(name).decode(payload, values.size)) == payload


@every
def test_the_bound_is_nearly_reached(name: str) -> None:
    values = normal(100_000)
    share = np.abs(through(name, values).astype(np.float64) - values) / codec(name).error_bound(values)
    assert 0.99 < share.max() <= 1
    assert np.median(share) == pytest.approx(0.5, abs=0.05)


@every
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_the_largest_of_a_block_uses_the_last_level(name: str, scale: float) -> None:
    how = block_codec(name)
    for seed in range(50):
        values = normal(how.block, seed) * np.float32(scale)
        payload = encoded(name, values)
        step = np.frombuffer(b"\0\0" + payload[:2], "<f4")[0]
        assert np.abs(how.decode(payload, how.block)).max() == np.float32(how.levels) * step


@every
def test_zeros_stay_zeros_whatever_their_sign(name: str) -> None:
    values = np.zeros(1000, np.float32)
    values[::2] = -0.0
    assert encoded(name, values) == bytes(codec(name).encoded_bytes(1000))
    mixed = normal(1000)
    mixed[500:600] = 0
    assert not through(name, mixed)[500:600].any()


@every
def test_the_largest_survives_and_more_does_not(name: str) -> None:
    how = codec(name)
    edge = np.float32([how.largest, -how.largest])
    assert np.array_equal(through(name, edge), edge)
    above = np.nextafter(edge, np.float32([np.inf, -np.inf]))
    assert not np.isfinite(through(name, above)).any()


@every
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.float32(3.4028e38)])
@pytest.mark.parametrize("place", [0, 300, 999])
def test_what_is_not_finite_is_found_after_decoding_and_spoils_only_its_block(
    name: str, bad: float, place: int
) -> None:
    how = block_codec(name)
    values = normal(1000)
    values[place] = bad
    payload = encoded(name, values)
    spoilt = ~np.isfinite(how.decode(payload, 1000))
    assert spoilt[place]
    assert np.array_equal(np.unique(np.flatnonzero(spoilt) // how.block), [place // how.block])
    for bits in (0xFFFFFFFF, 0x7F812345, 0xFF800000):
        values.view(np.uint32)[place] = bits
        assert encoded(name, values) == payload, "the bytes do not tell which of them it was"


@every
@pytest.mark.parametrize("scale", [0x8000, 0xBF80, 0xFFC0, 0xFF80, 0x0001, 0x047F, 0x7F7F])
def test_a_scale_that_nobody_writes_is_refused(name: str, scale: int) -> None:
    payload = bytearray(encoded(name, normal(1000)))
    payload[2:4] = scale.to_bytes(2, "little")
    room = np.zeros(1000, np.float32)
    for read in (lambda: codec(name).decode(payload, 1000), lambda: codec(name).decode_into(payload, room)):
        with pytest.raises(CorruptUpdate, match="scale"):
            read()
    with pytest.raises(CorruptUpdate, match="scale"):
        codec(name).add_into(payload, room)


@every
@pytest.mark.parametrize("scale", [0x7F80, 0x7FC0, 0x7F81, 0x7FFF])
def test_a_scale_that_is_not_finite_gives_nothing_finite(name: str, scale: int) -> None:
    how = block_codec(name)
    payload = bytearray(encoded(name, normal(1000)))
    payload[:2] = scale.to_bytes(2, "little")
    back = how.decode(payload, 1000)
    assert not np.isfinite(back[: how.block]).any()
    assert np.isfinite(back[how.block :]).all()


@every
def test_a_tile_more_changes_nothing_and_neither_do_threads(name: str) -> None:
    how = block_codec(name)
    values = normal(2 * TILE + 777)
    payload = encoded(name, values)
    tiles = [encoded(name, values[a : a + TILE]) for a in range(0, values.size, TILE)]
    scales = b"".join(part[: 2 * how.blocks(TILE)] for part in tiles[:2]) + tiles[2][: 2 * how.blocks(777)]
    codes = b"".join(part[2 * how.blocks(TILE) :] for part in tiles[:2]) + tiles[2][2 * how.blocks(777) :]
    assert payload == scales + codes
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: encoded(name, values), range(8))) == {payload}


def test_int8_and_int4_are_as_small_as_they_say() -> None:
    million = 1 << 20
    assert codec("int8").encoded_bytes(million) / million == 1 + 2 / 256
    assert codec("int4").encoded_bytes(million) / million == 0.5 + 2 / 128
    assert codec("int4").encoded_bytes(3) == 2 + 2
