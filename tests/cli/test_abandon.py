"""`atoll cancel --abandon`: a run whose backend is gone counts as over, and its status stays true."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import atoll
from atoll import journal
from atoll.cli.commands import cancel
from atoll.errors import AtollError, BackendUnavailable, ConfigError, StopFailed
from atoll.executors.local.executor import LocalExecutor
from atoll.handle import RunHandle
from atoll.status import ReplicaState

HERE = "store"
DOWN = BackendUnavailable("no answer", executor="local")
NO_LOGIN = ConfigError("the file with the login is gone")


@pytest.fixture
def run_id(cli) -> str:
    return cli.detached("job:until", "-n", 2, "--store", HERE, "--arg", f"gate={cli.folder / 'go'}")


@contextmanager
def gone(monkeypatch: pytest.MonkeyPatch, handle: RunHandle, error: AtollError = DOWN, *calls: str) -> Iterator[None]:
    """The backend of this launch does not answer, or cannot be asked; or only these calls fail."""
    with monkeypatch.context() as patch:
        for name in calls or ("status", "cancel"):
            real = getattr(LocalExecutor, name)

            def call(self, found, *args, _real=real):
                if found == handle:
                    raise error
                return _real(self, found, *args)

            patch.setattr(LocalExecutor, name, call)
        yield


@pytest.mark.parametrize("command", [["resume", "--detach"], ["rm", "--yes"]])
def test_without_an_answer_a_run_is_neither_resumed_nor_deleted(inside, run_id, monkeypatch, command):
    with gone(monkeypatch, atoll.attach(run_id).handle):
        done = inside(*command, run_id, "--json")
        assert (done.code, done.error["code"]) == (3, "BackendUnavailable")
        assert f"`atoll cancel {run_id} --abandon`" in done.error["hint"]
        assert inside("cancel", run_id, "--json").code == 3
    run = atoll.attach(run_id)
    assert not journal.is_cancelled(run.store, run_id)
    run.cancel()


def test_an_abandoned_run_is_lost_and_can_be_resumed_and_its_replicas_can_still_be_stopped(
    cli, inside, run_id, monkeypatch
):
    first = atoll.attach(run_id)
    with gone(monkeypatch, first.handle):
        done = inside("cancel", run_id, "--abandon", "--json")
        assert done.code == 0, done.stderr
        (row,) = done.data["runs"]
        assert row["abandoned"] is True
        assert (row["was"], row["state"], row["was_over"]) == (None, "lost", False)
        assert "may cost money" in row["warning"]
        assert "is abandoned" in done.stderr
        assert {r["state"] for r in inside("status", run_id, "--json").data["replicas"]} == {"lost"}
        resumed = inside("resume", run_id, "--detach", "--arg", f"gate={cli.folder / 'never'}", "--json")
        assert resumed.code == 0, resumed.stderr
        assert resumed.data["launch"] == 2
    assert first.status().state is ReplicaState.RUNNING  # the backend answers again, and its word counts
    first.cancel()
    assert first.status().state is ReplicaState.CANCELLED
    assert journal.read_cancel(first.store, run_id) == journal.Cancel("cancelled on request")
    second = atoll.attach(run_id)
    assert (second.launch, second.status().state) == (2, ReplicaState.RUNNING)
    second.cancel()


@pytest.mark.parametrize("error", [DOWN, NO_LOGIN], ids=["no answer", "no login"])
def test_an_abandoned_run_can_be_deleted(inside, run_id, monkeypatch, error):
    run = atoll.attach(run_id)
    with gone(monkeypatch, run.handle, error):
        assert inside("cancel", run_id, "--abandon").code == 0
        done = inside("rm", run_id, "--yes", "--json")
        assert done.code == 0, done.stderr
        assert done.data["deleted"] == [run_id]
    LocalExecutor().cancel(run.handle)


def test_waiting_for_an_abandoned_run_ends_at_once(inside, run_id, monkeypatch):
    run = atoll.attach(run_id)
    with gone(monkeypatch, run.handle, NO_LOGIN):
        assert inside("wait", run_id).code == 2
        assert inside("cancel", run_id, "--abandon").code == 0
        done = inside("wait", run_id, "--json")
        assert (done.code, done.data["state"]) == (1, "lost")
        assert inside("status", run_id, "--watch").code == 0
    run.cancel()


def test_a_run_that_can_be_stopped_is_not_abandoned(inside, run_id):
    done = inside("cancel", run_id, "--abandon", "--json")
    (row,) = done.data["runs"]
    assert "abandoned" not in row
    assert row["state"] == "cancelled"
    assert atoll.attach(run_id).status().state is ReplicaState.CANCELLED


def test_a_half_started_run_can_be_abandoned_and_resumed(cli, inside, run_id, monkeypatch):
    """The launcher of launch 2 died before it recorded a handle, and its backend is gone."""
    first = atoll.attach(run_id)
    first.cancel()
    journal.record_resume(first.store, first.spec, executor="local", launch=2, rounds_of=1)
    lost = RunHandle("local", "here", f"{run_id}-2", 2)
    journal.record_intent(first.store, run_id, {}, lost, launch=2)
    with gone(monkeypatch, lost):
        assert inside("cancel", run_id, "--abandon").code == 0
        assert {r["state"] for r in inside("status", run_id, "--json").data["replicas"]} == {"lost"}
        assert "none: its launcher did not finish the start\n" in inside("status", run_id).stdout
        done = inside("resume", run_id, "--detach", "--arg", f"gate={cli.folder / 'never'}", "--json")
        assert done.code == 0, done.stderr
        assert done.data["launch"] == 3
        assert inside("cancel", run_id, "--json").code == 0  # the launch before is still gone
    assert atoll.attach(run_id).status().state is ReplicaState.CANCELLED


def test_a_run_that_the_backend_shows_is_not_over_although_it_cannot_be_stopped(inside, run_id, monkeypatch):
    refusal = StopFailed(f"run `{run_id}`", {"rank 0": "its node is lost"}, executor="local")
    with gone(monkeypatch, atoll.attach(run_id).handle, refusal, "cancel"):
        done = inside("cancel", run_id, "--abandon", "--json")
        assert done.code == 0
        assert done.data["runs"][0]["state"] in ("pending", "running")
        assert "does not count as over" in inside("cancel", run_id, "--abandon").stderr
        assert inside("resume", run_id, "--detach").code == 2
    atoll.attach(run_id).cancel()


def test_a_cancel_stops_an_abandoned_launch_on_another_backend(cli, inside, run_id, monkeypatch, caplog):
    """Once its backend answers again. Until then, the warning names it."""
    first = atoll.attach(run_id)
    with gone(monkeypatch, first.handle):
        assert inside("cancel", run_id, "--abandon").code == 0
        done = inside("resume", run_id, "--detach", "--on", "join:2", "--workspace", str(cli.folder), "--json")
        assert done.code == 0, done.stderr
        assert inside("cancel", run_id).code == 0
        assert "launch 1 was abandoned, and may still run: no answer" in caplog.text
    assert first.executor.status(first.handle).state is ReplicaState.RUNNING
    assert inside("cancel", run_id).code == 0
    assert first.executor.status(first.handle).state is ReplicaState.CANCELLED


def test_single_ranks_cannot_be_abandoned(inside, run_id):
    done = inside("cancel", run_id, "--abandon", "--rank", 0, "--json")
    assert done.code == 2
    assert "--rank" in done.error["message"]
    atoll.attach(run_id).cancel()


def test_a_cancel_that_takes_long_says_that_it_goes_on(inside, run_id, monkeypatch):
    stop = LocalExecutor.cancel

    def slow(self, handle, ranks=None):
        time.sleep(0.5)
        stop(self, handle, ranks)

    monkeypatch.setattr(LocalExecutor, "cancel", slow)
    monkeypatch.setattr(cancel, "_SLOW_S", 0.05)
    done = inside("cancel", run_id)
    assert done.code == 0
    assert f"run `{run_id}`: waiting until its backend has stopped every replica" in done.stderr
