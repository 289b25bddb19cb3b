"""Statements 9 and 10: one replica is stopped, and handles that the backend or the store does not know."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from atoll.errors import AtollError
from atoll.serverless.protocol import ReplicaHandle, ServerlessExecutor
from atoll.testing import protocol_jobs
from atoll.testing.protocol_contract.bench import JOBS, FacadeBench
from atoll.testing.protocol_contract.gallery import LOSERS, TERMINAL, Gallery, Held

FOUR: list[Callable[[ServerlessExecutor, ReplicaHandle], Any]] = [
    lambda facade, handle: facade.poll(handle),
    lambda facade, handle: facade.cancel(handle),
    lambda facade, handle: facade.stream_logs(handle),
    lambda facade, handle: facade.collect([handle], timeout=1),
]


class CancelStatements:
    """`poll` and `cancel`, in this process and in another."""

    # ── 9. One replica, or all of them ──────────────────────────────────────────────────────────────────────────

    def test_p09_cancel_stops_that_replica_only_unless_the_backend_stops_all(
        self, bench: FacadeBench, held: Held
    ) -> None:
        assert held.steps["cancel"] is None
        other = "cancelled" if bench.cancels_together else "running"
        assert held.steps["states after the cancel"] == [*held.ended, "cancelled", other]

    def test_p09_cancel_again_and_after_the_end_is_quiet_and_changes_nothing(
        self, bench: FacadeBench, held: Held
    ) -> None:
        """Where `cancel` of any replica stops them all, the one that has ended is cancelled after the others."""
        assert held.steps["cancel of one that has ended"] is None
        others = "cancelled" if bench.cancels_together else "running"
        assert held.steps["states after that"] == [*held.ended, others, others]
        assert held.steps["second cancel"] is None

    def test_p09_the_replica_that_was_not_cancelled_ends_by_itself(self, bench: FacadeBench, held: Held) -> None:
        rows = held.steps["rows at the end"]
        last = "cancelled" if bench.cancels_together else "succeeded"
        assert [row["status"] for row in rows] == [*held.ended, "cancelled", last]
        assert rows[3]["result"] == (None if bench.cancels_together else "hold")

    def test_p09_a_replica_that_waits_in_the_queue_is_cancelled(self, bench: FacadeBench) -> None:
        facade, key = bench.usual(), "never"
        with bench.queue_held():
            handles = facade.launch_replicas(1, f"{JOBS}:hold", {"key": key}, timeout=600)
            assert facade.poll(handles[0]) in ("pending", "running")
            facade.cancel(handles[0])
        assert facade.poll(handles[0]) == "cancelled"
        (row,) = facade.collect(handles, timeout=bench.patience_s)
        assert (row["status"], row["result"]) == ("cancelled", None)
        assert row["error"]

    def test_p09_another_process_cancels_by_the_saved_handle(self, bench: FacadeBench) -> None:
        facade, key = bench.usual(), "elsewhere"
        handles = facade.launch_replicas(2, f"{JOBS}:hold", {"key": key}, timeout=600)
        try:
            code = (
                "handles = [ReplicaHandle(**each) for each in saved]\n"
                "facade = Facade(**settings)\n"
                "facade.cancel(handles[0])\n"
                "answer = [facade.poll(handle) for handle in handles]\n"
            )
            found = bench.elsewhere(code, saved=[dataclasses.asdict(handle) for handle in handles])
            assert found[0] == "cancelled"
            assert found[1] == ("cancelled" if bench.cancels_together else found[1])
        finally:
            protocol_jobs.let_go(bench.store("store"), key)
        rows = facade.collect(handles, timeout=bench.patience_s)
        last = "cancelled" if bench.cancels_together else "succeeded"
        assert [row["status"] for row in rows] == ["cancelled", last]

    # ── 10. Handles that are not known, or not handles ──────────────────────────────────────────────────────────

    def test_p10_a_handle_that_neither_backend_nor_store_knows_is_lost(
        self, bench: FacadeBench, gallery: Gallery
    ) -> None:
        facade, unknown = bench.usual(), _renamed(gallery.handle("colon"))
        assert facade.poll(unknown) == "lost"
        assert facade.cancel(unknown) is None  # type: ignore[func-returns-value]
        assert_placeholder(facade.stream_logs(unknown), 0)
        for timeout in (1, None):
            (row,) = facade.collect([unknown], timeout=timeout)
            assert (row["rank"], row["status"], row["exit_code"], row["result"]) == (0, "lost", None, None)
            assert row["error"]
            assert row["run_id"] == unknown.metadata["run_id"]

    def test_p10_an_unknown_handle_does_not_spoil_the_rows_of_others(
        self, bench: FacadeBench, gallery: Gallery
    ) -> None:
        known = gallery.handle("colon")
        rows = bench.usual().collect([_renamed(known), known], timeout=bench.patience_s)
        assert [row["status"] for row in rows] == ["lost", "succeeded"]

    @pytest.mark.parametrize("loser", LOSERS)
    def test_p10_a_run_that_was_forgotten_raises_nothing(
        self, bench: FacadeBench, gallery: Gallery, loser: str
    ) -> None:
        """Where one of the two still knows how the replica ended, its answer counts."""
        facade, handle = gallery.facade, gallery.handle(f"lost-{loser}")
        assert gallery.row(f"lost-{loser}")["status"] == "succeeded"
        if loser != "backend":
            bench.lose_store(f"lost-{loser}")
        if loser != "store":
            bench.forget(handle)
        state = facade.poll(handle)
        assert state == ("lost" if loser == "both" else state)
        assert state in ("lost", "succeeded")
        assert facade.cancel(handle) is None  # type: ignore[func-returns-value]
        assert facade.stream_logs(handle) != ""
        (row,) = facade.collect([handle], timeout=5)
        assert row["status"] == state
        assert row["error"] or state == "succeeded"

    def test_p10_a_handle_of_another_backend_raises(self, bench: FacadeBench, gallery: Gallery) -> None:
        foreign = dataclasses.replace(gallery.handle("colon"), backend_name="nobody")
        for method in FOUR:
            with pytest.raises(ValueError) as caught:
                method(bench.usual(), foreign)
            assert isinstance(caught.value, AtollError)

    @pytest.mark.parametrize("broken", ["empty", "without run", "other text", "rank below", "rank above"])
    def test_p10_a_malformed_handle_raises(self, bench: FacadeBench, gallery: Gallery, broken: str) -> None:
        good = gallery.handle("colon")
        made = {
            "empty": dataclasses.replace(good, metadata={}),
            "without run": dataclasses.replace(
                good, metadata={name: value for name, value in good.metadata.items() if name != "run"}
            ),
            "other text": dataclasses.replace(good, metadata={**good.metadata, "run": "no handle"}),
            "rank below": dataclasses.replace(good, rank=-1),
            "rank above": dataclasses.replace(good, rank=1),
        }[broken]
        for method in FOUR:
            with pytest.raises(ValueError) as caught:
                method(bench.usual(), made)
            assert isinstance(caught.value, AtollError)

    def test_p10_local_handles_with_the_earlier_name_are_read(self, bench: FacadeBench, gallery: Gallery) -> None:
        earlier = dataclasses.replace(gallery.handle("colon"), backend_name="local")
        facade = bench.usual()
        if not bench.is_local:
            with pytest.raises(ValueError):
                facade.poll(earlier)
            return
        assert facade.poll(earlier) == "succeeded"
        assert facade.collect([earlier], timeout=bench.patience_s)[0]["status"] == "succeeded"

    def test_p10_a_terminal_state_is_one_of_the_protocols_words(self, gallery: Gallery) -> None:
        states = {gallery.facade.poll(handle) for handle in gallery.every}
        assert states <= set(TERMINAL)


def assert_placeholder(text: str, rank: int) -> None:
    """One line in angle brackets that names the replica and says why there are no lines."""
    line = text.rstrip("\n")
    assert "\n" not in line
    assert line.startswith(f"<replica {rank}: "), text
    assert line.endswith(">"), text


def _renamed(handle: ReplicaHandle) -> ReplicaHandle:
    """The handle of a run that never was: its run id, wherever it occurs, has another last character."""
    run_id = handle.metadata["run_id"]
    other = run_id[:-1] + ("0" if run_id[-1] != "0" else "1")
    text = json.dumps(handle.metadata).replace(run_id, other)
    return ReplicaHandle(handle.rank, handle.backend_name, json.loads(text))
