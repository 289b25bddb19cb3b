"""`atoll rm` and `atoll prune`: what is deleted, what stays, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import atoll
from atoll import journal, registry
from atoll.errors import ConfigError, Conflict
from atoll.keys import RunKeys
from atoll.rounds.client import RoundClient
from atoll.rounds.layout import ArrayVector, Layout
from atoll.rounds.outer import OuterRule, outer_step, state_digest
from atoll.rounds.weights import agreed_weights
from atoll.runs import index
from atoll.runs.delete import delete, planned_deletion
from atoll.status import ReplicaState
from atoll.stores.memory import MemoryStore
from atoll.testing.fakes import FaultyStore

LAYOUT = Layout.of([("w", [40], "float32")])
RULE = OuterRule()


def with_rounds(store, run_id: str, rounds: int = 7) -> None:
    """Rounds of one replica, with a snapshot before round 5, and records beside them."""
    with RoundClient(store, run_id, 0, 1, layouts=[LAYOUT], settings={"outer": RULE.to_json()}) as client:
        values, momentum = np.arange(40, dtype=np.float32), np.zeros(40, np.float32)
        client.join([values.tobytes()])
        for round_no in range(rounds):
            update = (values * np.float32(0.01)).astype(np.float32)
            base = state_digest(values, momentum)
            client.exchange(round_no, update, weight=1.0, base=base, out=ArrayVector([update]))
            outer_step(RULE, values, momentum, update, is_first=round_no == 0)
            if round_no == 4:
                sections = {"values": values.tobytes(), "momentum": momentum.tobytes()}
                client.write_snapshot(5, sections, {"started": [True]})


@pytest.fixture
def memory(request) -> MemoryStore:
    return MemoryStore(request.node.name)


def test_a_run_is_deleted_with_everything_and_others_stay(cli, inside):
    gone = cli.detached("job:ok", "-n", 2, "--run-id", "gone", "--store", "store")
    stays = cli.detached("job:ok", "-n", 2, "--run-id", "gone-2", "--store", "store")
    assert cli("wait", gone).code == cli("wait", stays).code == 0
    store = atoll.attach(stays).store
    store.put("bundles/abcdef012345.tar.gz", b"shared")
    others = sorted(key for key in store.list() if "/gone/" not in key and not key.endswith("/gone"))
    asked = inside("rm", gone, "--json")
    assert asked.code == 2, "nobody can be asked"
    assert asked.error["code"] == "ConfigError"
    shown = inside("rm", gone, "--dry-run", "--json").data["runs"][0]
    assert shown["objects"] > 5
    assert shown["bytes"] == sum(len(store.get(key)) for key in store.list("runs/gone/"))
    done = inside("rm", gone, "--yes", "--json")
    assert done.code == 0, done.stderr
    assert done.data["deleted"] == [gone]
    assert sorted(store.list()) == others
    assert not (cli.folder / "store" / "runs" / "gone").exists()
    assert index.find(gone) is None
    assert inside("status", gone, "--store", "store").code == 3
    assert inside("rm", gone, "--yes", "--store", "store").code == 3
    assert inside("result", stays).code == 0


def test_a_running_run_is_refused_and_nothing_of_any_run_is_deleted(cli, inside):
    over = cli.detached("job:ok", "--run-id", "over", "--store", "store")
    assert cli("wait", over).code == 0
    runs = cli.detached("job:until", "--run-id", "runs", "--store", "store", "--arg", "gate=go")
    before = set(atoll.attach(over).store.list("runs/over/"))
    for words in (["rm", over, runs, "--yes"], ["rm", runs, "--keep-weights", "--yes"]):
        done = inside(*words, "--json")
        assert done.code == 2
        assert done.error["code"] == "Conflict"
        assert "atoll cancel" in done.error["hint"]
    assert set(atoll.attach(over).store.list("runs/over/")) == before
    with pytest.raises(Conflict) as caught:
        atoll.attach(runs).delete()
    assert caught.value.reason == "running"
    pruned = inside("prune", "--older-than", "0s", "--yes", "--store", "store", "--json")
    assert pruned.data["deleted"] == [over], "what is not over is left alone"
    assert cli("cancel", runs).code == 0
    assert inside("rm", runs, "--yes").code == 0


def test_old_runs_are_pruned_and_young_ones_stay(cli, inside):
    run_id = cli.detached("job:ok", "--run-id", "r", "--store", "store")
    assert cli("wait", run_id).code == 0
    assert inside("prune", "--older-than", "30d", "--store", "store", "--yes", "--json").data["runs"] == []
    kept = inside("prune", "--older-than", "0s", "--keep-weights", "--store", "store", "--yes", "--json")
    assert kept.data["deleted"] == [run_id]
    assert inside("result", run_id).code == 0, "records and results stay"
    assert inside("logs", run_id, "--attempt", 0).stdout == ""
    again = inside("prune", "--older-than", "0s", "--keep-weights", "--store", "store", "--yes", "--json")
    assert again.data["runs"] == []
    resumed = inside("resume", run_id, "--json")
    assert resumed.code == 2
    assert "--from" in resumed.error["hint"]
    assert inside("prune", "--older-than", "soon", "--store", "store").code == 2
    assert "there is no such folder" in inside("prune", "--older-than", "0s", "--store", "typo", "--yes").stderr


def test_the_newest_weights_can_be_kept_and_nothing_else_of_the_rounds(memory):
    with_rounds(memory, "r")
    memory.put(RunKeys("r").run(), b"{}")
    memory.put(RunKeys("r").checkpoint(0, 5), b"x" * 1000)
    memory.put(RunKeys("r").log_chunk(0, 0, 0, 1, 2), b"line")
    memory.put(RunKeys("r").outcome(0, 0), b"{}")
    expected = agreed_weights(memory, "r")
    planned = planned_deletion(memory, "r", keep_weights=True)
    assert planned.size_bytes == sum(len(memory.get(key)) for key in planned.objects)
    delete(memory, planned)
    found = agreed_weights(memory, "r")
    assert (found.round_no, found.values.tobytes()) == (7, expected.values.tobytes())
    left = {key.removeprefix("runs/r/") for key in memory.list("runs/r/")}
    assert {"run.json", "pruned.json", "outcome/00000.000.json", "sync/agreement.json"} <= left
    assert not [key for key in left if key.startswith(("logs/", "checkpoints/", "sync/metrics", "sync/events"))]
    assert not [key for key in left if key.startswith("sync/rounds/000000000") and int(key.split("/")[2]) < 5]
    assert planned_deletion(memory, "r", keep_weights=True).objects == ()


@pytest.mark.parametrize("nth", [1, 2, 7])
def test_a_deletion_that_was_interrupted_is_repeated_and_no_launch_comes_between(memory, nth):
    with_rounds(memory, "r", rounds=2)
    spec = atoll.RunSpec.build("m:f", run_id="r")
    journal.record_run(memory, spec, executor="local")
    seen = 0

    class Stop(Exception):
        pass

    def before(verb, key):
        nonlocal seen
        seen += verb == "delete"
        if seen == nth:
            raise Stop

    faulty = FaultyStore(memory)
    faulty.before = before
    with pytest.raises(Stop):
        delete(faulty, planned_deletion(memory, "r"))
    assert journal.is_deleted(memory, "r")
    delete(memory, planned_deletion(memory, "r"))
    assert list(memory.list()) == []


def test_a_run_that_is_being_deleted_is_neither_launched_nor_resumed(inside, tmp_path):
    draft = atoll.prepare("job:ok", store=str(tmp_path / "store"), run_id="r")
    journal.record_run(draft.store, draft.spec, executor="local")
    journal.record_deleted(draft.store, "r")
    with pytest.raises(Conflict) as caught:
        draft.submit()
    assert caught.value.reason == "deleted"
    done = inside("resume", "r", "--store", str(tmp_path / "store"), "--json")
    assert done.error["code"] == "Conflict"
    assert inside("rm", "r", "--store", str(tmp_path / "store"), "--yes").code == 0
    assert list(draft.store.list()) == []


def test_a_marker_that_a_deletion_has_left_keeps_the_run_id_from_being_launched(inside, tmp_path):
    draft = atoll.prepare("job:ok", store=str(tmp_path / "store"), run_id="r")
    journal.record_deleted(draft.store, "r")  # the deletion was interrupted before its last step
    with pytest.raises(Conflict) as caught:
        draft.submit()
    assert caught.value.reason == "deleted"
    assert list(draft.store.list()) == [RunKeys("r").deleted()]
    assert inside("rm", "r", "--store", str(tmp_path / "store"), "--yes").code == 0
    run = atoll.prepare("job:ok", store=str(tmp_path / "store"), run_id="r").submit()
    assert run.wait(60).state is ReplicaState.SUCCEEDED


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_a_run_that_is_resumed_before_the_user_has_confirmed_is_not_deleted(cli, inside, monkeypatch, keeps_weights):
    run_id = cli.detached("job:until", "--run-id", "r", "--store", "store", "--arg", "gate=go")
    assert cli("cancel", run_id).code == 0
    before = atoll.attach(run_id)

    def confirm(*_words, **_options):
        before.resume()
        return True

    monkeypatch.setattr("atoll.cli.output.Output.can_ask", True)
    monkeypatch.setattr("click.confirm", confirm)
    present = set(before.store.list("runs/r/"))
    done = inside("rm", run_id, "--json", *(["--keep-weights"] if keeps_weights else []))
    assert done.code == 2, done.stdout
    assert done.error["code"] == "Conflict"
    assert done.data["deleted"] == []
    assert present <= set(before.store.list("runs/r/"))
    assert not journal.is_deleted(before.store, "r")
    assert not journal.is_pruned(before.store, "r")
    with pytest.raises(Conflict):
        before.delete()  # its own launch is over, and the newest is not
    assert inside("rm", str(before.handle), "--yes").code == 2
    (cli.folder / "go").touch()
    assert atoll.attach(run_id).wait(60).state is ReplicaState.SUCCEEDED
    assert inside("rm", run_id, "--yes").code == 0


@pytest.mark.parametrize("mark", [journal.record_deleted, journal.record_pruned])
def test_a_deletion_that_begins_while_a_run_is_resumed_keeps_it_from_being_started(cli, monkeypatch, mark):
    run_id = cli.detached("job:ok", "--run-id", "r", "--store", "store")
    assert cli("wait", run_id).code == 0
    monkeypatch.setenv("ATOLL_HOME", str(cli.home))
    run = atoll.attach(run_id)
    recorded = journal.record_resume

    def record(store, *words, **options):
        mark(store, run_id)
        return recorded(store, *words, **options)

    monkeypatch.setattr(journal, "record_resume", record)
    with pytest.raises(ConfigError) as caught:
        run.resume()
    assert caught.value.reason in ("deleted", "pruned")
    assert journal.read_intent(run.store, run_id, 2) is None


def test_objects_that_were_written_after_a_deletion_can_be_deleted(inside, tmp_path):
    store = registry.open_store(str(tmp_path / "store"))
    store.put(RunKeys("r").beat(0), b"{}")  # by a machine that was lost when the run was deleted
    assert inside("rm", "r", "--store", store.uri, "--yes").code == 0
    assert list(store.list()) == []
    with_rounds(store, "other", rounds=1)
    assert inside("rm", "other", "--store", store.uri, "--yes").code == 3, "rounds without a record may go on"
    assert list(store.list())


def test_verify_of_a_run_without_rounds_after_its_last_snapshot_says_that_they_were_deleted(inside, tmp_path):
    store = registry.open_store(str(tmp_path / "store"))
    with_rounds(store, "r", rounds=5)
    delete(store, planned_deletion(store, "r", keep_weights=True))
    done = inside("verify", "r", "--store", store.uri, "--json")
    assert done.code == 5
    assert "were deleted" in done.error["message"]
    assert done.error["hint"] is None
    assert agreed_weights(store, "r").round_no == 5
