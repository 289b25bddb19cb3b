"""Nested state (optimizer, random numbers, data cursor) as JSON and raw tensors, and back. Nothing is unpickled.

Dicts, lists, tuples, texts, numbers, None, tensors and numpy arrays come back as they went in, to the bit; anything
else is refused by name when it is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.errors import ConfigError, CorruptUpdate
from atoll.rounds.frames import ALIGNMENT, parse_json
from atoll.stores.base import Buffer
from atoll.training.params import dtype_name, tensor_bytes

_PREFIX_BYTES = 8


def pack(value: Any) -> list[Buffer]:
    """The value as buffers: the length of the JSON, the JSON, then every tensor at a multiple of 64 bytes."""
    tensors: list[Tensor] = []
    root = _encoded(value, "state", tensors)
    table, bodies, offset = [], list[Buffer](), 0
    for tensor in tensors:
        body = tensor_bytes(tensor)
        table.append([dtype_name(tensor.dtype), list(tensor.shape), offset, len(body)])
        padding = -len(body) % ALIGNMENT
        bodies += [body, bytes(padding)]
        offset += len(body) + padding
    text = json.dumps({"root": root, "tensors": table}, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(_PREFIX_BYTES + len(text)) % ALIGNMENT)
    return [len(text).to_bytes(_PREFIX_BYTES, "little"), text, *bodies]


def unpack(data: Buffer) -> Any:
    """The value that was packed; tensors are copies in main memory."""
    view = memoryview(data).cast("B")
    start = _PREFIX_BYTES + int.from_bytes(view[:_PREFIX_BYTES], "little")
    if start > len(view):
        raise CorruptUpdate("packed state is too short", check="length")
    described = parse_json(bytes(view[_PREFIX_BYTES:start]))
    try:
        tensors = [_tensor(view[start:], *row) for row in described["tensors"]]
        return _decoded(described["root"], tensors)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as exc:
        raise CorruptUpdate(f"not packed state: {exc}", check="record") from exc


def _encoded(value: Any, path: str, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor):
        return _put(tensors, value, "tensor")
    if isinstance(value, np.ndarray | np.generic):
        return _put(tensors, _from_numpy(value, path), "scalar" if isinstance(value, np.generic) else "array")
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": value.hex()}
    if isinstance(value, Mapping):
        rows = [[_key(key, path), _encoded(item, f"{path}.{key}", tensors)] for key, item in value.items()]
        return {"dict": rows}
    if isinstance(value, tuple | list):
        items = [_encoded(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise ConfigError(
        f"`{path}` is a `{type(value).__module__}.{type(value).__qualname__}`, which a checkpoint cannot hold",
        hint="keep numbers, texts, lists, dicts and tensors in the state, or turn checkpoints off: checkpoint=None",
    )


def _put(tensors: list[Tensor], tensor: Tensor, kind: str) -> dict[str, int]:
    tensors.append(tensor)
    return {kind: len(tensors) - 1}


def _from_numpy(value: Any, path: str) -> Tensor:
    array = np.asarray(value)
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    except TypeError as exc:
        raise ConfigError(f"`{path}` is a numpy array of `{array.dtype}`, which a checkpoint cannot hold") from exc


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return key
    raise ConfigError(f"`{path}` has the key {key!r}; a checkpoint holds keys that are texts or whole numbers")


def _decoded(node: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(node, list):
        return [_decoded(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, body),) = node.items()
    return _KINDS[kind](body, tensors)


_KINDS: dict[str, Callable[[Any, Sequence[Tensor]], Any]] = {
    "dict": lambda rows, tensors: {key: _decoded(item, tensors) for key, item in rows},
    "tuple": lambda items, tensors: tuple(_decoded(item, tensors) for item in items),
    "tensor": lambda index, tensors: tensors[index],
    "array": lambda index, tensors: tensors[index].numpy(),
    "scalar": lambda index, tensors: tensors[index].numpy()[()],
    "float": lambda text, _: float.fromhex(text),
    "dtype": lambda name, _: _dtype(name),
    "device": lambda name, _: torch.device(name),
}


def _tensor(data: memoryview, dtype: str, shape: list[int], offset: int, size_bytes: int) -> Tensor:
    if offset + size_bytes > len(data):
        raise CorruptUpdate("packed state is too short", check="length")
    if size_bytes == 0:
        return torch.empty(shape, dtype=_dtype(dtype))
    # A copy: the state is written to later, and the buffer may be read-only.
    body = bytearray(data[offset : offset + size_bytes])
    return torch.frombuffer(body, dtype=_dtype(dtype)).reshape(shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"`{name}` is not a type of tensor")
    return found
