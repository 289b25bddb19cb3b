"""Statements 11 to 14: rows, what `collect` waits for, and values that are not JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.errors import AtollError
from atoll.testing.protocol_contract.bench import JOBS, FacadeBench
from atoll.testing.protocol_contract.gallery import RETURNED, Gallery, Held
from atoll.testing.protocol_jobs import Odd

FIELDS = ["rank", "status", "exit_code", "error", "result", "run_id", "rendezvous_uri", "reason", "attempt", "warnings"]


class CollectStatements:
    """Most of these look at the rows of one `collect` over all runs of the gallery."""

    # ── 11. The handles that were given ─────────────────────────────────────────────────────────────────────────

    def test_p11_collect_waits_only_for_the_handles_it_was_given(self, held: Held) -> None:
        rows = held.steps["rows of those that have ended"]
        assert [(row["rank"], row["status"]) for row in rows] == [(1, held.ended[1]), (0, held.ended[0])]
        assert held.steps["states after those"][2:] == ["running", "running"]

    def test_p11_a_cancelled_replica_has_its_row_while_the_others_run(self, held: Held) -> None:
        (row,) = held.steps["row of the cancelled one"]
        assert (row["rank"], row["status"], row["result"]) == (2, "cancelled", None)
        assert row["error"]

    def test_p11_rows_of_several_runs_come_in_the_order_of_the_handles(self, gallery: Gallery) -> None:
        rows = gallery.rows["all"]
        assert [(row["run_id"], row["rank"]) for row in rows] == [
            (handle.metadata["run_id"], handle.rank) for handle in gallery.every
        ]
        exit_3, returned = (gallery.handle(*gallery.ends[number]) for number in (2, 0))
        mixed = [exit_3, gallery.handle("colon"), returned, gallery.handle("colon")]
        again = gallery.facade.collect(mixed, timeout=gallery.bench.patience_s)
        assert [(row["run_id"], row["rank"]) for row in again] == [
            (handle.metadata["run_id"], handle.rank) for handle in mixed
        ]

    def test_p11_no_handles_no_rows(self, bench: FacadeBench) -> None:
        assert bench.usual().collect([]) == []

    # ── 12. The deadline ────────────────────────────────────────────────────────────────────────────────────────

    def test_p12_at_the_deadline_finished_replicas_have_their_real_rows(self, held: Held) -> None:
        for row, status in zip(held.steps["rows at the deadline"], held.ended, strict=False):
            found = [row[name] for name in ("status", "exit_code", "result")]
            assert found == (["succeeded", 0, "return"] if status == "succeeded" else ["failed", 1, None])
            assert ("ValueError: rank 1 raises" in (row["error"] or "")) == (status == "failed")

    def test_p12_at_the_deadline_the_others_have_their_state_and_an_error_that_says_so(self, held: Held) -> None:
        for row in held.steps["rows at the deadline"][2:]:
            assert (row["status"], row["exit_code"], row["result"]) == ("running", None, None)
            assert "running" in row["error"]

    def test_p12_a_deadline_stops_nothing(self, held: Held) -> None:
        assert held.steps["states after the deadline"] == [*held.ended, "running", "running"]

    def test_p12_a_replica_in_the_queue_is_pending_at_the_deadline(self, bench: FacadeBench) -> None:
        facade = bench.usual()
        with bench.queue_held():
            handles = facade.launch_replicas(1, f"{JOBS}:hold", {"key": "never"}, timeout=600)
            (row,) = facade.collect(handles, timeout=0)
            facade.cancel(handles[0])
        assert row["status"] in ("pending", "running")
        assert row["error"]

    def test_p12_without_a_deadline_the_replicas_own_limit_ends_the_wait(self, gallery: Gallery) -> None:
        row = gallery.row("late")
        assert (row["status"], row["reason"], row["result"]) == ("failed", "timeout", None)

    # ── 13. Rows ────────────────────────────────────────────────────────────────────────────────────────────────

    def test_p13_a_row_has_these_fields(self, bench: FacadeBench, gallery: Gallery) -> None:
        for name, handles in gallery.handles.items():
            for handle in handles:
                row = gallery.row(name, handle.rank)
                own = [*bench.native_ids, *bench.run_ids]
                missing = {*FIELDS, *own} - set(row)
                assert not missing, f"{name}: no {missing}"
                assert row["rendezvous_uri"] == handle.metadata["store"]
                assert [row[key] for key in own] == [handle.metadata[key] for key in own]
        assert json.loads(json.dumps(gallery.rows["all"])) == gallery.rows["all"]

    def test_p13_a_succeeded_row_has_the_backends_own_results(self, bench: FacadeBench, gallery: Gallery) -> None:
        row = gallery.row("colon")
        missing = [key for key in bench.row_ids if row.get(key) in (None, "")]  # a short job may have run for 0 seconds
        assert not missing, row

    def test_p13_each_end_has_its_status_exit_code_and_error(self, gallery: Gallery) -> None:
        rows = [gallery.row(*place) for place in gallery.ends]
        found = [(row["status"], row["exit_code"], row["result"]) for row in rows]
        assert found == [("succeeded", 0, "return"), ("failed", 1, None), ("failed", 3, None), ("failed", 137, None)]
        assert rows[0]["error"] is None
        assert f"ValueError: rank {rows[1]['rank']} raises" in rows[1]["error"]
        assert rows[2]["error"]
        assert rows[3]["error"]

    # ── 14. Values that are not JSON ────────────────────────────────────────────────────────────────────────────

    def test_p14_tuples_sets_dataclasses_paths_and_numpy_scalars_are_converted(self, gallery: Gallery) -> None:
        assert _sorted_set(_returned(gallery, "converted")) == CONVERTED
        assert _warnings(gallery, "converted") == []

    def test_p14_tensors_without_dimensions_are_converted(self, gallery: Gallery) -> None:
        assert _returned(gallery, "tensors") == {"loss": 0.5, "steps": 7}
        assert _warnings(gallery, "tensors") == []

    def test_p14_any_other_value_is_kept_as_text_with_a_warning(self, gallery: Gallery) -> None:
        assert _returned(gallery, "object") == repr(Odd())
        assert _returned(gallery, "nested") == {"kept": 1, "odd": [repr(Odd()), repr(b"\xff")]}
        for part in ("object", "nested"):
            found = _warnings(gallery, part)
            assert found, part
            assert all(isinstance(warning, str) for warning in found)

    def test_p14_a_number_that_json_does_not_have_fails_nothing(self, gallery: Gallery) -> None:
        assert gallery.row("returned", RETURNED.index("nan"))["status"] == "succeeded"

    def test_p14_arguments_are_converted_in_the_same_way(self, gallery: Gallery) -> None:
        assert _sorted_set(gallery.result("arguments")["arguments"]) == CONVERTED

    @pytest.mark.parametrize("value", [Odd(), b"\xff", float("nan"), {"a": [Odd()]}], ids=repr)
    def test_p14_arguments_that_cannot_be_converted_are_refused(self, bench: FacadeBench, value: Any) -> None:
        with pytest.raises((TypeError, ValueError)) as caught:
            bench.usual().launch_replicas(1, f"{JOBS}:echo", {"value": value})
        assert isinstance(caught.value, AtollError)
        assert "value" in str(caught.value)
        assert bench.running() == []


CONVERTED = {
    "tuple": [1, [2, "é"]],
    "set": [1, 2, 3],
    "dataclass": {"x": 1, "y": 2},
    "path": "/tmp/model.pt",
    "numpy": [0.5, 7, True],
}


def _returned(gallery: Gallery, part: str) -> Any:
    return gallery.result("returned", RETURNED.index(part))


def _warnings(gallery: Gallery, part: str) -> Any:
    return gallery.row("returned", RETURNED.index(part))["warnings"]


def _sorted_set(found: dict[str, Any]) -> dict[str, Any]:
    """The order of a set is not promised."""
    return {**found, "set": sorted(found["set"])}
