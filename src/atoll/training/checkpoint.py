"""A replica's own checkpoints: one immutable object for each, in the run's store; the newest two are kept.

A store has an object completely or not at all, so a crash during a write loses nothing: the checkpoint before remains.
`DiLoCo` lists the checkpoints when it starts and continues from the newest one that is valid.
"""

from __future__ import annotations

import json
import logging
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

log = logging.getLogger("atoll.training")
KEPT = 2
_PREFIX_BYTES = 8


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a replica before round `round_no`."""

    round_no: int
    position: str
    """The digest of the last commit in it."""
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one rank of one run."""

    def __init__(self, store: Store, run_id: str, rank: int, *, launch: int = 1, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run_id, self._rank = run_id, rank
        self._keys = RunKeys(run_id, launch)
        self._io = StoreIO(clock, random.Random())
        self._drive = ThreadedDriver(store, clock)

    @property
    def counters(self) -> Counters:
        return self._io.counters

    def write(self, checkpoint: Checkpoint) -> int:
        """Write a checkpoint, delete all but the newest two, and return the round of the older one."""
        header = {
            "kind": "checkpoint",
            "run": self._run_id,
            "rank": self._rank,
            "round": checkpoint.round_no,
            "position": checkpoint.position,
        }
        sealed = seal_frame(header, pack(checkpoint.state))
        self._drive(self._io.put(self._key(checkpoint.round_no), sealed))
        log.debug("rank %d wrote the checkpoint of round %d", self._rank, checkpoint.round_no)
        rounds = self.rounds()
        for old in rounds[:-KEPT]:
            self._drive(self._io.delete(self._key(old)))
        return rounds[-KEPT:][0]

    def newest(self) -> Checkpoint | None:
        """The newest readable checkpoint. Unreadable ones are deleted, so that they do not count as kept."""
        for round_no in reversed(self.rounds()):
            try:
                return self._read(round_no)
            except CorruptUpdate as exc:
                log.warning("the checkpoint of round %d cannot be read and is deleted: %s", round_no, exc.message)
                self._drive(self._io.delete(self._key(round_no)))
            except KeyNotFound:
                continue
        return None

    def rounds(self) -> list[int]:
        """The rounds with a checkpoint, ascending."""
        listed = self._drive(self._io.list(self._keys.checkpoints_prefix(self._rank)))
        return sorted(self._keys.parse_checkpoint(key)[1] for key in listed)

    def _read(self, round_no: int) -> Checkpoint:
        frame = self._drive(self._io.read(self._key(round_no), lambda data: open_frame(data, kind="checkpoint")))
        header = frame.header
        if (header.get("run"), header.get("rank"), header.get("round")) != (self._run_id, self._rank, round_no):
            raise CorruptUpdate(
                "the checkpoint belongs to another run, rank or round", round_no=round_no, check="identity"
            )
        return Checkpoint(round_no, str(header.get("position")), unpack(frame.payload))

    def _key(self, round_no: int) -> str:
        return self._keys.checkpoint(self._rank, round_no)


def outer_state(loop: OuterLoop) -> dict[str, Any]:
    """The outer loop's part of a checkpoint, as views: agreed state, live weights if they differ, residuals.

    No round is in progress when a checkpoint is written.
    """
    state = loop.state
    return {
        "values": torch.from_numpy(state.values),
        "momentum": None if state.momentum is None else torch.from_numpy(state.momentum),
        "started": state.started,
        "live": None if loop.stream.is_settled else loop.vector.live(),
        "feedback": None if loop.feedback is None else loop.feedback.state_dict(),
    }


def load_outer(loop: OuterLoop, saved: Checkpoint) -> None:
    """Load the outer loop's part of a checkpoint."""
    state = saved.state
    if (state["feedback"] is None) != (loop.feedback is None):
        raise ConfigError("the checkpoint was written with another setting of error_feedback")
    names = [name for name in ("values", "momentum") if state[name] is not None]
    sections = {name: as_bytes(state[name].numpy()) for name in names}
    loop.restore(sections, saved.round_no, saved.position, state["started"])
    if state["live"] is not None:
        loop.vector.load_live(state["live"])
    if loop.feedback is not None:
        loop.feedback.load_state_dict(state["feedback"])


def capture_rng() -> dict[str, Any]:
    """The state of every random number generator of a usual training loop: torch, its devices, numpy and Python."""
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


def restore_rng(state: dict[str, Any]) -> None:
    """Set the generators to a captured state. Devices that this machine lacks are skipped."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    for index, cuda in enumerate(state.get("cuda", ())):
        if torch.cuda.is_available() and index < torch.cuda.device_count():
            torch.cuda.set_rng_state(cuda, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def pack(value: Any) -> list[Buffer]:
    """The value as buffers: the length of the JSON, the JSON, then every tensor at a multiple of 64 bytes.

    Dicts, lists, tuples, texts, numbers, None, tensors and numpy arrays come back with the same bits; any other value
    raises `ConfigError` with its path. Nothing is pickled.
    """
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
    """The packed value; tensors are copies in main memory."""
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
    # A copy, because the state changes later and the buffer may be read-only.
    body = bytearray(data[offset : offset + size_bytes])
    return torch.frombuffer(body, dtype=_dtype(dtype)).reshape(shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"`{name}` is not a type of tensor")
    return found
