"""Modal loses answers, repeats spawns, and knows less about calls than the replicas have stored."""

from __future__ import annotations

import os
import signal

import pytest

from atoll.errors import BackendUnavailable, SubmitError
from atoll.status import Reason, ReplicaState
from atoll.testing.bench import Fault, assert_each_rank_once, entered, launched, let_go, order, over, until
from services.modal.bench import calls_of

LONG = "0123456789" * 2_000
"""An argument that goes by blob."""
RPCS = {
    "FunctionGet",
    "FunctionBindParams",
    "SecretGetOrCreate",
    "VolumeGetOrCreate",
    "BlobCreate",
    "FunctionMap",
    "FunctionGetCallGraph",
    "FunctionGetOutputs",
    "FunctionCallCancel",
    "FunctionCallFromId",
    "FunctionCallGetInfo",
    "AppCountLogs",
    "AppFetchLogs",
}
"""Every request that a run makes."""


@pytest.mark.parametrize("lost", [1, 5])
def test_a_run_survives_lost_answers_of_every_request(bench, lost):
    """The client repeats a request three times; after five losses, Atoll has repeated it too."""
    peer = bench.peer
    peer.engine.secrets["keys"], peer.honours_keys = {}, False
    peer.engine.volumes.add("corpus")
    executor = bench.executor(secrets=["keys"], volumes={"/data": "corpus"}, patience_s=30.0)
    for rpc in RPCS:
        peer.faults.fail(rpc, Fault.BROKEN, times=lost, after_effect=True)
    told = {"lines": ["rank {rank}"], "then_hold": True}
    with launched(bench, "say", 2, executor=executor, args=told, env={"CONTRACT_LONG": LONG}) as run:
        entered(bench, run)
        executor.cancel(run.handle, [1])
        let_go(bench, run)
        ended = over(bench, run).replicas
        assert [r.state for r in ended] == [ReplicaState.SUCCEEDED, ReplicaState.CANCELLED]
        assert list(executor.logs(run.handle, 0)) == ["rank 0"]
        assert_each_rank_once(bench, run.id, 2)
    assert set(peer.calls) == RPCS
    assert peer.unknown == []


def test_spawns_that_are_repeated_with_new_keys_leave_one_replica_of_each_rank(bench):
    bench.peer.honours_keys = False
    bench.peer.faults.fail("FunctionMap", Fault.BROKEN, times=3, after_effect=True)
    with launched(bench, "hold", 2) as run:
        entered(bench, run)
        calls = calls_of(bench.peer, run.id, bench.store_uri)
        assert len(calls) == 5
        until(bench, "the others have returned", lambda: sum(call.is_over for call in calls) == 3)
        assert all(call.value["state"] == "duplicate" for call in calls if call.is_over)
        bench.executor().cancel(run.handle, [0])
        assert sum(call.is_over for call in calls) == 4, "the cancel has found the call that runs"
        ended = let_go(bench, run).replicas
        assert [r.state for r in ended] == [ReplicaState.CANCELLED, ReplicaState.SUCCEEDED]
        assert_each_rank_once(bench, run.id, 2)


@pytest.mark.parametrize("refused", [0, 2])
def test_a_call_whose_input_is_sent_by_itself_starts_one_replica(bench, refused):
    """The client raises a plain `Exception` if the queue of inputs is full."""
    bench.peer.pipelines, bench.peer.refused_inputs = False, refused
    bench.peer.faults.fail("FunctionPutInputs", Fault.BROKEN, times=1, after_effect=True)
    with launched(bench, "hold", 2, executor=bench.executor(patience_s=30.0)) as run:
        entered(bench, run)
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED
        assert len(calls_of(bench.peer, run.id, bench.store_uri)) == 2
        assert_each_rank_once(bench, run.id, 2)


def test_a_queue_of_inputs_that_stays_full_is_a_documented_error(bench):
    bench.peer.pipelines, bench.peer.refused_inputs = False, 10**6
    with pytest.raises(SubmitError) as caught:
        order(bench, "hold", 2).draft(bench.executor(), bench.store_uri).submit()
    assert isinstance(caught.value.__cause__, BackendUnavailable)
    assert not caught.value.left_running


@pytest.mark.parametrize("graph", ["empty", "late", "truncated", "refused"])
def test_a_call_graph_that_is_late_or_not_there_hides_no_end(bench, graph):
    bench.peer.graph = graph
    with launched(bench, "act", 2, args={"parts": ["return", "sys_exit"]}) as run:
        ended = over(bench, run).replicas
        assert [(r.state, r.exit_code) for r in ended] == [(ReplicaState.SUCCEEDED, 0), (ReplicaState.FAILED, 3)]


def test_a_remote_timeout_error_is_a_failure_also_without_a_call_graph(bench):
    with launched(bench, "echo") as run:
        over(bench, run)
        [call] = calls_of(bench.peer, run.id, bench.store_uri)
        call.status, call.exception = "FAILURE", TimeoutError("NCCL watchdog")
        bench.peer.graph = "empty"
        replica = bench.executor().status(run.handle).replicas[0]
        assert (replica.state, replica.reason) == (ReplicaState.FAILED, Reason.KILLED)


@pytest.mark.parametrize("status", ["KERNEL_OOM_KILL", "INTERNAL_FAILURE"])
def test_an_end_that_the_client_shows_as_pending_in_the_call_graph_is_found(bench, status):
    with launched(bench, "hold") as run:
        entered(bench, run)
        [call] = calls_of(bench.peer, run.id, bench.store_uri)
        call.crash(status)
        found = until(bench, "it is found", lambda: _ended(run))
        assert [(r.state, r.reason) for r in found] == [(ReplicaState.FAILED, Reason.KILLED)]


def test_a_container_that_gets_sigterm_leaves_no_exception_as_the_output_of_its_call(bench):
    with launched(bench, "hold") as run:
        entered(bench, run)
        [call] = calls_of(bench.peer, run.id, bench.store_uri)
        assert call.pid is not None
        os.kill(call.pid, signal.SIGTERM)
        until(bench, "it has ended", lambda: call.is_over)
        assert (call.status, call.exception) == ("TERMINATED", None)


def test_a_function_that_raises_no_exception_class_does_not_raise_it_in_the_launcher(bench):
    with launched(bench, "echo") as run:
        over(bench, run)
        [call] = calls_of(bench.peer, run.id, bench.store_uri)
        call.status, call.exception, bench.peer.graph = "FAILURE", SystemExit(0), "empty"
        replica = bench.executor().status(run.handle).replicas[0]
        assert (replica.state, replica.reason) == (ReplicaState.FAILED, Reason.KILLED)


def test_a_container_that_dies_without_a_word_is_found_among_many_that_run(bench):
    with launched(bench, "hold", 6) as run:
        entered(bench, run)
        bench.peer.calls.clear()
        assert run.executor.status(run.handle).state is ReplicaState.RUNNING
        assert sum(bench.peer.calls.values()) == 2, "one look: the store has a new heartbeat of each"
        bench.kill_replica(run.id, 4)
        found = until(bench, "it is found", lambda: _ended(run))
        assert [(r.rank, r.state, r.reason) for r in found] == [(4, ReplicaState.FAILED, Reason.KILLED)]
        bench.peer.calls.clear()
        assert [_ended(run) for _ in range(7)] == [found] * 7, "its last heartbeat is still new, and its end stays"
        assert sum(bench.peer.calls.values()) == 14
        let_go(bench, run)


def _ended(run):
    return [replica for replica in run.executor.status(run.handle).replicas if replica.state.is_terminal]


def test_calls_that_cannot_start_are_found_at_once_among_many_that_wait(bench):
    with bench.queue_held(), launched(bench, "hold", 30) as run:
        calls = calls_of(bench.peer, run.id, bench.store_uri)
        bench.peer.calls.clear()
        assert run.executor.status(run.handle).state is ReplicaState.PENDING
        assert sum(bench.peer.calls.values()) == 10
        for call in calls:
            call.fail_to_start("ImportError")
        until(bench, "all have ended", lambda: all(call.is_over for call in calls))
        status = bench.executor().status(run.handle)
        assert {(r.state, r.reason) for r in status.replicas} == {(ReplicaState.FAILED, Reason.IMAGE)}
