"""Replicas, launchers and signals that do what no well-behaved one would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import atoll
from atoll import journal
from atoll.errors import BackendError, InvalidSpec, RunFailed
from atoll.executors.local.executor import LocalExecutor
from atoll.replica import processes
from atoll.replica.pipes import KillPipe, OutputPipe
from atoll.replica.spool import Spool
from atoll.runs.prepare import prepare
from atoll.runs.run import Run
from atoll.status import Reason, ReplicaState

pytestmark = pytest.mark.process

LIMIT_S = 60.0

HOSTILE = """
import atexit, os, sys, threading, time

def undecodable():
    raise ValueError("no file \\udcff")

def undecodable_exit():
    sys.exit("no file \\udcff")

def all_closed():
    os.closerange(0, 256)
    raise ValueError("said nothing")

def no_stdout():
    sys.stdout = None
    return 5

class Tee:
    def write(self, text):
        os.write(1, text.encode())

def own_stdout():
    sys.stdout = Tee()
    print("through the tee")
    return 5

class Mute:
    def __str__(self):
        raise RuntimeError("no text")

def mute_exit():
    sys.exit(Mute())

def float_exit():
    sys.exit(0.0)

def late_exit():
    atexit.register(os._exit, 3)
    return 5

def nested(depth):
    sys.setrecursionlimit(20_000)
    value = []
    for _ in range(depth):
        value = [value]
    return value

def forks(ctx):
    if os.fork() == 0:
        raise RuntimeError("the child came back")
    os.wait()
    os._exit(0)

def short(folder):
    with open(os.path.join(folder, "begun"), "w"):
        pass
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.01)
    return "done"

def torn_progress(ctx):
    with open(os.path.join(ctx.spool, "progress.json"), "w") as file:
        file.write('{"round_no": 3, "met')
    return 5

def writes_outcome(ctx, text):
    with open(os.path.join(ctx.spool, "outcome.json"), "w") as file:
        file.write(text)
    os._exit(0)

def outcome_is_a_folder(ctx):
    os.makedirs(os.path.join(ctx.spool, "outcome.json", "in", "the", "way"))
    os._exit(0)

def one_long_line(size):
    os.write(1, b"first\\n" + b"z" * size)
    os._exit(3)

def long_words(size):
    raise ValueError("z" * size + " the end")

def sleeps(seconds):
    time.sleep(seconds)
    return seconds
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "hostile.py").write_text(HOSTILE)
    monkeypatch.chdir(folder)
    return folder


def spool_of(run: Run) -> Spool:
    return Spool(f"/{run.handle.native_id}")


def until(claim, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.01)


def uploader_of(run: Run) -> list[int]:
    until(lambda: run.status().replicas[0].native_id, "the replica is there")
    supervisor, replica = spool_of(run).supervisor_pid(), run.status().replicas[0].native_id
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return [int(pid) for pid in children if pid != replica]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("undecodable", "ValueError: no file \\udcff"),
        ("undecodable_exit", "no file \\udcff"),
        ("all_closed", "ValueError: said nothing"),
        ("mute_exit", "<no text: RuntimeError>"),
        ("float_exit", "0.0"),
    ],
)
def test_the_reason_is_told_however_the_replica_fails(hostile, store, function, words):
    run = atoll.launch(f"hostile:{function}", store=store)
    assert run.wait(LIMIT_S).replicas[0].message == words
    assert json.loads(json.dumps(run.result().to_json(), ensure_ascii=False).encode())["ok"] is False


@pytest.mark.parametrize("function", ["no_stdout", "own_stdout", "torn_progress"])
def test_a_replica_that_breaks_its_surroundings_still_succeeds(hostile, store, function):
    run = atoll.launch(f"hostile:{function}", store=store)
    run.wait(LIMIT_S)
    assert run.result().raise_for_failures().values == [5]


@pytest.mark.parametrize("text", ["{torn", "[1]", '{"state": "succeeded"}', '{"extra": 1}'])
def test_a_forged_outcome_does_not_take_the_run_down(hostile, store, text):
    run = atoll.launch("hostile:writes_outcome", store=store, args={"text": text})
    assert run.wait(LIMIT_S).replicas[0].reason is Reason.NO_OUTCOME
    assert run.result().outcomes[0].reason is Reason.NO_OUTCOME


def test_an_outcome_that_cannot_be_read_does_not_take_the_run_down(hostile, store):
    run = atoll.launch("hostile:outcome_is_a_folder", store=store)
    assert run.wait(LIMIT_S).replicas[0].reason is Reason.NO_OUTCOME


def test_a_script_that_launches_while_it_is_loaded_does_not_launch_for_ever(hostile, store):
    script = hostile / "unguarded.py"
    script.write_text(
        "import os, atoll\n"
        "with open('starts', 'a') as file:\n    file.write('x')\n"
        "if os.path.getsize('starts') > 3:\n    raise SystemExit('for ever')\n\n\n"
        "def work():\n    return 1\n\n\n"
        f"run = atoll.launch(work, store={store!r})\nrun.wait({LIMIT_S})\nrun.result().raise_for_failures()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert "if __name__ == '__main__'" in done.stderr
    assert (hostile / "starts").read_text() == "xx"


def test_a_bad_exit_code_after_the_return_is_a_failure_with_a_reason(hostile, store):
    status = atoll.launch("hostile:late_exit", store=store).wait(LIMIT_S).replicas[0]
    assert (status.state, status.reason, status.exit_code) == (ReplicaState.FAILED, Reason.USER_ERROR, 3)
    assert "3" in status.message


def test_a_result_too_deep_to_be_read_is_cut_where_it_is_made(hostile, store):
    run = atoll.launch("hostile:nested", store=store, args={"depth": 3000})
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    (outcome,) = run.result().outcomes
    assert isinstance(outcome.result, list)
    assert len(outcome.warnings) == 1


def test_a_forked_child_that_returns_does_not_speak_for_the_replica(hostile, store):
    status = atoll.launch("hostile:forks", store=store).wait(LIMIT_S).replicas[0]
    assert (status.reason, status.exit_code) == (Reason.NO_OUTCOME, 0)


def test_a_replicas_own_outcome_is_stored_if_the_supervisor_dies_before_its_verdict(hostile, store):
    run = atoll.launch("hostile:short", store=store, args={"folder": str(hostile)})
    until(lambda: uploader_of(run), "the uploader runs")
    supervisor = spool_of(run).supervisor_pid()
    os.kill(supervisor, signal.SIGSTOP)
    (hostile / "go").touch()
    until(lambda: spool_of(run).attempt(0, 0).outcome.exists(), "the replica has left its outcome")
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not processes.of_label(str(spool_of(run).root)), "the uploader has stored it and exited")
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    assert run.result().values == ["done"]


def test_a_run_ends_although_its_uploader_is_always_killed(hostile, store):
    run = atoll.launch("hostile:short", store=store, args={"folder": str(hostile)})
    killed = 0
    while killed < 5:
        for pid in uploader_of(run):
            os.kill(pid, signal.SIGKILL)
            killed += 1
            until(lambda pid=pid: pid not in uploader_of(run), "it is gone")
    (hostile / "go").touch()
    assert run.wait(LIMIT_S).replicas[0].reason is Reason.NO_OUTCOME


def test_cancel_wakes_a_suspended_supervisor(hostile, store):
    run = atoll.launch("hostile:sleeps", store=store, args={"seconds": 600}, grace_s=1)
    os.kill(spool_of(run).supervisor_pid(), signal.SIGSTOP)
    run.cancel()
    assert run.status().state is ReplicaState.CANCELLED


def test_a_run_that_is_just_starting_is_no_stray(hostile, store, tmp_path):
    """The supervisor has the label for a while before it can take the lock."""
    executor = LocalExecutor()
    label = prepare("hostile:sleeps", store=store, args={"seconds": 0}, on=executor).plan.request["label"]
    spool = Spool(label)
    spool.root.mkdir(parents=True)
    spool.plan.write_text('{"ranks": [0]}')
    starting = subprocess.Popen(["sleep", "600"], env={**os.environ, "ATOLL_LABEL": label})
    try:
        until(lambda: processes.of_label(label), "it carries the label")
        assert executor.strays() == []
        spool.status.write_text("[]")
        assert [stray.native_id for stray in executor.strays()] == [str(starting.pid)]
    finally:
        starting.kill()
        starting.wait()


def test_a_launcher_with_more_than_1024_open_files_can_launch(hostile, store):
    script = hostile / "many.py"
    script.write_text(
        "import resource, atoll\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "files = [open('/dev/null') for _ in range(1100)]\n"
        f"run = atoll.launch('hostile:sleeps', args={{'seconds': 0}}, store={store!r})\n"
        f"print(run.wait({LIMIT_S}).state)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout == "succeeded\n", done.stderr


def test_another_name_of_the_same_interpreter_is_no_conflict(hostile, store, tmp_path, monkeypatch):
    draft = prepare("hostile:sleeps", store=store, args={"seconds": 0}, run_id="same")
    handle = LocalExecutor().submit(draft.plan)
    other = tmp_path / "python-by-another-name"
    other.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(other))
    again = prepare("hostile:sleeps", store=store, args={"seconds": 0}, run_id="same")
    assert again.plan.request["command"] != draft.plan.request["command"]
    assert LocalExecutor().submit(again.plan) == handle
    journal.record_intent(draft.store, "same", draft.plan.request, handle)
    journal.check_intent(draft.store, "same", again.plan.request)
    LocalExecutor().cancel(handle)


def test_a_function_of_a_module_run_by_its_name_finds_its_package(hostile, store):
    package = hostile / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "values.py").write_text("X = 7\n")
    (package / "train.py").write_text(
        "import atoll\nfrom .values import X\n\n\ndef work():\n    return X\n\n\n"
        f"if __name__ == '__main__':\n    run = atoll.launch(work, store={store!r})\n"
        f"    run.wait({LIMIT_S})\n    print(run.result().raise_for_failures().values)\n"
    )
    done = subprocess.run([sys.executable, "-m", "pack.train"], capture_output=True, text=True, check=False)
    assert done.stdout == "[7]\n", done.stderr


def test_a_replica_ends_itself_if_the_supervisor_died_before_the_kill_pipe_was_set_up():
    """The writer is gone before `attach`, so nobody is left whose end the kernel could tell."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        KillPipe().attach()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_no_signal_is_sent_for_a_supervisor_in_another_pid_namespace(hostile, store, monkeypatch):
    """The kernel says pid 0 for a holder of the lock in another pid namespace."""
    run = atoll.launch("hostile:sleeps", store=store, args={"seconds": 0})
    run.wait(LIMIT_S)
    holders = iter([0])
    monkeypatch.setattr(Spool, "supervisor_pid", lambda self: next(holders, None))
    with pytest.raises(BackendError) as caught:
        run.executor.cancel(run.handle)
    assert (caught.value.operation, caught.value.reason) == ("cancel", "pid_namespace")


def test_a_supervisor_that_exits_during_cancel_is_no_error(hostile, store, monkeypatch):
    run = atoll.launch("hostile:sleeps", store=store, args={"seconds": 0})
    run.wait(LIMIT_S)
    gone = subprocess.Popen(["true"])
    gone.wait()
    holders = iter([gone.pid])
    monkeypatch.setattr(Spool, "supervisor_pid", lambda self: next(holders, None))
    run.executor.cancel(run.handle)
    assert next(holders, None) is None, "the process that is gone was to be signalled"
    assert run.status().state is ReplicaState.SUCCEEDED


def test_a_home_that_cannot_be_written_to_is_a_refusal_and_no_bug(hostile, store, monkeypatch):
    monkeypatch.setenv("ATOLL_HOME", "/dev/null/home")
    with pytest.raises(InvalidSpec) as caught:
        atoll.launch("hostile:sleeps", store=store, args={"seconds": 0})
    assert caught.value.fields == ("root",)


@pytest.mark.parametrize(("data", "rule"), [(b"\xff\xfe", "UTF-8"), (b"a\0b", "NUL")])
def test_a_secret_that_no_variable_can_hold_is_refused_and_not_shown(hostile, store, data, rule):
    (hostile / "key").write_bytes(data)
    with pytest.raises(InvalidSpec, match=rule) as caught:
        atoll.launch("hostile:sleeps", store=store, args={"seconds": 0}, secrets={"KEY": f"file:{hostile}/key"})
    assert caught.value.fields == ("secrets.KEY",)


def test_a_log_that_is_one_long_line_is_followed_whole_and_quoted_in_part(hostile, store):
    run = atoll.launch("hostile:one_long_line", store=store, args={"size": 300_000})
    assert list(run.logs(0, follow=True)) == ["first", "z" * 300_000]
    with pytest.raises(RunFailed) as caught:
        run.result().raise_for_failures()
    assert len(str(caught.value)) < 5000


def test_of_a_traceback_that_is_too_long_both_ends_are_kept(hostile, store):
    run = atoll.launch("hostile:long_words", store=store, args={"size": 300_000})
    run.wait(LIMIT_S)
    with pytest.raises(RunFailed) as caught:
        run.result().raise_for_failures()
    assert "raise ValueError(" in caught.value.message
    assert "the end" in caught.value.message
    assert len(caught.value.message) < 10_000


def test_a_store_that_fills_up_is_named_as_the_reason(hostile, store):
    """The status keeps the problem that the uploader reported beside the verdict."""
    run = atoll.launch("hostile:short", store=store, args={"folder": str(hostile)})
    until((hostile / "begun").exists, "the replica has all it needs of the store")
    until(lambda: uploader_of(run), "the uploader runs")
    root = Path(store.removeprefix("file://"))
    root.rename(root.with_name("moved"))
    root.write_text("in the way")
    (hostile / "go").touch()
    status = run.wait(LIMIT_S).replicas[0]
    root.unlink()
    root.with_name("moved").rename(root)
    assert status.reason is Reason.NO_OUTCOME
    assert "Not a directory" in status.message


def test_a_full_disk_under_spool_and_log_does_not_end_the_supervisor(tmp_path):
    """/dev/full is a disk on which nothing fits."""
    output = OutputPipe(Path("/dev/full"))
    os.write(output._write_end, b"output")
    with open("/dev/full", "w") as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", log)
        output.drain()
        with pytest.raises(BlockingIOError):
            os.read(output.read_end, 1)  # the pipe is empty again, so the replica can go on writing
        assert output.lost_bytes == 6
        os.write(output._write_end, b"more")
        output.drain()
        assert output.lost_bytes == 10
        with suppress(OSError):
            log.flush()
        patch.undo()
        with suppress(OSError):
            log.close()
    output.close_write_end()
    output.close()
