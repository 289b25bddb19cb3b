"""Statement 6, and the refusals of statement 1: wrong input and failed launches raise Python's errors and Atoll's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from atoll.errors import AtollError
from atoll.testing.protocol_contract.bench import JOBS, FacadeBench
from atoll.testing.protocol_contract.gallery import WITHOUT_MAIN
from atoll.testing.protocol_jobs import Odd

ENTRY_MODULE = "atoll.serverless.replica_entrypoint"
BAD_ENTRYPOINTS: list[Any] = [None, 42, "", "not a name", "module:", ":function", [], lambda: 1, Odd()]


def _shown(value: Any) -> str:
    return getattr(value, "__name__", repr(value))


class RefusalStatements:
    """Nothing has started after each of these."""

    @pytest.mark.parametrize("count", [0, -1, 1.5, "two", None])
    def test_p06_a_count_below_one_is_a_value_error(self, bench: FacadeBench, count: Any) -> None:
        with pytest.raises(ValueError) as caught:
            bench.usual().launch_replicas(count, f"{JOBS}:echo", {})
        assert isinstance(caught.value, AtollError)

    @pytest.mark.parametrize("entrypoint", BAD_ENTRYPOINTS, ids=_shown)
    def test_p06_a_bad_entrypoint_is_a_type_or_value_error(self, bench: FacadeBench, entrypoint: Any) -> None:
        with pytest.raises((TypeError, ValueError)) as caught:
            bench.usual().launch_replicas(1, entrypoint, {})
        assert isinstance(caught.value, AtollError)
        assert bench.running() == []

    @pytest.mark.parametrize(
        ("entrypoint", "args"),
        [
            (ENTRY_MODULE, {}),
            (ENTRY_MODULE, {"trainer_fn": "train", "trainer_kwargs": {}}),
            ("", {"trainer_kwargs": {"lr": 1}}),
            (ENTRY_MODULE, {"trainer_module": ""}),
        ],
    )
    def test_p06_a_missing_trainer_module_is_a_value_error(
        self, bench: FacadeBench, entrypoint: str, args: dict[str, Any]
    ) -> None:
        with pytest.raises(ValueError, match="trainer_module") as caught:
            bench.usual().launch_replicas(1, entrypoint, {"rendezvous_uri": bench.store("store"), **args})
        assert isinstance(caught.value, AtollError)

    def test_p06_a_trainer_without_any_store_is_a_value_error(self, bench: FacadeBench) -> None:
        with pytest.raises(ValueError, match="rendezvous_uri") as caught:
            bench.facade().launch_replicas(1, ENTRY_MODULE, {"trainer_module": JOBS})
        assert isinstance(caught.value, AtollError)

    @pytest.mark.parametrize(
        "args",
        [
            {"trainer_module": JOBS, "lr": 0.1},
            {"trainer_module": 7},
            {"trainer_module": JOBS, "trainer_fn": 7},
            {"trainer_module": JOBS, "trainer_kwargs": [1]},
            {"trainer_module": JOBS, "rank_env": "not a name"},
        ],
    )
    def test_p06_arguments_that_the_trainer_form_does_not_have_are_refused(
        self, bench: FacadeBench, args: dict[str, Any]
    ) -> None:
        with pytest.raises((TypeError, ValueError)) as caught:
            bench.usual().launch_replicas(1, ENTRY_MODULE, args)
        assert isinstance(caught.value, AtollError)

    @pytest.mark.parametrize("args", [[1], "lr=1", 7, {1: 2}])
    def test_p06_arguments_that_are_no_table_of_names_are_refused(self, bench: FacadeBench, args: Any) -> None:
        with pytest.raises((TypeError, ValueError)) as caught:
            bench.usual().launch_replicas(1, f"{JOBS}:echo", args)
        assert isinstance(caught.value, AtollError)

    @pytest.mark.parametrize("options", [{"gpu": "A1000"}, {"gpu": 7}, {"timeout": 0}, {"timeout": -1}])
    def test_p06_an_unknown_gpu_or_a_bad_limit_is_a_value_error(
        self, bench: FacadeBench, options: dict[str, Any]
    ) -> None:
        with pytest.raises(ValueError) as caught:
            bench.usual().launch_replicas(1, f"{JOBS}:echo", {}, **options)
        assert isinstance(caught.value, AtollError)

    def test_p01_a_refused_entrypoint_shows_both_forms(self, bench: FacadeBench) -> None:
        other = {"trainer_module": JOBS, "trainer_fn": "echo"}
        for entrypoint, args in ((42, {}), ("not a name", {}), (f"{JOBS}:hold", other)):
            with pytest.raises((TypeError, ValueError)) as caught:
                bench.usual().launch_replicas(1, entrypoint, args)  # type: ignore[arg-type]
            assert re.search(r"\w+\.\w+:\w+'.*'trainer_module'", str(caught.value), re.S), (
                f"{entrypoint!r}: {caught.value}"
            )

    def test_p06_a_module_without_main_is_a_runtime_error(self, bench: FacadeBench) -> None:
        """Where the code is not on this machine, the replica finds it out."""
        facade = bench.usual()
        if bench.is_local:
            with pytest.raises(RuntimeError, match="main") as caught:
                facade.launch_replicas(1, WITHOUT_MAIN, {})
            assert isinstance(caught.value, AtollError)
            return
        try:
            handles = facade.launch_replicas(1, WITHOUT_MAIN, {})
        except RuntimeError as exc:
            assert "main" in str(exc)
        else:
            (row,) = facade.collect(handles, timeout=bench.patience_s)
            assert row["status"] == "failed"
            assert "main" in row["error"]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_p06_a_launch_that_fails_at_a_rank_is_a_runtime_error_that_names_it(
        self, bench: FacadeBench, rank: int
    ) -> None:
        with bench.rank_broken(rank), pytest.raises(RuntimeError, match=rf"rank\W*{rank}\b") as caught:
            bench.usual().launch_replicas(2, f"{JOBS}:echo", {})
        assert isinstance(caught.value, AtollError)
        assert bench.running() == []

    def test_p06_a_missing_sdk_is_a_runtime_error_that_names_the_extra(self, bench: FacadeBench) -> None:
        if not bench.sdk:
            pytest.skip("this adapter needs no SDK")
        code = (
            "try:\n"
            "    Facade(**settings).launch_replicas(1, entry, {'rendezvous_uri': 's3://bucket/x'})\n"
            "except RuntimeError as exc:\n"
            "    answer = [isinstance(exc, ImportError), extra in str(exc)]\n"
        )
        found = bench.elsewhere(code, blocked=bench.sdk, entry=f"{JOBS}:echo", extra=bench.extra)
        assert found == [True, True]
