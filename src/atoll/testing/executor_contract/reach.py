"""Clauses about handles, separate runs, arguments and logs: E4 E9 E11 E13."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from atoll.errors import AtollError, RunNotFound
from atoll.handle import RunHandle
from atoll.status import ReplicaState
from atoll.testing import contract_jobs
from atoll.testing.bench import Bench, cancelled, cleared, entered, launched, let_go, logged, order, over, until
from atoll.testing.other_process import ask

LINES = [
    "first line of {rank}",
    "  spaces at both ends  ",
    "",
    "ünïcödé 跑 🚀 {rank}",
    "\ttab 'quotes' \"double\" \\n \\ %s {}",
    "x" * 20_000,
    "last whole line",
]
ARGUMENTS: dict[str, Any] = {
    "nested": {"list": [1, [2, [3, {"four": [None, True, False, {}, []]}]]], "": "empty key", "a.b/c d": -1},
    "unicode": "ünïcödé 跑步 עברית 🚀 e\u0301 \u200f \u2028 \x00 \x7f",
    "quotes": "it's \"quoted\" `x` $(touch /x) ${HOME} %PATH% \\n \\\\ '\"'\"' && ; | > <",
    "newlines": "one\ntwo\r\nthree\rfour\n\n",
    "numbers": [0, -1, 2**53 + 1, 10**30, 0.1, 1e-300, -0.0, 1.7976931348623157e308],
    "words": ["null", "true", "1e3", "", " ", "-x", "--flag=1", "@file", "{}", "[]"],
    "big": "0123456789é" * 10_000,
    "many": list(range(5000)),
}


class ReachClauses:
    """What one process writes, another process reads unchanged; runs do not affect each other."""

    # E4 a handle survives text, and a fresh executor in another process can use it

    def test_e04_a_handle_is_one_line_that_reads_back(self, bench: Bench) -> None:
        with launched(bench, "echo", 2) as run:
            text = str(run.handle)
            over(bench, run)
        assert "\n" not in text
        assert RunHandle.parse(text) == run.handle
        assert run.handle.executor == run.executor.name
        assert run.handle.replicas == 2

    def test_e04_another_process_can_use_it(self, bench: Bench) -> None:
        lines = ["rank {rank} is here"]
        with launched(bench, "say", 2, args={"lines": lines, "then_hold": True}) as run:
            entered(bench, run)
            until(bench, "the line is in the log", lambda: list(run.executor.logs(run.handle, 1)))
            answer = ask(bench, "use", handle=str(run.handle), rank=1, cwd="/")
            assert not bench.running(run.id), "another process cancelled the run, and something still runs"
        assert [r["state"] for r in answer["before"]["replicas"]] == [ReplicaState.RUNNING] * 2
        assert answer["log"] == ["rank 1 is here"]
        forgets = bench.executor().capabilities.forgets_cancelled  # the record of the run is not part of this clause
        after = ReplicaState.LOST if forgets else ReplicaState.CANCELLED
        assert [r["state"] for r in answer["after"]["replicas"]] == [after] * 2

    # E9 two runs do not see each other

    def test_e09_two_runs_do_not_see_each_other(self, bench: Bench) -> None:
        """Names with a common prefix and ends like a rank: an adapter that matches by prefix or rank alone fails."""
        names = ["pair", "pair-0", "pair-0-1"]
        with cleared(bench, *names):
            runs = [_say(bench, name).draft(bench.executor(), bench.store_uri).submit() for name in names]
            for run in runs:
                entered(bench, run)
            first, *others = runs
            ended = cancelled(bench, first)
            for run in others:
                states = [r.state for r in run.executor.status(run.handle).replicas]
                assert states == [ReplicaState.RUNNING] * 2, f"cancelling `pair` reached `{run.id}`: {states}"
            for run in others:
                assert let_go(bench, run).state is ReplicaState.SUCCEEDED
                for rank in range(2):
                    logged(bench, run, rank, [f"{run.id} rank {rank}"])
            assert ended.state is ReplicaState.CANCELLED

    def test_e09_one_name_in_two_stores_is_two_runs(self, bench: Bench) -> None:
        there = bench.elsewhere("other")
        with cleared(bench, "twin"), cleared(there, "twin"):
            here_run = _say(bench, "twin").draft(bench.executor(), bench.store_uri).submit()
            there_run = _say(there, "twin").draft(there.executor(), there.store_uri).submit()
            entered(bench, here_run)
            entered(there, there_run)
            here_run.executor.cancel(here_run.handle)
            assert let_go(there, there_run).state is ReplicaState.SUCCEEDED

    # E11 arguments arrive unchanged

    def test_e11_arguments_arrive_unchanged(self, bench: Bench) -> None:
        with launched(bench, "echo", 2, args=ARGUMENTS) as run:
            over(bench, run)
            values = run.result().raise_for_failures().values
        for rank, value in enumerate(values):
            assert (value["rank"], value["world_size"]) == (rank, 2)
            changed = [name for name, wanted in ARGUMENTS.items() if value["args"].get(name) != wanted]
            assert not changed, f"these arguments arrived changed: {changed}"
            assert set(value["args"]) == set(ARGUMENTS)

    # E13 logs are the replica's lines, and nothing else

    def test_e13_logs_are_exactly_the_lines_of_the_rank(self, bench: Bench) -> None:
        with launched(bench, "say", 2, args={"lines": LINES, "unfinished": "no line end"}) as run:
            over(bench, run)
            for rank in range(2):
                wanted = [line.replace("{rank}", str(rank)) for line in [*LINES, "no line end"]]
                logged(bench, run, rank, wanted)
                assert list(run.executor.logs(run.handle, rank, tail=3)) == wanted[-3:]
                assert list(run.executor.logs(run.handle, rank, tail=0)) == []
                assert list(run.executor.logs(run.handle, rank, tail=1000)) == wanted
                assert list(run.executor.logs(run.handle, rank, follow=True)) == wanted

    def test_e13_follow_yields_lines_while_the_replica_runs(self, bench: Bench) -> None:
        lines = ["one", "two"]
        with (
            ThreadPoolExecutor(1) as pool,
            launched(bench, "say", args={"lines": lines, "unfinished": "three", "then_hold": True}) as run,
        ):
            followed = run.executor.logs(run.handle, 0, follow=True)
            early = pool.submit(lambda: [next(followed), next(followed)])
            assert early.result(timeout=bench.patience_s) == lines
            contract_jobs.let_go(bench.store, run.id)
            assert pool.submit(lambda: list(followed)).result(timeout=bench.patience_s) == ["three"]

    def test_e13_no_line_yet_is_an_empty_log(self, bench: Bench) -> None:
        with launched(bench, "hold") as run:
            assert list(run.executor.logs(run.handle, 0)) == []
            entered(bench, run)
            assert list(run.executor.logs(run.handle, 0)) == []
            assert list(run.executor.logs(run.handle, 0, tail=5)) == []

    def test_e13_an_unknown_run_or_rank_raises(self, bench: Bench) -> None:
        with launched(bench, "say", args={"lines": ["here"]}) as run:
            over(bench, run)
            with pytest.raises(RunNotFound):
                list(run.executor.logs(bench.stranger(run.handle), 0))
            for rank in (1, -1):
                with pytest.raises(AtollError):
                    list(run.executor.logs(run.handle, rank))


def _say(bench: Bench, name: str) -> Any:
    return order(bench, "say", 2, run_id=name, args={"lines": [f"{name} rank {{rank}}"], "then_hold": True})
