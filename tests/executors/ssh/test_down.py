"""Hosts that do not answer: status, logs and cancel through the store, and errors that name the host."""

from __future__ import annotations

import pytest

from atoll.errors import BackendUnavailable, StopFailed
from atoll.keys import RunKeys
from atoll.status import ReplicaState
from atoll.testing import contract_jobs
from atoll.testing.bench import entered, launched, let_go, until
from services.ssh.peer import Route


def cut(hosts, *names: str, verb: str = "*") -> None:
    """These hosts close every connection, before the login."""
    for name in names or hosts.hosts:
        hosts.faults.raise_at(verb, Route(cut_after=0), name=name)


def has_beats(bench, run) -> bool:
    """Whether the store has a heartbeat of every rank."""
    return all(replica.progress.beat_at is not None for replica in run.status().replicas)


def test_a_host_that_does_not_answer_does_not_hide_the_others(bench, hosts) -> None:
    with launched(bench, "hold", 3) as run:
        entered(bench, run)
        until(bench, "heartbeats", lambda: has_beats(bench, run))
        cut(hosts, hosts.hosts[1])
        status = bench.executor(patience_s=0.1).status(run.handle)
        assert [replica.state for replica in status.replicas] == [ReplicaState.RUNNING] * 3
        silent = [replica.rank for replica in status.replicas if replica.progress.problem]
        assert silent == [1]
        assert hosts.hosts[1] in status.replicas[1].progress.problem
        assert [replica.host for replica in status.replicas] == hosts.hosts
        hosts.faults.heal()
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED


def test_without_ssh_status_logs_and_cancel_work_through_the_store(bench, hosts) -> None:
    with launched(bench, "say", 2, args={"lines": ["rank {rank} is here"], "then_hold": True}) as run:
        entered(bench, run)
        until(bench, "heartbeats", lambda: has_beats(bench, run))
        cut(hosts)
        run.executor = bench.executor(patience_s=0.1)
        with pytest.raises(BackendUnavailable):
            run.executor.status(run.handle)
        rows = run.status().replicas
        assert [(row.state, bool(row.progress.problem)) for row in rows] == [(ReplicaState.RUNNING, True)] * 2
        assert until(bench, "the log is uploaded", lambda: list(run.logs(1))) == ["rank 1 is here"]
        run.cancel()
        ends = list(bench.store.list(RunKeys(run.id).outcomes_prefix()))
        assert len(ends) == 2, "cancel returned before the store had the end of every replica"
        assert [row.state for row in run.status().replicas] == [ReplicaState.CANCELLED] * 2
        # The supervisors stored the ends of their replicas, and end right after that.
        until(bench, "the supervisors have ended", lambda: not bench.running(run.id))


def test_one_rank_is_stopped_through_the_store_and_the_others_go_on(bench, hosts) -> None:
    with launched(bench, "hold", 3) as run:
        entered(bench, run)
        cut(hosts, hosts.hosts[2])
        bench.executor(patience_s=0.1).cancel(run.handle, [2])
        assert contract_jobs.farewells(bench.store, run.id) == [2]
        hosts.faults.heal()
        states = [row.state for row in run.executor.status(run.handle).replicas]
        assert states == [ReplicaState.RUNNING, ReplicaState.RUNNING, ReplicaState.CANCELLED]
        let_go(bench, run)


def test_without_ssh_and_store_a_cancel_names_the_host(bench, hosts) -> None:
    with launched(bench, "hold", 2) as run:
        entered(bench, run)
        cut(hosts, hosts.hosts[1])
        with bench.store_lost(), pytest.raises(StopFailed) as caught:
            bench.executor(patience_s=0.1).cancel(run.handle)
        assert list(caught.value.left_running) == bench.running(run.id)
        assert hosts.hosts[1] in caught.value.left_running[0]
        hosts.faults.heal()
        bench.executor().cancel(run.handle)
        assert not bench.running(run.id)
