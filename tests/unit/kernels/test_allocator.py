"""The allocator of the process is changed only for a client that asks for it, and once."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from atoll.kernels import allocator
from atoll.rounds.client import RoundClient
from atoll.rounds.layout import Layout
from atoll.rounds.tuning import Tuning
from atoll.stores.memory import MemoryStore

LAYOUT = Layout.of([("w", [4], "float32")])
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The options that are given to a `mallopt` that stands in for glibc's."""
    given: list[int] = []

    def mallopt(option: int, value: int) -> int:
        given.append(option)
        return 1

    monkeypatch.setattr(allocator, "_is_set", False)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    return given


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_a_client_changes_the_allocator_only_if_its_tuning_says_so(options: list[int]) -> None:
    for tuning, wanted in [
        (None, []),
        (Tuning(), []),
        (Tuning(keep_freed_memory=True), [ARENA_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD]),
        (Tuning(keep_freed_memory=True), [ARENA_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD]),
    ]:
        RoundClient(MemoryStore("allocator"), "run", 0, 1, layouts=[LAYOUT], tuning=tuning).close()
        assert options == wanted
