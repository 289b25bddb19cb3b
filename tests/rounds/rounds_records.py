"""The records that a launcher and the supervisors of replicas write to the store of the toy run."""

from __future__ import annotations

import json
from typing import Any

from atoll.keys import RunKeys
from atoll.spec import RunSpec
from atoll.stores.memory import MemoryStore

KEYS = RunKeys("toy")


def launched(replicas: int, **options: Any) -> MemoryStore:
    """A store with the record of a run that a launcher started."""
    store = MemoryStore()
    spec = RunSpec.build("train:train", run_id="toy", replicas=replicas, **options)
    store.create(KEYS.run(), json.dumps({"format": 1, "spec": spec.to_json(), "executor": "local"}).encode())
    return store


def beat(store: MemoryStore, rank: int, attempt: int = 0, at: float = 5.0) -> None:
    store.put(KEYS.beat(rank), json.dumps({"attempt": attempt, "round_no": 0, "beat_at": at}).encode())


def ended(store: MemoryStore, rank: int, attempt: int = 0, **record: Any) -> None:
    """What the supervisor of a rank writes after it has ended."""
    beat(store, rank, attempt)
    known = {"rank": rank, "attempt": attempt, "state": "failed", "reason": "killed", "message": "killed by SIGKILL"}
    store.create(KEYS.outcome(rank, attempt), json.dumps({**known, **record}).encode())
