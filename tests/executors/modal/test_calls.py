"""Calls that end in the ways of Modal, second calls of a rank, and what a launcher without an answer leaves."""

from __future__ import annotations

import json

import pytest

from atoll import journal
from atoll.context import RANK, home
from atoll.errors import AuthError, BackendError, ConfigError
from atoll.executors.modal.executor import ModalExecutor
from atoll.keys import RunKeys
from atoll.registry import open_store
from atoll.status import Reason, ReplicaState
from atoll.testing import contract_jobs
from atoll.testing.bench import (
    Call,
    Fault,
    assert_each_rank_once,
    cleared,
    entered,
    launched,
    let_go,
    order,
    over,
    until,
)
from services.modal.bench import calls_of, variables


def one_call(bench, run):
    [call] = calls_of(bench.peer, run.id, bench.store_uri)
    return call


def spawned_again(bench, run, rank=0):
    """What a second call of this rank returns."""
    import modal

    function = modal.Function.from_name("atoll", "replica", environment_name="main")
    return function.spawn(run.plan().request["calls"][rank]).get(timeout=bench.patience_s)


# ── exactly one call of each rank ───────────────────────────────────────────────────────────────────────────────


def test_a_second_call_of_a_claimed_rank_returns_at_once(bench):
    with launched(bench, "hold", 2) as run:
        entered(bench, run)
        answer = spawned_again(bench, run, 1)
        holder = run.executor.status(run.handle).replicas[1].native_id
        assert (answer["state"], answer["claimed_by"]) == ("duplicate", holder)
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED
        assert_each_rank_once(bench, run.id, 2)


def test_a_call_of_a_cancelled_run_returns_at_once(bench):
    with bench.queue_held(), launched(bench, "hold") as run:
        run.cancel()
        plan = run.plan()
    assert journal.is_cancelled(bench.store, run.id)
    bench.store.delete(RunKeys(run.id).start(0, 0))
    assert plan.request["calls"][0] == run.plan().request["calls"][0]
    assert spawned_again(bench, run)["state"] == "cancelled"
    assert contract_jobs.starts(bench.store, run.id) == []


def test_a_running_replica_has_its_start(bench):
    with launched(bench, "hold") as run:
        entered(bench, run)
        [replica] = run.executor.status(run.handle).replicas
        assert replica.state is ReplicaState.RUNNING
        assert replica.started_at == journal.read_claim(bench.store, run.id, 0).at
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED


def test_the_claim_names_the_call(bench):
    with launched(bench, "echo") as run:
        over(bench, run)
        assert journal.read_claim(bench.store, run.id, 0).job == one_call(bench, run).call_id


def test_a_claim_without_the_id_of_its_call_is_no_cancel(bench):
    with launched(bench, "hold") as run:
        entered(bench, run)
        bench.store.put(RunKeys(run.id).start(0, 0), json.dumps({"host": "there", "at": 1.0}).encode())
        executor = bench.executor()
        assert executor.status(run.handle).state is ReplicaState.RUNNING
        executor.cancel(run.handle)
        assert one_call(bench, run).is_over
        assert executor.status(run.handle).state is ReplicaState.CANCELLED


def test_a_lost_answer_leaves_one_call_of_each_rank(bench):
    bench.peer.faults.fail("FunctionMap", Fault.BROKEN, nth=2, times=1, after_effect=True)
    with launched(bench, "echo", 3) as run:
        assert over(bench, run).state is ReplicaState.SUCCEEDED
        assert len(calls_of(bench.peer, run.id, bench.store_uri)) == 3, "the client repeats the request with its key"


def test_a_rank_whose_call_is_unknown_cannot_start_after_a_cancel(bench):
    """The answer is lost, the launcher gives up: the cancel takes the claim of the rank."""
    draft = order(bench, "hold").draft(bench.executor(**bench.impatient), bench.store_uri)
    with cleared(bench, draft.spec.run_id):
        with bench.queue_held():
            bench.peer.faults.fail(Call.CREATE, Fault.SILENT, after_effect=True)
            with pytest.raises(BackendError) as caught:
                draft.submit()
            assert not getattr(caught.value, "left_running", ())
            bench.peer.faults.heal()
            sent = calls_of(bench.peer, draft.spec.run_id, bench.store_uri)
            assert sent, "the service has calls that the launcher does not know"
        until(bench, "the calls have returned", lambda: all(call.is_over for call in sent))
        assert {call.value["state"] for call in sent} == {"cancelled"}
        assert contract_jobs.starts(bench.store, draft.spec.run_id) == []


# ── how a call ends ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_remote_timeout_error_is_a_failure_and_not_a_running_call(bench):
    with launched(bench, "echo") as run:
        over(bench, run)
        call = one_call(bench, run)
        call.status, call.exception, call.message = "FAILURE", TimeoutError("NCCL watchdog"), "TimeoutError"
        replica = bench.executor().status(run.handle).replicas[0]
        assert (replica.state, replica.reason) == (ReplicaState.FAILED, Reason.KILLED)


@pytest.mark.parametrize("status", ["FAILURE", "INIT_FAILURE"])
def test_what_the_function_raised_is_shown(bench, status):
    """The image has no Atoll, or an app of another version is deployed."""
    with launched(bench, "echo") as run:
        over(bench, run)
        call = one_call(bench, run)
        call.status, call.exception = status, ImportError("No module named 'atoll'")
        replica = bench.executor().status(run.handle).replicas[0]
        assert (replica.state, replica.message) == (ReplicaState.FAILED, "No module named 'atoll'")


def test_expired_outputs_are_lost_unless_the_store_knows(bench):
    with launched(bench, "echo", args={"x": 1}) as run:
        over(bench, run)
        one_call(bench, run).is_expired = True
        replica = bench.executor().status(run.handle).replicas[0]
        assert (replica.state, replica.reason) == (ReplicaState.LOST, Reason.LOST)
        assert run.status().replicas[0].state is ReplicaState.SUCCEEDED
        assert run.result().values[0]["args"] == {"x": 1}


@pytest.mark.parametrize("graph", [None, "late"])
def test_a_preempted_call_is_told_from_a_cancelled_one(bench, graph):
    bench.peer.graph = graph
    with launched(bench, "hold", 2) as run:
        entered(bench, run)
        calls = {variables(call)[RANK]: call for call in calls_of(bench.peer, run.id, bench.store_uri)}
        calls["0"].preempt(moves=False)
        bench.executor().cancel(run.handle, [1])
        ended = over(bench, run).replicas
        assert [(r.state, r.reason) for r in ended] == [
            (ReplicaState.FAILED, Reason.PREEMPTED),
            (ReplicaState.CANCELLED, Reason.CANCELLED),
        ]


def test_a_call_that_modal_moves_to_another_machine_goes_on(bench):
    with launched(bench, "hold") as run:
        entered(bench, run)
        call = one_call(bench, run)
        call.preempt()
        until(
            bench, "the second container is in user code", lambda: len(contract_jobs.starts(bench.store, run.id)) == 2
        )
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED
        assert [start.attempt for start in contract_jobs.starts(bench.store, run.id)] == [0, 1]
        assert call.containers == 2


def test_an_older_version_of_atoll_in_the_image_is_refused_before_user_code(bench):
    draft = order(bench, "echo").draft(bench.executor(), bench.store_uri)
    draft.plan.request["calls"][0]["atoll"] = "999.0.0"
    with cleared(bench, draft.spec.run_id):
        journal.record_run(draft.store, draft.spec, executor="modal")
        handle = draft.executor.submit(draft.plan)
        replica = until(bench, "it is over", lambda: _ended(draft.executor, handle))
        assert (replica.state, replica.reason) == (ReplicaState.FAILED, Reason.IMAGE)
        assert "999.0.0" in replica.message
        assert contract_jobs.starts(bench.store, draft.spec.run_id) == []


def _ended(executor, handle):
    replica = executor.status(handle).replicas[0]
    return replica if replica.state.is_terminal else None


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_launch_needs_no_folder_on_this_machine(bench, monkeypatch):
    """As in a container whose home can only be read."""
    monkeypatch.setenv("ATOLL_HOME", "/dev/null/home")
    with launched(bench, "hold", 2) as run:
        entered(bench, run)
        bench.executor().cancel(run.handle, [1])
        ended = let_go(bench, run).replicas
        assert [r.state for r in ended] == [ReplicaState.SUCCEEDED, ReplicaState.CANCELLED]


def test_arguments_longer_than_a_request_go_by_blob(bench):
    long = "0123456789" * 2_000
    with launched(bench, "variables", args={"names": ["CONTRACT_LONG"]}, env={"CONTRACT_LONG": long}) as run:
        over(bench, run)
        assert run.result().values == [{"CONTRACT_LONG": long}]
    assert bench.peer.calls["BlobCreate"] == 1


def test_the_options_are_bound_once_and_modals_retries_are_off(bench):
    bench.peer.engine.volumes.add("corpus")
    executor = bench.executor(volumes={"/data": "corpus"}, region="us-east")
    with (
        bench.queue_held(),
        launched(bench, "echo", 2, executor=executor, gpu="H100:2", cpus=2.0, memory_gib=4.0, timeout_s=3600) as run,
    ):
        assert bench.peer.calls["FunctionBindParams"] == 1
        bound = calls_of(bench.peer, run.id, bench.store_uri)[0].function.options
        assert bound["gpu"] == ("H100", 2)
        assert (bound["cpu"], bound["memory"], bound["retries"]) == (2000, 4096, 0)
        assert (bound["volumes"], bound["region"]) == ({"/data": "corpus"}, ["us-east"])
        assert bound["timeout"] == 3600 + 10 + 60
        run.cancel()


def test_what_is_not_deployed_or_does_not_exist_is_told_before_the_run_is_recorded(bench):
    for settings, reason in (
        ({"app": "elsewhere"}, "not_deployed"),
        ({"secrets": ["no-such-secret"]}, "not_found"),
        ({"volumes": {"/x": "no-such-volume"}}, "not_found"),
    ):
        draft = order(bench, "echo").draft(bench.executor(**settings), bench.store_uri)
        with pytest.raises(ConfigError) as caught:
            draft.submit()
        assert caught.value.reason == reason
        assert ("atoll deploy" in (caught.value.hint or "")) == (reason == "not_deployed")
    assert list(bench.store.list()) == []
    assert bench.peer.engine.calls == {}


def test_an_rpc_that_the_peer_does_not_have_fails_with_its_name(modal_peer):
    import modal

    with pytest.raises(modal.exception.Error, match="QueueGetOrCreate"):
        modal.Queue.from_name("nothing", environment_name="main").hydrate()
    assert modal_peer.unknown == ["QueueGetOrCreate"]


def test_a_wrong_token_is_an_auth_error(bench):
    import modal

    client = modal.Client.from_credentials("ak-other", "as-other")
    draft = order(bench, "echo").draft(ModalExecutor(**{**bench.settings, "client": client}), bench.store_uri)
    try:
        with pytest.raises(AuthError):
            draft.submit()
    finally:
        client._close()


# ── many replicas, leftovers ────────────────────────────────────────────────────────────────────────────────────


def test_a_hundred_replicas_take_one_request_each_and_a_status_takes_few(bench, capsys):
    replicas = 100
    with bench.queue_held():
        draft = order(bench, "echo", replicas).draft(bench.executor(), bench.store_uri)
        run = draft.submit()
        launch = dict(bench.peer.calls)
        bench.peer.calls.clear()
        status = run.executor.status(run.handle)
        round_of_status = dict(bench.peer.calls)
        run.cancel()
    with capsys.disabled():
        print(f"\nmodal: {replicas} replicas: launch {launch}; one status {round_of_status}")
    assert [r.state for r in status.replicas] == [ReplicaState.PENDING] * replicas
    assert launch.pop("FunctionMap") == replicas
    looks = launch.pop("FunctionGetCallGraph"), launch.pop("FunctionGetOutputs")
    assert looks == (5, 5), "a look whether replicas were stopped meanwhile"
    assert sum(launch.values()) == 2, "looking up and binding take the same number of requests whatever N"
    assert sum(round_of_status.values()) == 10


def test_sweep_keeps_the_records_of_a_call_whose_id_was_lost_until_its_rank_is_claimed(bench):
    """The launcher is killed after the spawn and before it has recorded the id; the call waits for a machine."""
    draft = order(bench, "hold").draft(bench.executor(), bench.store_uri)
    with cleared(bench, draft.spec.run_id), bench.queue_held():
        journal.record_run(draft.store, draft.spec, executor="modal")
        draft.executor.submit(draft.plan)
        for uri in (bench.store_uri, str(next((home() / "modal").iterdir()))):
            store = open_store(uri)
            [key] = [key for key in store.list("runs/") if "/calls/sent/" in key]
            record = json.loads(bytes(store.get(key)))
            store.put(key, json.dumps({**record, "calls": {"0": None}}).encode())
        for _ in range(2):
            assert [stray.native_id for stray in bench.executor().strays()] == ["rank-00000"]
        bench.executor().cancel(draft.executor.handle(draft.plan))
        assert bench.executor().strays() == []
        [call] = calls_of(bench.peer, draft.spec.run_id, bench.store_uri)
    until(bench, "the call has returned", lambda: call.is_over)
    assert call.value["state"] == "cancelled"


def test_sweep_finds_the_calls_of_this_machine_until_they_are_over(bench):
    with bench.queue_held(), launched(bench, "hold", 2) as run:
        strays = bench.executor().strays()
        assert {stray.native_id for stray in strays} == set(bench.running(run.id))
        assert {(stray.handle, stray.context.run_id) for stray in strays} == {(run.handle, run.id)}
        run.cancel()
        assert bench.executor().strays() == []
