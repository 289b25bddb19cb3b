"""A replica's own checkpoints: one immutable object for each, in the run's store, the newest two kept.

An object is there whole or not at all, so a crash while writing loses nothing: the one before still stands. The
newest that checks out is the one to go on from; it is found by listing.

Nested state (optimizer, random numbers, data cursor) as JSON and raw tensors, and back. Nothing is unpickled.

Dicts, lists, tuples, texts, numbers, None, tensors and numpy arrays come back as they went in, to the bit; anything
else is refused by name when it is written.

Every random number generator a training loop is likely to draw from: torch, its devices, numpy and Python.

The outer loop's part of a checkpoint: agreed state, live weights where they differ from it, what is still owed.

A checkpoint is made when no round is under way, so nothing of one is in it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import ConfigError, CorruptUpdate, KeyNotFound
from atoll.keys import RunKeys
from atoll.rounds.codecs.base import as_bytes
from atoll.rounds.frames import ALIGNMENT, open_frame, parse_json, seal_frame
from atoll.rounds.io import Counters, StoreIO, ThreadedDriver
from atoll.stores.base import Buffer, Store
from atoll.training.loop import OuterLoop
from atoll.training.model import dtype_name, tensor_bytes

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


def capture() -> dict[str, Any]:
    """The state of all of them, now."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Go on drawing as if nothing had happened. Devices that are not here are passed over."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    for index, cuda in enumerate(state.get("cuda", ())):
        if torch.cuda.is_available() and index < torch.cuda.device_count():
            torch.cuda.set_rng_state(cuda, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def outer_state(loop: OuterLoop) -> dict[str, Any]:
    """What `load_outer` needs; views, not copies."""
    state = loop.state
    return {
        "values": torch.from_numpy(state.values),
        "momentum": None if state.momentum is None else torch.from_numpy(state.momentum),
        "started": state.started,
        "live": None if loop.stream.is_settled else loop.vector.live(),
        "feedback": None if loop.feedback is None else loop.feedback.state_dict(),
    }


def load_outer(loop: OuterLoop, saved: Checkpoint) -> None:
    """Put the outer loop where it was."""
    state = saved.state
    if (state["feedback"] is None) != (loop.feedback is None):
        raise ConfigError("the checkpoint was made with another setting of error_feedback")
    names = [name for name in ("values", "momentum") if state[name] is not None]
    sections = {name: as_bytes(state[name].numpy()) for name in names}
    loop.restore(sections, saved.round_no, saved.position, state["started"])
    if state["live"] is not None:
        loop.vector.load_live(state["live"])
    if loop.feedback is not None:
        loop.feedback.load_state_dict(state["feedback"])


KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a replica before round `round_no`."""

    round_no: int
    position: str
    """Digest of the last commit in it; the rounds' own bookmark."""
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one rank of one run."""

    def __init__(self, store: Store, run_id: str, rank: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run_id, self._rank = run_id, rank
        self._keys = RunKeys(run_id)
        self._io = StoreIO(clock, random.Random())
        self._drive = ThreadedDriver(store, clock)

    @property
    def counters(self) -> Counters:
        return self._io.counters

    def write(self, checkpoint: Checkpoint) -> int:
        """Write it and let older ones go; the round of the oldest that is left."""
        header = {
            "kind": "checkpoint",
            "run": self._run_id,
            "rank": self._rank,
            "round": checkpoint.round_no,
            "position": checkpoint.position,
        }
        sealed = seal_frame(header, pack(checkpoint.state))
        self._drive(self._io.put(self._key(checkpoint.round_no), sealed))
        rounds = self.rounds()
        for old in rounds[:-KEPT]:
            self._drive(self._io.delete(self._key(old)))
        return rounds[-KEPT:][0]

    def newest(self) -> Checkpoint | None:
        """The newest one that can be read; what cannot is deleted, so that nobody counts on it."""
        for round_no in reversed(self.rounds()):
            try:
                return self._read(round_no)
            except CorruptUpdate:
                self._drive(self._io.delete(self._key(round_no)))
            except KeyNotFound:
                continue
        return None

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, ascending."""
        listed = self._drive(self._io.list(self._keys.checkpoints_prefix(self._rank)))
        return sorted(self._keys.parse_checkpoint(key)[1] for key in listed)

    def _read(self, round_no: int) -> Checkpoint:
        frame = self._drive(self._io.read(self._key(round_no), lambda data: open_frame(data, kind="checkpoint")))
        header = frame.header
        if (header.get("run"), header.get("rank"), header.get("round")) != (self._run_id, self._rank, round_no):
            raise CorruptUpdate("a checkpoint is of another run, rank or round", round_no=round_no, check="identity")
        return Checkpoint(round_no, str(header.get("position")), unpack(frame.payload))

    def _key(self, round_no: int) -> str:
        return self._keys.checkpoint(self._rank, round_no)
