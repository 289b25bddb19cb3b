"""Nested state goes to bytes and back to the bit, and nothing is unpickled on the way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError, CorruptUpdate
from atoll.training import checkpoint


def packed(value) -> bytes:
    return b"".join(bytes(part) for part in checkpoint.pack(value))


def same(a, b) -> bool:
    """Equal in type and in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and bytes(checkpoint.tensor_bytes(a)) == bytes(checkpoint.tensor_bytes(b))
        )
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a.hex() == b.hex()
    return a == b


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
nested = st.recursive(
    plain,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(nested)
def test_plain_values_come_back_as_they_went_in(value):
    assert same(checkpoint.unpack(packed(value)), value)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.int8,
        torch.int64, torch.uint8, torch.uint32, torch.float8_e4m3fn,
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (7, 3)])
def test_tensors_of_every_type_and_shape_come_back(dtype, shape):
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    assert same(checkpoint.unpack(packed({"t": [tensor]})), {"t": [tensor]})


def test_odd_values_come_back():
    value = {
        "nan": float("nan"), "inf": -math.inf, "minus zero": -0.0, 3: np.arange(5, dtype=np.uint32),
        "scalar": np.float64(0.1), "strided": torch.arange(12).reshape(3, 4).t(), "dtype": torch.bfloat16,
        "device": torch.device("cpu"), "grad": torch.ones(2, requires_grad=True), "big": 1 << 200,
    }  # fmt: skip
    back = checkpoint.unpack(packed(value))
    assert list(back) == list(value)
    assert math.isnan(back.pop("nan"))
    assert all(same(back[key], value[key]) for key in back)
    assert not back["grad"].requires_grad


@pytest.mark.training
def test_an_optimizer_comes_back():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, amsgrad=True)
    weight.grad = torch.tensor([1.0, -2.0, 0.5])
    optimizer.step()
    assert same(checkpoint.unpack(packed(optimizer.state_dict())), optimizer.state_dict())


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [1, {2, 3}]}, r"`state\.a\[1\]`.*`builtins\.set`"),
        ({"f": print}, r"`state\.f`"),
        ({(1, 2): 3}, r"\(1, 2\)"),
        ({"o": np.array(["x"], dtype=object)}, r"`state\.o`.*`object`"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(value, named):
    with pytest.raises(ConfigError, match=named):
        checkpoint.pack(value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:4],
        lambda data: data[:-80],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"[]" + data[10:],
        lambda data: data.replace(b'"float32"', b'"systemx"'),
        lambda data: data.replace(b'"float32"', b'"Tensor" '),
        lambda data: data.replace(b'"tensor":0', b'"tensor":9'),
    ],
)
def test_damaged_bytes_are_called_damaged(spoil):
    data = packed({"t": torch.ones(40), "u": [1, 2]})
    assert same(checkpoint.unpack(data)["u"], [1, 2])
    with pytest.raises(CorruptUpdate):
        checkpoint.unpack(spoil(data))
