"""`atoll resume`: which runs it continues, what it refuses, and that there is one launch whoever else resumes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import atoll
from atoll import journal
from atoll.errors import AuthError, BackendUnavailable, Conflict, InvalidSpec, SubmitError
from atoll.executors.local.executor import LocalExecutor
from atoll.runs import index
from atoll.status import ReplicaState

HERE = "store"


def ended(cli, run_id="r", entry="job:ok", *words) -> str:
    """A run of two replicas that has ended."""
    cli.detached(entry, "-n", 2, "--run-id", run_id, "--store", HERE, *words)
    cli("wait", run_id)
    return run_id


def test_a_run_that_is_over_is_resumed_as_its_next_launch_and_the_old_logs_are_kept(cli, inside):
    run_id = ended(cli, "r", "job:ok", "--arg", "note=first")
    done = cli("resume", run_id, "--arg", "note=second", "--json")
    assert done.code == 0, done.stderr
    assert done.data["launch"] == 2
    newest = [line["data"]["line"] for line in inside("logs", run_id, "--json").lines() if "event" in line]
    oldest = [
        line["data"]["line"] for line in inside("logs", run_id, "--launch", 1, "--json").lines() if "event" in line
    ]
    assert {line.rpartition(" ")[2] for line in newest} == {"second"}
    assert {line.rpartition(" ")[2] for line in oldest} == {"first"}
    assert inside("status", run_id, "--json").data["launch"] == 2
    assert inside("status", run_id, "--launch", 1, "--json").data["launch"] == 1
    assert inside("result", run_id, "--launch", 1).code == 0
    missing = inside("status", run_id, "--launch", 3, "--json")
    assert missing.code == 3
    assert missing.error["message"] == f"run `{run_id}` has no launch 3: it has launches 1 to 2"
    adopted = inside("run", "job:ok", "-n", 2, "--run-id", run_id, "--store", HERE, "--arg", "note=first", "--json")
    assert adopted.code == 0, adopted.stderr
    assert adopted.data["launch"] == 2
    assert adopted.lines()[0]["event"] == "adopted"
    assert f"run `{run_id}`: launch 3 on local" in cli("resume", run_id).stderr


def test_a_running_run_is_not_resumed_and_nothing_is_recorded(cli, inside):
    run_id = cli.detached("job:until", "-n", 2, "--store", HERE, "--arg", "gate=go")
    done = inside("resume", run_id, "--json")
    assert done.code == 2
    assert done.error["code"] == "Conflict"
    assert "atoll cancel" in done.error["hint"]
    store = atoll.attach(run_id).store
    assert journal.newest_launch(store, run_id).number == 1
    assert cli("cancel", run_id).code == 0
    (cli.folder / "go").touch()
    assert cli("resume", run_id).code == 0


def test_another_number_of_replicas_is_refused_with_the_way_to_get_it(cli, inside):
    run_id = ended(cli)
    done = inside("resume", run_id, "-n", 3, "--json")
    assert done.code == 2
    assert "--from" in done.error["hint"]
    assert inside("resume", run_id, "-n", "x", "--timeout", "y").code == 2
    assert inside("resume", run_id, "--arg", "no_such=1").code == 2
    assert inside("resume", "no-such-run", "--store", HERE).code == 3
    run = atoll.attach(run_id)
    with pytest.raises(InvalidSpec) as caught:
        run.resume(replica=2)
    assert caught.value.fields == ("replica",)
    assert journal.newest_launch(run.store, run_id).number == 1


def test_an_argument_that_the_sent_code_does_not_take_is_refused(cli, inside):
    """Every later launch would have the argument, too."""
    source = cli.folder / "sent"
    source.mkdir()
    (source / "own.py").write_text("def f(ctx, *, steps=1):\n    return steps\n")
    run_id = ended(cli, "sent", "own:f", "--workspace", source)
    done = inside("resume", run_id, "--arg", "stpes=2", "--json")
    assert done.code == 2
    assert "takes no argument `stpes`, did you mean `steps`?" in done.error["message"]
    assert journal.newest_launch(atoll.attach(run_id).store, run_id).number == 1
    assert cli("resume", run_id, "--arg", "steps=2").code == 0
    assert atoll.attach(run_id).result().values == [2, 2]


def test_changed_code_is_listed_by_file_and_needs_consent(cli, inside):
    (cli.folder / "helper.py").write_text("value = 1\n")
    (cli.folder / "own.py").write_text("import helper\ndef f(ctx):\n    return helper.value\n")
    run_id = ended(cli, "own", "own:f")
    (cli.folder / "helper.py").write_text("value = 2\n")
    (cli.folder / "other.py").write_text("value = 3\n")  # which the entry point does not use
    again = inside("run", "own:f", "-n", 2, "--run-id", run_id, "--store", HERE, "--json")
    assert again.code == 2
    assert again.error["code"] == "Conflict"
    assert again.error["differences"] == ["code: `helper.py` has changed"]
    done = inside("resume", run_id, "--json")
    assert done.code == 2
    assert done.error["differences"] == ["code: `helper.py` has changed"]
    assert "--accept-changes" in done.error["hint"]
    done = cli("resume", run_id, "--accept-changes")
    assert done.code == 0, done.stderr
    assert atoll.attach(run_id).result().values == [2, 2]
    assert cli("resume", run_id).code == 0, "the changes were accepted before"


def test_of_two_resumes_at_once_both_get_the_same_launch(cli, inside):
    run_id = ended(cli)
    runs = [atoll.attach(run_id) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:  # two processes could begin so far apart that the first run is over
        resumed = list(pool.map(lambda run: run.resume(), runs))
    assert [each.launch for each in resumed] == [2, 2]
    assert resumed[0].wait(120.0).state == "succeeded"
    assert inside("status", run_id, "--json").data["launch"] == 2


def test_two_resumes_with_other_content_are_a_conflict(cli, inside):
    run_id = ended(cli)
    run = atoll.attach(run_id)
    journal.record_resume(run.store, run.spec, executor="local", launch=2, rounds_of=1)
    with pytest.raises(Conflict) as caught:
        run.resume(args={"steps": 3})
    assert caught.value.reason == "resumed"
    assert caught.value.differences == ("task.args.steps: there absent, here `3`",)
    assert inside("run", "job:ok", "-n", 2, "--run-id", run_id, "--store", HERE).code == 2
    resumed = atoll.attach(run_id).resume()  # its launcher was interrupted: the same launch is continued
    assert resumed.launch == 2
    resumed.wait(60.0)
    assert resumed.status().state == ReplicaState.SUCCEEDED


@pytest.mark.usefixtures("inside")
def test_a_resume_that_cannot_be_started_is_undone_and_can_be_repeated(cli, monkeypatch):
    run_id = ended(cli)
    run = atoll.attach(run_id)

    def fail(self, plan):
        raise SubmitError("no machine", created=["one"])

    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "start", fail)
        with pytest.raises(SubmitError):
            run.resume()
    assert journal.newest_launch(run.store, run_id).undone
    assert index.find(run_id).handle == str(run.handle)
    assert atoll.attach(run_id).status().state == ReplicaState.CANCELLED
    assert atoll.attach(run_id, launch=1).status().state == ReplicaState.SUCCEEDED
    again = run.resume()
    assert (again.launch, again.rounds_of) == (3, 1)
    again.wait(60.0)
    assert again.status().state == ReplicaState.SUCCEEDED


@pytest.mark.usefixtures("inside")
def test_a_resume_that_its_backend_refused_is_repeated_on_another_backend(cli, monkeypatch):
    """The backend that refused to start it may refuse to be asked for what is left, too."""
    run_id = ended(cli)
    run = atoll.attach(run_id)

    def refuse(self, *_):
        raise AuthError("no login", executor="local", operation="submit")

    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "start", refuse)
        patch.setattr(LocalExecutor, "cancel", refuse)
        with pytest.raises(AuthError):
            run.resume()
        assert journal.newest_launch(run.store, run_id).is_refused
        again = run.resume(on="join", workspace=".")
    assert (again.launch, again.executor.name) == (3, "join")
    again.cancel()

    journal.record_resume(run.store, run.spec, executor="local", launch=4, rounds_of=1)
    journal.record_intent(run.store, run_id, {}, run.handle, launch=4)
    with pytest.raises(Conflict):
        journal.record_intent(run.store, run_id, {"by": "another launcher"}, None, launch=4)
    assert journal.record_undone(run.store, run_id, "refused", launch=4, is_refused=True).undone == "refused"
    assert journal.handle_to_stop(run.store, run_id, 4) is None
    journal.record_intent(run.store, run_id, {}, run.handle, launch=4)  # another launcher may have created something
    assert journal.handle_to_stop(run.store, run_id, 4) == run.handle


@pytest.mark.usefixtures("inside")
def test_a_resumed_run_is_cancelled_although_the_backend_of_an_earlier_launch_is_gone(cli, monkeypatch):
    run_id = cli.detached("job:until", "-n", 2, "--store", HERE, "--arg", "gate=go")
    assert cli("cancel", run_id).code == 0
    assert cli("resume", run_id, "--detach").code == 0
    run, stop = atoll.attach(run_id), LocalExecutor.cancel
    first = atoll.attach(run_id, launch=1).handle

    def gone(self, handle, ranks=None):
        if handle == first:
            raise BackendUnavailable("no answer", executor="local", operation="cancel")
        stop(self, handle, ranks)

    monkeypatch.setattr(LocalExecutor, "cancel", gone)
    assert run.cancel().record_error is None
    assert run.status().state == ReplicaState.CANCELLED
    assert journal.is_cancelled(run.store, run_id, launch=2)


@pytest.mark.usefixtures("inside")
def test_a_resume_that_was_cancelled_before_it_started_is_followed_by_another(cli):
    run_id = ended(cli)
    run = atoll.attach(run_id)
    journal.record_resume(run.store, run.spec, executor="local", launch=2, rounds_of=1)
    atoll.attach(run_id).cancel()
    again = atoll.attach(run_id).resume()
    assert again.launch == 3
    again.wait(60.0)
    assert again.status().state == ReplicaState.SUCCEEDED


def test_a_resume_whose_command_was_killed_says_how_it_goes_on(cli, inside):
    run_id = ended(cli)
    run = atoll.attach(run_id)
    journal.record_resume(run.store, run.spec, executor="local", launch=2, rounds_of=1)
    replicas = inside("status", run_id, "--json").data["replicas"]
    assert {replica["message"].rpartition("; ")[2] for replica in replicas} == {"resume it again to continue"}
    other = inside("resume", run_id, "--arg", "note=other", "--json")
    assert other.code == 2
    assert f"atoll cancel {run_id}" in other.error["hint"]
    assert inside("cancel", run_id).code == 0
    done = cli("resume", run_id, "--arg", "note=other", "--json")
    assert (done.code, done.data["launch"]) == (0, 3), done.stderr
