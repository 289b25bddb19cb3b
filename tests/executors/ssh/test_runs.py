"""Runs on hosts from the command line, and what a lost connection leaves of them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import atoll
from atoll.cli.main import main
from atoll.status import ReplicaState
from atoll.testing import contract_jobs
from atoll.testing.bench import entered, launched, until
from services.ssh.bench import settings_of


def test_a_folder_of_code_runs_on_the_hosts_of_the_configuration(jobs, hosts, store, capsys) -> None:
    """The code travels through the store; status, logs, result and sweep find the run by its id."""
    table = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings_of(hosts).items())
    (jobs / "atoll.toml").write_text(f"[executors.ssh]\n{table}\n")
    assert main(["run", "jobs:echo", "--on", "ssh", "--replicas", "4", "--store", store, "--workspace", ".", "--run-id",
                 "exp", "--arg", "lr=0.5", "--json"]) == 0  # fmt: skip
    capsys.readouterr()
    run = atoll.attach("exp", store=store, settings=settings_of(hosts))
    values = run.result().raise_for_failures().values
    assert [value["rank"] for value in values] == [0, 1, 2, 3]
    assert {value["args"]["lr"] for value in values} == {0.5}
    assert [row.host for row in run.status().replicas] == [hosts.hosts[0], hosts.hosts[0], *hosts.hosts[1:]]
    assert main(["logs", "exp", "--rank", "3", "--store", store]) == 0
    assert capsys.readouterr().out.splitlines() == ["rank 3 of 4"]
    assert main(["sweep", "--on", "ssh", "--dry-run", "--json"]) == 0
    assert "exp" not in capsys.readouterr().out, "the run is over: nothing of it is left"


def test_replicas_of_a_run_without_a_record_are_strays_and_are_stopped(bench) -> None:
    with launched(bench, "hold", 2) as run:
        entered(bench, run)
        executor = bench.executor()
        found = executor.strays()
        assert {stray.context.run_id for stray in found} == {run.id}
        assert len({stray.handle for stray in found}) == 2
        for stray in found:
            executor.cancel(stray.handle)
        assert not bench.running(run.id)


def test_a_follow_goes_on_after_a_lost_connection(bench, hosts) -> None:
    args = {"lines": ["one", "two"], "unfinished": "three", "then_hold": True}
    with ThreadPoolExecutor(1) as pool, launched(bench, "say", args=args) as run:
        followed = run.executor.logs(run.handle, 0, follow=True)
        assert pool.submit(lambda: [next(followed), next(followed)]).result(bench.patience_s) == ["one", "two"]
        rest = pool.submit(lambda: list(followed))
        hosts.cut_all()
        contract_jobs.let_go(bench.store, run.id)
        assert rest.result(bench.patience_s) == ["three"]


def test_a_follow_of_the_last_lines_goes_on_after_a_lost_connection(bench, hosts) -> None:
    args = {"lines": ["one", "two"], "unfinished": "three", "then_hold": True}
    with ThreadPoolExecutor(1) as pool, launched(bench, "say", args=args) as run:
        entered(bench, run)
        followed = run.executor.logs(run.handle, 0, tail=1, follow=True)
        first = pool.submit(lambda: next(followed)).result(bench.patience_s)
        assert first in ("one", "two")
        rest = pool.submit(lambda: list(followed))
        hosts.cut_all()
        contract_jobs.let_go(bench.store, run.id)
        assert rest.result(bench.patience_s) == (["two", "three"] if first == "one" else ["three"])


def test_a_watch_costs_one_connection_for_each_host_and_survives_its_loss(bench, hosts) -> None:
    with launched(bench, "hold", 3) as run:
        entered(bench, run)
        with run.executor.watch(run.handle) as watch:
            assert watch.status().state is ReplicaState.RUNNING
            until(bench, "every host has reported", lambda: no_calls(watch, hosts))
            assert hosts.calls["watch"] == 3
            hosts.cut_all()
            until(bench, "every host is connected again", lambda: watch.status() and hosts.calls["watch"] == 6)
            contract_jobs.let_go(bench.store, run.id)
            until(bench, "the watch shows the end", lambda: watch.status().is_terminal)
            assert watch.status().state is ReplicaState.SUCCEEDED


def no_calls(watch, hosts) -> bool:
    """Whether a status makes no call."""
    before = hosts.calls.total()
    watch.status()
    return hosts.calls.total() == before


def test_hosts_run_a_part_of_a_run_whose_other_replicas_are_local(jobs, hosts, store) -> None:
    settings = {f"ssh.{name}": value for name, value in settings_of(hosts).items()}
    run = atoll.launch("jobs:echo", on=[("local", 1), ("ssh", 2)], settings=settings, store=store, workspace=".")
    run.wait(60)
    values = run.result().raise_for_failures().values
    assert [(value["rank"], value["world_size"]) for value in values] == [(0, 3), (1, 3), (2, 3)]
    assert [list(run.logs(rank)) for rank in range(3)] == [[f"rank {rank} of 3"] for rank in range(3)]
    assert [row.host for row in run.status().replicas][1:] == hosts.hosts[:2]
