"""Tracebacks of a replica: the user's own frames, and none of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import ConfigError, Conflict, InternalError, StoreError
from atoll.registry import open_store
from atoll.replica.entry_runner import traceback_text
from atoll.replica.rank_process import RankProcess, StopReason, exit_verdict
from atoll.rounds.client import RoundClient
from atoll.rounds.keys import RoundKeys
from atoll.rounds.layout import Layout
from atoll.stores.memory import MemoryStore


def told(act: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        act()
    return traceback_text(caught.value)


def take_part(store: MemoryStore, size: int) -> None:
    with RoundClient(store, "r", 0, 1, layouts=[Layout.of([("w", [size], "float32")])]) as client:
        client.join([np.zeros(size, np.float32).tobytes()])


def test_a_conflict_ends_with_the_line_of_the_user_that_met_it():
    store = MemoryStore()
    take_part(store, 4)
    text = told(lambda: take_part(store, 8), Conflict)
    assert "client.join([np.zeros" in text
    assert "/atoll/rounds/" not in text


def test_what_the_system_told_us_is_in_our_message_and_nowhere_else(tmp_path: Path):
    (tmp_path / "file").touch()
    text = told(lambda: open_store((tmp_path / "file").as_uri()).put("k", b""), StoreError)
    assert "/atoll/stores/" not in text
    assert "direct cause" not in text
    assert "Not a directory" in text


def misuse() -> None:
    try:
        raise ValueError("of the user's own")
    except ValueError as exc:
        raise ConfigError("ours") from exc


def test_what_the_user_did_stays():
    text = told(misuse, ConfigError)
    assert "ValueError: of the user's own" in text
    assert "direct cause" in text
    assert text.endswith("ConfigError: ours\n")


def test_where_nobody_but_us_had_a_part_our_frames_stay():
    with pytest.raises(ConfigError) as caught:
        open_store("s3:/bucket")
    first = caught.value.__traceback__
    assert first is not None
    text = traceback_text(caught.value.with_traceback(first.tb_next))  # without the frame of this test
    assert "/atoll/registry.py" in text


def test_a_bug_of_ours_and_whoever_asks_for_it_is_shown_all(monkeypatch: pytest.MonkeyPatch):
    assert "/atoll/rounds/keys.py" in told(lambda: RoundKeys("r").claim(-1, 0), InternalError)
    store = MemoryStore()
    take_part(store, 4)
    monkeypatch.setenv("ATOLL_DEBUG", "1")
    assert "/atoll/rounds/" in told(lambda: take_part(store, 8), Conflict)


@pytest.mark.parametrize(("is_final", "state"), [(False, "pending"), (True, "failed")])
def test_a_replica_whose_end_is_final_is_not_restarted(is_final: bool, state: str):
    outcome = {"state": "failed", "reason": "timeout", "message": "QuorumLost: …", "is_final": is_final}
    process = RankProcess(0, max_restarts=2, timeout_s=60.0, grace_s=1.0)
    process.started(123, now=0.0, wall=0.0)
    process.ended(exit_verdict(5 << 8, StopReason.NONE, outcome, limit_s=60.0, oom=False), wall=1.0)
    process.stored(now=1.0)
    assert (process.state, process.attempt) == (state, 0 if is_final else 1)


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (37, "signal 37")])
def test_every_signal_that_ends_a_replica_has_a_name(number: int, name: str):
    """Most real-time signals have none in Python."""
    verdict = exit_verdict(number, StopReason.NONE, None, limit_s=60.0, oom=False)
    assert (verdict.reason, verdict.message, verdict.exit_code) == ("killed", f"killed by {name}", 128 + number)
