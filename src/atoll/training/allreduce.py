"""The mean of tensors over ranks that share nothing but a store: for people with a training loop of their own.

    with ObjectStoreAllReduce("s3://bucket/exp", rank, world_size) as ar:
        for step in range(1000):
            loss.backward()
            ar.allreduce_coalesced([p.grad for p in model.parameters()], "grads")   # one exchange
            optimizer.step()

Every rank calls with the same names and gets the same bits. `make_diloco_outer_loop` makes DiLoCo of it.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from torch import Tensor

from atoll._time import SYSTEM_CLOCK, Clock
from atoll.errors import InvalidSpec
from atoll.errors import PartsDiffer as PartsDiffer
from atoll.registry import open_store
from atoll.rounds.io import Counters
from atoll.rounds.named.client import NamedClient
from atoll.rounds.named.exchange import Part
from atoll.rounds.named.keys import check_name
from atoll.stores.base import Store
from atoll.training.allreduce_outer import OuterLoop as OuterLoop
from atoll.training.allreduce_outer import make_diloco_outer_loop as make_diloco_outer_loop
from atoll.training.allreduce_tensors import (
    as_payload,
    check_size,
    check_tensor,
    mean_of,
    specs_of,
    values_of,
    write_back,
)


class ObjectStoreAllReduce:
    """Blocking means by name. Nothing is asked of the store before the first call.

    Ranks meet by `uri`, `world_size` and `round_id`, which keeps apart what must not mix: jobs that share a prefix at
    the same time, or two of these in one process. What an earlier job left there is never taken for a live rank,
    whatever its `round_id`. Ranks start together and end together: if one is started again before any mean was given
    out, all begin anew; later, the others get `QuorumLost` naming it, and everybody makes a new object.

    Raises, within `timeout_s`: `QuorumLost` with the ranks that are missing (also a `TimeoutError` if the time is up),
    `PartsDiffer` with what each rank gave if shapes or dtypes differ, `CorruptUpdate`, `Fenced` if another process has
    this rank, `StoreError`. After `QuorumLost` or `StoreError` the same call can be made again and goes on waiting for
    the same mean.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Store,
        rank: int,
        world_size: int,
        *,
        round_id: str | int | None = None,
        timeout_s: float = 1800.0,
        poll_interval_s: float = 0.05,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        """`poll_interval_s` is the first pause between two looks at the store; later ones grow to 2 s."""
        _check(rank, world_size, timeout_s, poll_interval_s)
        self.store = open_store(uri) if isinstance(uri, str | os.PathLike) else uri
        self.uri, self.rank, self.world_size = self.store.uri, rank, world_size
        self.round_id = None if round_id is None else check_name("round_id", str(round_id))
        self._client = NamedClient(
            self.store, self.round_id, rank, world_size,
            timeout_s=timeout_s, poll_first_s=poll_interval_s, clock=clock, rng=rng,
        )  # fmt: skip

    @property
    def counters(self) -> Counters:
        """Requests and bytes so far."""
        return self._client.counters

    def allreduce(self, tensor: Tensor, name: str) -> Tensor:
        """The mean over all ranks, written into `tensor`, which is also returned.

        Any shape, dtype and device; see `allreduce_tensors` for how each dtype is averaged. Gradients do not flow
        through it. The same name may be used again, and any number of names. NaN and infinity are averaged like other
        values.
        """
        self.allreduce_coalesced([tensor], name)
        return tensor

    def allreduce_coalesced(self, tensors: Sequence[Tensor], name: str, *, note: str = "") -> Sequence[Tensor]:
        """The mean of several tensors in one exchange, in place. `note` must be the same text on every rank."""
        payloads = self._exchange(tensors, name, "mean", note)
        if self.world_size > 1:
            for rank, payload in enumerate(payloads):
                check_size(payload, tensors, name, rank)
            write_back(tensors, mean_of(payloads, tensors))
        return tensors

    def broadcast(self, tensors: Sequence[Tensor], name: str, *, root: int = 0) -> Sequence[Tensor]:
        """The values that rank `root` has, on every rank, in place."""
        if not 0 <= root < self.world_size:
            raise InvalidSpec("broadcast", [f"root={root}: a rank from 0 to {self.world_size - 1}"])
        payloads = self._exchange(tensors, name, f"broadcast from {root}", sends=self.rank == root)
        if self.rank != root:
            check_size(payloads[root], tensors, name, root)
            write_back(tensors, values_of(payloads[root], tensors))
        return tensors

    def close(self) -> None:
        """Say goodbye to the others; the last to do so deletes what is left in the store. Not usable afterwards."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(
        self, tensors: Sequence[Tensor], name: str, operation: str, note: str = "", *, sends: bool = True
    ) -> list[memoryview]:
        check_name("name", name)
        for i, tensor in enumerate(tensors):
            check_tensor(tensor, name if len(tensors) == 1 else f"{name}[{i}]")
        payload = as_payload(tensors) if sends else memoryview(b"")
        if self.world_size == 1:
            return [payload]
        found = self._client.exchange(name, Part(operation, specs_of(tensors), note, payload))
        return [read.payload for read in found]


def _check(rank: int, world_size: int, timeout_s: float, poll_interval_s: float) -> None:
    problems = []
    if not _is_whole(world_size) or world_size < 1:
        problems.append(f"world_size={world_size!r}: a whole number from 1")
    elif not _is_whole(rank) or not 0 <= rank < world_size:
        problems.append(f"rank={rank!r}: a whole number from 0 to {world_size - 1}")
    for name, value in (("timeout_s", timeout_s), ("poll_interval_s", poll_interval_s)):
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            problems.append(f"{name}={value!r}: seconds above 0")
    if problems:
        raise InvalidSpec("all-reduce", problems)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
