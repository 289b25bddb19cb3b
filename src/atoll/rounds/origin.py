"""The weights of another run that a run starts from: copied to its own part of the store before its launch.

`origin.json` names the tensors and the blob with their bytes. The replica that creates the agreement has loaded them
into its model, so they become the initial weights. After that nobody needs the copy, and retention may delete it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll._time import SYSTEM_CLOCK
from atoll.errors import CorruptUpdate
from atoll.rounds import blobs
from atoll.rounds.codecs.bf16 import to_bf16_bits
from atoll.rounds.frames import open_record, seal_record
from atoll.rounds.io import StoreIO, ThreadedDriver
from atoll.rounds.join import read_agreement
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Layout, Tensor, numpy_dtype
from atoll.rounds.records import Blob, member, text, whole
from atoll.rounds.weights import AgreedWeights
from atoll.stores.base import Buffer, Store


@dataclass(frozen=True)
class Origin:
    """The weights of run `run_id` after `round_no` rounds."""

    run_id: str
    round_no: int
    tensors: tuple[Tensor, ...]
    blob: Blob

    def seal(self) -> bytes:
        layout = Layout(self.tensors).to_json()
        return seal_record(
            {
                "kind": "origin",
                "run": self.run_id,
                "round": self.round_no,
                "tensors": layout["tensors"],
                "blob": self.blob.to_json(),
            }
        )

    @classmethod
    def open(cls, data: Buffer) -> Origin:
        r = open_record(data, kind="origin")
        layout = Layout.from_json({"tensors": member(r, "tensors", list)})
        blob = Blob.from_json(member(r, "blob", dict))
        if blob.size_bytes != layout.size_bytes:
            raise CorruptUpdate("the bytes of an origin are not those of its tensors", check="record")
        return cls(text(r.get("run")), whole(r.get("round")), layout.tensors, blob)

    def to_json(self) -> dict[str, Any]:
        """What the spec of the new run records."""
        return {"run": self.run_id, "round": self.round_no, "digest": self.blob.digest}


@dataclass(frozen=True)
class OriginCopy:
    """An origin with its bytes, before they are uploaded."""

    origin: Origin
    parts: Sequence[Buffer]

    @classmethod
    def of(cls, agreed: AgreedWeights) -> OriginCopy:
        parts, start = [], 0
        for tensor in agreed.tensors:
            parts.append(_own_bytes(agreed.values[start : start + tensor.size], tensor.dtype))
            start += tensor.size
        return cls(Origin(agreed.run_id, agreed.round_no, agreed.tensors, blobs.describe(0, parts)), parts)

    def upload(self, store: Store, run_id: str) -> None:
        """Write the copy for a run that is about to be recorded; a repeated upload writes the same bytes."""
        keys, io = RoundKeys(run_id), StoreIO(SYSTEM_CLOCK, random.Random())
        drive = ThreadedDriver(store, SYSTEM_CLOCK)
        drive(blobs.write_blob(io, keys, self.origin.blob, self.parts))
        store.put(keys.run.origin(), self.origin.seal())


def read_origin(store: Store, keys: RoundKeys) -> tuple[Origin, list[memoryview]] | None:
    """The weights that the run starts from; None if its replicas have agreed on initial weights already."""
    io, drive = StoreIO(SYSTEM_CLOCK, random.Random()), ThreadedDriver(store, SYSTEM_CLOCK)
    if drive(read_agreement(io, keys)) is not None:
        return None
    first = RoundKeys(keys.run_id)  # the launcher has written it before the first launch
    origin = Origin.open(store.get(first.run.origin()))
    whole_blob = drive(blobs.read_blob(io, first, origin.blob))
    return origin, blobs.sections(whole_blob, [tensor.size_bytes for tensor in origin.tensors])


def _own_bytes(values: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> bytes:
    """The float32 values in the dtype of their tensor, as a replica has them."""
    if dtype == "bfloat16":
        return to_bf16_bits(values).astype("<u2").tobytes()
    return values.astype(numpy_dtype(dtype)).tobytes()
