"""Statements 15 and 16: the lines of a replica, and what its handle tells."""

from __future__ import annotations

import dataclasses
import json

from atoll.testing import protocol_jobs
from atoll.testing.protocol_contract.bench import JOBS, FacadeBench, until
from atoll.testing.protocol_contract.gallery import Gallery
from atoll.testing.protocol_contract.poll_and_cancel import assert_placeholder


class LogStatements:
    """`stream_logs` and `metadata`."""

    # ── 15. Lines ───────────────────────────────────────────────────────────────────────────────────────────────

    def test_p15_logs_are_the_lines_of_the_replica_and_nothing_else(self, bench: FacadeBench, gallery: Gallery) -> None:
        handle, wanted = gallery.handle(*gallery.ends[0]), "first line of 0\nlast line of 0\n"
        until(bench, "the lines are there", lambda: gallery.facade.stream_logs(handle) == wanted)
        assert gallery.facade.stream_logs(handle) == wanted
        assert gallery.facade.stream_logs(handle, n_lines=1) == "last line of 0\n"

    def test_p15_a_replica_that_printed_nothing_has_a_placeholder(self, gallery: Gallery) -> None:
        assert_placeholder(gallery.facade.stream_logs(gallery.handle("colon")), 0)

    def test_p15_before_there_is_a_log_one_line_says_why(self, bench: FacadeBench) -> None:
        facade, key = bench.usual(), "quiet"
        with bench.queue_held():
            handles = facade.launch_replicas(2, f"{JOBS}:hold", {"key": key}, timeout=600)
            queued = facade.stream_logs(handles[1])
        try:
            until(bench, "the replica runs", lambda: facade.poll(handles[1]) == "running")
            running = facade.stream_logs(handles[1])
        finally:
            protocol_jobs.let_go(bench.store("store"), key)
            facade.collect(handles, timeout=bench.patience_s)
        for text in (queued, running):
            assert_placeholder(text, 1)
            assert "no logs yet: " in text

    # ── 16. Metadata ────────────────────────────────────────────────────────────────────────────────────────────

    def test_p16_metadata_is_json_with_the_names_of_the_backend(self, bench: FacadeBench, gallery: Gallery) -> None:
        for name, handles in gallery.handles.items():
            for handle in handles:
                saved = json.loads(json.dumps(dataclasses.asdict(handle)))
                assert saved == dataclasses.asdict(handle)
                missing = {"run_id", "run", "store", "launch", "rank", "submit_ts", "links"}
                missing |= {*bench.native_ids, *bench.run_ids}
                assert not missing - set(handle.metadata), f"{name}: no {missing - set(handle.metadata)}"
                assert handle.metadata["rank"] == handle.rank
                assert handle.backend_name == bench.facade_class.backend_name
        names = [handle.metadata[key] for handle in gallery.every for key in bench.native_ids]
        assert len(set(names)) == len(names), "two replicas have one native id"

    def test_p16_submit_ts_is_the_time_of_the_launch(self, gallery: Gallery) -> None:
        for name, handles in gallery.handles.items():
            before, after = gallery.launched_between[name]
            for handle in handles:
                assert before - 1 <= handle.metadata["submit_ts"] <= after + 1

    def test_p16_links_lead_to_the_pages_of_the_backend(self, bench: FacadeBench, gallery: Gallery) -> None:
        for handle in [gallery.handle(*place) for place in gallery.ends]:
            links = handle.metadata["links"]
            assert set(links) == set(bench.link_names)
            assert all(link.startswith("https://") for link in links.values())
        assert len({json.dumps(handle.metadata["links"]) for handle in gallery.every}) == (
            len(gallery.every) if bench.link_names else 1
        )

    def test_p16_a_local_handle_has_the_process_and_its_start(self, bench: FacadeBench, gallery: Gallery) -> None:
        handles = gallery.handles["variables"]
        if not bench.is_local:
            assert all("pid" not in handle.metadata for handle in handles)
            return
        before, after = gallery.launched_between["variables"]
        assert all(handle.metadata["pid"] > 1 for handle in handles)
        assert all(before - 1 <= handle.metadata["start_ts"] <= after + 1 for handle in handles)
