"""Whole runs on this machine, with real processes and real signals."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import atoll
from atoll import journal
from atoll.errors import (
    BackendUnavailable,
    ConfigError,
    Conflict,
    InvalidSpec,
    RunFailed,
    RunNotFound,
    SubmitError,
    Unsupported,
    WaitTimeout,
)
from atoll.executors.local.executor import LocalExecutor
from atoll.replica import processes
from atoll.replica.spool import Spool
from atoll.runs.run import Run
from atoll.status import Reason, ReplicaState
from repository import TESTS

pytestmark = pytest.mark.process

LIMIT_S = 60.0


def spool_of(run: Run) -> Spool:
    return Spool(f"/{run.handle.native_id}")


def processes_of(run: Run) -> list[int]:
    return processes.of_label(str(spool_of(run).root))


def until(claim, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.01)


def until_hanging(run: Run) -> None:
    until(lambda: all("hanging" in list(run.logs(r)) for r in range(run.spec.placement.replicas)), "all replicas hang")


def test_results_come_back_in_rank_order_and_nothing_is_left(jobs, store):
    run = atoll.launch("jobs:echo", replicas=3, store=store, args={"a": [1, {"b": "é\n'\""}]})
    run.wait(LIMIT_S)
    values = run.result().raise_for_failures().values
    assert [value["rank"] for value in values] == [0, 1, 2]
    assert all(value["args"] == {"a": [1, {"b": "é\n'\""}]} and value["world_size"] == 3 for value in values)
    until(lambda: not processes_of(run), "no process is left")


@pytest.mark.parametrize(
    ("entry", "args", "reason", "code"),
    [
        ("jobs:fail", {}, Reason.USER_ERROR, 1),
        ("jobs:exit_with", {"code": 3}, Reason.USER_ERROR, 3),
        ("jobs:exit_with", {"code": 0}, Reason.NO_OUTCOME, 0),
        ("jobs:sys_exit", {"code": 5}, Reason.USER_ERROR, 5),
        ("jobs:kill_self", {}, Reason.KILLED, 137),
        ("jobs:kill_self", {"number": int(signal.SIGSEGV)}, Reason.KILLED, 139),
        ("jobs:out_of_memory", {}, Reason.OOM, 1),
        ("jobs:without_a_store", {}, Reason.BACKEND, 4),
    ],
)
def test_every_bad_end_has_its_reason_and_exit_code(jobs, store, entry, args, reason, code):
    run = atoll.launch(entry, replicas=2, store=store, args=args)
    status = run.wait(LIMIT_S)
    assert [(r.state, r.reason, r.exit_code) for r in status.replicas] == [(ReplicaState.FAILED, reason, code)] * 2
    with pytest.raises(RunFailed) as caught:
        run.result().raise_for_failures()
    assert "rank 0" in str(caught.value)
    assert f"atoll logs {run.id}" in str(caught.value)


def test_a_value_that_is_not_json_is_kept_as_text_with_a_warning(jobs, store):
    run = atoll.launch("jobs:not_json", replicas=2, store=store)
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    result = run.result().raise_for_failures()
    assert all(value["model"].startswith("<object object at ") and value["best"] == [1, 2] for value in result.values)
    warning = "result.model: a `object` is not JSON; its repr is kept"
    assert [outcome.warnings for outcome in result.outcomes] == [(warning,)] * 2
    assert [replica.warnings for replica in run.status().replicas] == [(warning,)] * 2
    assert result.warnings == [f"ranks 0-1: {warning}"]
    assert list(run.logs(0)) == [f"warning: {warning}"]


def test_keys_with_the_same_text_in_json_are_both_kept(jobs, store):
    run = atoll.launch("jobs:equal_keys", store=store)
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    (outcome,) = run.result().outcomes
    assert outcome.result == [{"1": "number", "'1'": "text", "null": 0}]
    assert outcome.warnings == ("result[0]: a key with the text of another key is not JSON; its repr is kept",)


def test_sys_exit_zero_is_a_success(jobs, store):
    run = atoll.launch("jobs:sys_exit", store=store, args={"code": 0})
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED


def test_the_remote_traceback_is_shown_without_our_own_frames(jobs, store):
    run = atoll.launch("jobs:fail", store=store)
    run.wait(LIMIT_S)
    with pytest.raises(RunFailed) as caught:
        run.result().raise_for_failures()
    text = str(caught.value)
    assert "raise ValueError" in text
    assert "atoll/replica" not in text


@pytest.mark.parametrize("error", [BackendUnavailable("no cluster"), ConfigError("no context")], ids=["down", "gone"])
def test_an_ended_run_is_read_from_the_store_if_its_backend_cannot_be_asked(jobs, store, monkeypatch, error):
    run = atoll.launch("jobs:echo", replicas=2, store=store)
    run.wait(LIMIT_S)

    def refuse(*_, **__):
        raise error

    for name in ("status", "logs"):
        monkeypatch.setattr(LocalExecutor, name, refuse)
    assert [r.state for r in run.status().replicas] == [ReplicaState.SUCCEEDED] * 2
    assert [value["rank"] for value in run.result().values] == [0, 1]
    assert list(run.logs(1)) == ["rank 1 of 2"]


def test_a_run_that_goes_on_needs_its_backend(jobs, store, monkeypatch):
    run = atoll.launch("jobs:hang", replicas=2, store=store, grace_s=0.3)
    until_hanging(run)
    run.cancel([1])

    def refuse(*_, **__):
        raise BackendUnavailable("no cluster")

    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "status", refuse)
        with pytest.raises(BackendUnavailable):
            run.status()
    run.cancel()


def test_a_failure_that_a_restart_may_follow_is_no_end_in_the_store(jobs, store, monkeypatch):
    run = atoll.launch("jobs:fail", replicas=2, store=store)
    run.wait(LIMIT_S)

    def refuse(*_, **__):
        raise BackendUnavailable("no cluster")

    monkeypatch.setattr(LocalExecutor, "status", refuse)
    assert [r.state for r in run.status().replicas] == [ReplicaState.FAILED] * 2
    placement = dataclasses.replace(run.spec.placement, max_restarts=1)
    run.spec = dataclasses.replace(run.spec, placement=placement)
    with pytest.raises(BackendUnavailable):
        run.status()


def test_a_replica_past_its_limit_has_failed_with_timeout_though_it_ignores_sigterm(jobs, store):
    run = atoll.launch(
        "jobs:hang", replicas=2, store=store, args={"stubborn": True, "children": 1}, timeout_s=4, grace_s=0.2
    )
    status = run.wait(LIMIT_S)
    assert {(r.state, r.reason, r.exit_code) for r in status.replicas} == {(ReplicaState.FAILED, Reason.TIMEOUT, 137)}
    until(lambda: not processes_of(run), "no process is left")


@pytest.mark.parametrize("escape", [False, True])
def test_cancel_ends_the_whole_group_and_returns_when_nothing_runs(jobs, store, escape):
    args = {"stubborn": True, "children": 2, "escape": escape}
    run = atoll.launch("jobs:hang", replicas=2, store=store, args=args, grace_s=0.3)
    until_hanging(run)
    assert len(processes_of(run)) >= 6
    run.cancel()
    assert processes_of(run) == []
    assert {(r.state, r.reason) for r in run.status().replicas} == {(ReplicaState.CANCELLED, Reason.CANCELLED)}
    run.cancel()


def test_a_child_left_behind_does_not_outlive_its_replica(jobs, store):
    for escape in (False, True):
        run = atoll.launch("jobs:leave_child_behind", store=store, args={"escape": escape})
        run.wait(LIMIT_S)
        assert processes.is_dead(run.result().values[0])


def test_the_run_goes_on_when_its_launcher_is_killed(jobs, store, own_home):
    launch = f"atoll.launch('jobs:echo', replicas=2, store={store!r}, run_id='orphan')"
    code = f"import atoll, os; {launch}; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    run = atoll.attach("orphan")
    run.wait(LIMIT_S)
    assert len(run.result().raise_for_failures().values) == 2


def test_replicas_of_a_killed_supervisor_are_killed_and_lost(jobs, store):
    run = atoll.launch("jobs:hang", replicas=3, store=store, args={"children": 1})
    until_hanging(run)
    holder = spool_of(run).supervisor_pid()
    assert holder is not None
    os.kill(holder, signal.SIGKILL)
    status = run.wait(LIMIT_S)
    assert {(r.state, r.reason) for r in status.replicas} == {(ReplicaState.LOST, Reason.LOST)}
    until(lambda: not processes_of(run), "no process is left")
    assert "hanging" in list(run.logs(1))
    assert run.executor.status(run.handle) == run.executor.status(run.handle)
    run.cancel()
    assert run.status(progress=False).replicas[0].state is ReplicaState.LOST


def test_a_killed_uploader_is_replaced_and_nothing_is_lost(jobs, store):
    run = atoll.launch("jobs:hang", replicas=2, store=store, grace_s=1)
    until_hanging(run)
    supervisor = spool_of(run).supervisor_pid()
    groups = {pid for pid in processes_of(run) if pid != supervisor and os.getpgid(pid) == pid}
    replicas = {int(r.native_id) for r in run.executor.status(run.handle).replicas if r.native_id}
    (uploader,) = groups - replicas
    os.kill(uploader, signal.SIGKILL)
    until(lambda: len([p for p in processes_of(run) if p != uploader]) == 4, "another uploader runs")
    run.cancel()
    assert all(outcome.state is ReplicaState.CANCELLED for outcome in run._stored.outcomes().values())
    assert len(run._stored.outcomes()) == 2


def test_restarts_count_attempts_and_keep_each_log(jobs, store):
    run = atoll.launch("jobs:fail_until", store=store, args={"attempt": 2}, max_restarts=3)
    status = run.wait(LIMIT_S)
    assert (status.replicas[0].state, status.replicas[0].attempt) == (ReplicaState.SUCCEEDED, 2)
    assert run.result().values == [2]
    for attempt in range(3):
        assert f"this is attempt {attempt}" in list(run.logs(0, attempt=attempt))


def test_restarts_end(jobs, store):
    run = atoll.launch("jobs:fail_until", store=store, args={"attempt": 9}, max_restarts=1)
    status = run.wait(LIMIT_S)
    assert (status.replicas[0].state, status.replicas[0].attempt) == (ReplicaState.FAILED, 1)


def test_output_is_captured_from_the_first_byte_in_order_and_binary_safe(jobs, store):
    run = atoll.launch("jobs:both_outputs", store=store)
    run.wait(LIMIT_S)
    expected = ["\x00\\xff binary", "out 1", "err 1", "out 2", "err 2", "raw", "no line end"]
    assert list(run.logs(0)) == expected
    assert b"".join(run._stored.log.chunks(0)) == b"\0\xff binary\nout 1\nerr 1\nout 2\nerr 2\nraw\nno line end"


def test_two_hundred_megabytes_of_output_are_all_there(jobs, store):
    run = atoll.launch("jobs:shout", store=store, args={"megabytes": 200})
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    assert sum(len(piece) for piece in run._stored.log.chunks(0)) == 200 << 20
    assert list(run.logs(0, tail=2)) == ["x" * 1023] * 2


def test_a_result_of_fifty_megabytes_comes_back(jobs, store):
    run = atoll.launch("jobs:large", store=store, args={"size": 50_000_000})
    run.wait(LIMIT_S)
    assert run.result().values == ["y" * 50_000_000]


def test_sixty_four_replicas_run_on_this_machine(jobs, store):
    run = atoll.launch("jobs:echo", replicas=64, store=store)
    run.wait(LIMIT_S)
    assert [value["rank"] for value in run.result().raise_for_failures().values] == list(range(64))


def test_logs_outlive_the_machine(jobs, store, own_home):
    run = atoll.launch("jobs:echo", replicas=2, store=store)
    run.wait(LIMIT_S)
    subprocess.run(["rm", "-rf", str(spool_of(run).root)], check=True)
    assert list(run.logs(1)) == ["rank 1 of 2"]
    assert run.status().state is ReplicaState.SUCCEEDED
    assert run.result().raise_for_failures().values[1]["rank"] == 1


def test_progress_is_seen_from_outside(jobs, store):
    run = atoll.launch("jobs:progress", replicas=2, store=store)
    run.wait(LIMIT_S)
    progress = run.status().replicas[1].progress
    assert (progress.round_no, progress.metrics) == (3, {"loss": 0.25})
    assert run.result().outcomes[0].metrics == {"loss": 0.25}


def test_follow_ends_with_the_replica(jobs, store):
    run = atoll.launch("jobs:fail_until", store=store, args={"attempt": 1}, max_restarts=1)
    seen = list(run.logs(0, follow=True))
    assert "this is attempt 1" in seen
    assert run.status().is_terminal


def test_a_wait_past_its_deadline_leaves_or_cancels(jobs, store):
    run = atoll.launch("jobs:hang", store=store, grace_s=1)
    with pytest.raises(WaitTimeout):
        run.wait(0.2)
    assert not run.status().is_terminal
    with pytest.raises(WaitTimeout):
        run.wait(0.2, on_deadline="cancel")
    assert run.status().state is ReplicaState.CANCELLED


def test_fail_fast_stops_the_others(jobs, store):
    (jobs / "mixed.py").write_text(
        "import time\ndef go(ctx):\n    if ctx.rank == 1: raise ValueError('x')\n    time.sleep(600)\n"
    )
    run = atoll.launch("mixed:go", replicas=3, store=store, grace_s=1)
    status = run.wait(LIMIT_S, fail_fast=True)
    assert [r.state for r in status.replicas] == [ReplicaState.CANCELLED, ReplicaState.FAILED, ReplicaState.CANCELLED]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Trainer", "`Trainer`"),
        ("coroutine", "`coroutine`"),
        ("RATE", "`RATE`"),
        ("quick", "`partial(ctx, *, lr=2)`"),
    ],
)
def test_a_replica_refuses_what_could_not_be_seen_before(jobs, store, name, words):
    (jobs / "elsewhere.py").write_text(
        "from functools import partial\nRATE = 0.1\nclass Trainer:\n    pass\nasync def coroutine(ctx):\n    pass\n"
        "def train(ctx, lr):\n    return lr\nquick = partial(train, lr=2)\n"
    )
    (jobs / "given.py").write_text("from elsewhere import *\n")
    args = {"rate": 1} if name == "quick" else {}
    run = atoll.launch(f"given:{name}", store=store, args=args)
    (replica,) = run.wait(LIMIT_S).replicas
    assert (replica.state, replica.exit_code) == (ReplicaState.FAILED, 2)
    assert words in replica.message


def test_objects_that_can_be_called_are_functions_by_name(jobs, store):
    (jobs / "given.py").write_text(
        "from functools import partial\ndef train(ctx, lr):\n    return lr\nquick = partial(train, lr=2)\n"
        "class Trainer:\n    def __call__(self, ctx):\n        return ctx.rank\ntrainer = Trainer()\n"
    )
    for name, value in (("quick", 2), ("trainer", 0)):
        run = atoll.launch(f"given:{name}", store=store)
        run.wait(LIMIT_S)
        assert run.result().raise_for_failures().values == [value]


def test_a_compiled_function_that_does_not_say_what_it_takes_is_called_with_the_arguments(jobs, store):
    (jobs / "given.py").write_text("compiled = max\n")
    run = atoll.launch("given:compiled", store=store, args={"default": 1})
    assert "max expected at least 1 argument" in run.wait(LIMIT_S).replicas[0].message
    (jobs / "given_too.py").write_text("compiled = dir\n")
    run = atoll.launch("given_too:compiled", store=store)
    run.wait(LIMIT_S)
    assert isinstance(run.result().raise_for_failures().values[0], list)


def test_a_store_may_be_a_path_object(jobs, tmp_path):
    run = atoll.launch("jobs:echo", store=tmp_path / "my runs")
    run.wait(LIMIT_S)
    again = atoll.attach(run.id, store=tmp_path / "my runs")
    assert again.result().raise_for_failures().values == run.result().values
    assert again.store.uri == (tmp_path / "my runs").as_uri()


def test_the_same_id_and_content_is_the_same_run(jobs, store, tmp_path):
    (tmp_path / "starts").mkdir()
    args = {"folder": str(tmp_path / "starts")}
    runs = [atoll.launch("jobs:count_start", replicas=2, store=store, args=args, run_id="twice") for _ in range(3)]
    runs[0].wait(LIMIT_S)
    assert len({str(run.handle) for run in runs}) == 1
    assert len(list((tmp_path / "starts").iterdir())) == 2


def test_the_same_id_with_other_content_is_a_conflict_that_shows_the_difference(jobs, store):
    atoll.launch("jobs:echo", store=store, args={"lr": 1}, run_id="mine").wait(LIMIT_S)
    with pytest.raises(Conflict) as caught:
        atoll.launch("jobs:echo", store=store, args={"lr": 2}, run_id="mine", max_restarts=1)
    restarts, rate = sorted(caught.value.differences)
    assert re.match("placement.max_restarts: .*`0`.*`1`", restarts)
    assert re.match("task.args.lr: .*`1`.*`2`", rate)


def test_sixteen_launchers_of_one_id_start_exactly_one_set_of_replicas(jobs, store, tmp_path):
    (tmp_path / "starts").mkdir()
    code = (
        "import atoll, sys; print(atoll.launch('jobs:count_start', replicas=3, store=sys.argv[1], run_id='race',"
        " args={'folder': sys.argv[2]}).handle)"
    )
    command = [sys.executable, "-c", code, store, str(tmp_path / "starts")]
    launchers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(16)]
    handles = {launcher.communicate()[0].strip() for launcher in launchers}
    assert len(handles) == 1
    atoll.attach("race").wait(LIMIT_S)
    assert sorted(p.name.partition(".")[0] for p in (tmp_path / "starts").iterdir()) == ["0", "1", "2"]


def test_secrets_reach_the_replica_and_nothing_else(jobs, store, monkeypatch, own_home):
    monkeypatch.setenv("SOURCE_OF_IT", "canary-4711")
    run = atoll.launch(
        "jobs:environment", store=store, args={"names": ["MY_TOKEN"]}, secrets={"MY_TOKEN": "env:SOURCE_OF_IT"}
    )
    run.wait(LIMIT_S)
    assert run.result().values == [{"MY_TOKEN": "canary-4711"}]
    kept = [p for p in own_home.rglob("*") if p.is_file() and b"canary-4711" in p.read_bytes()]
    assert [p.name for p in kept] == ["result.json"]  # what the entry point itself returned
    assert "canary" not in json.dumps(run.plan().to_json()) + str(run.handle)


def test_a_missing_secret_is_refused_before_anything_starts(jobs, store, own_home):
    with pytest.raises(InvalidSpec, match="`NOT_THERE`"):
        atoll.launch("jobs:echo", store=store, secrets={"X": "env:NOT_THERE"})
    assert not list(own_home.glob("local/*"))
    assert list(atoll.open_store(store).list("")) == []


def test_a_refusal_lists_every_reason(jobs, store):
    with pytest.raises(Unsupported) as caught:
        atoll.prepare("jobs:echo", store=store, image="x", cpus=2, gpu="H100:8", secrets={"A": "vault:b"})
    assert sorted(caught.value.fields) == ["cpus", "gpu", "image", "secrets.A"]


def test_wrong_names_and_arguments_are_found_before_anything_starts(jobs, store):
    with pytest.raises(InvalidSpec, match=r"`ecko`.*`echo`\?"):
        atoll.prepare("jobs:ecko", store=store)
    with pytest.raises(InvalidSpec, match=r"`cod`.*`code`\?"):
        atoll.prepare("jobs:exit_with", store=store, args={"cod": 1})
    with pytest.raises(InvalidSpec, match="`folder`"):
        atoll.prepare("jobs:count_start", store=store)
    with pytest.raises(InvalidSpec, match="`nowhere`"):
        atoll.prepare("nowhere:fn", store=store)


def test_a_script_runs_with_its_words_and_its_context(jobs, store):
    (jobs / "script.py").write_text(
        "import sys, atoll\nif __name__ == '__main__':\n    print(sys.argv[1:], atoll.current().rank)\n"
    )
    run = atoll.launch("script.py", replicas=2, store=store, argv=["--lr", "0.1"])
    run.wait(LIMIT_S)
    run.result().raise_for_failures()
    assert list(run.logs(1)) == ["['--lr', '0.1'] 1"]


def test_gpus_are_pinned_one_set_for_each_replica(jobs, store, tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    rows = "".join(f"GPU-{i}, NVIDIA H100 80GB HBM3\\n" for i in range(4))
    tool.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    run = atoll.launch(
        "jobs:environment", replicas=2, store=store, gpu="H100:2", args={"names": ["CUDA_VISIBLE_DEVICES"]}
    )
    run.wait(LIMIT_S)
    assert [v["CUDA_VISIBLE_DEVICES"] for v in run.result().values] == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    with pytest.raises(Unsupported, match=r"gpu=`H100:2`.*\b6\b.*\b4\b"):
        atoll.prepare("jobs:echo", replicas=3, store=store, gpu="H100:2")


def test_strays_of_a_dead_run_are_found_by_label_and_stopped(jobs, store, own_home, monkeypatch):
    from atoll.context import LABEL
    from atoll.executors.local.executor import LocalExecutor

    label = own_home / "local" / "dead-run"
    label.mkdir(parents=True)
    stray = subprocess.Popen(["sleep", "600"], env={**os.environ, LABEL: str(label)})
    living = atoll.launch("jobs:hang", store=store, grace_s=1)
    until_hanging(living)
    executor = LocalExecutor()
    (found,) = (each for each in executor.strays() if each.context is None)
    assert found.native_id == str(stray.pid)
    executor.cancel(found.handle)
    assert stray.wait(LIMIT_S) == -signal.SIGKILL
    assert [each.context.run_id for each in executor.strays()] == [living.id]
    assert not living.status().is_terminal
    living.cancel()


def test_a_bundle_travels_through_the_store(jobs, store, tmp_path, monkeypatch):
    workspace = tmp_path / "elsewhere"
    workspace.mkdir()
    (workspace / "helper.py").write_text("WORD = 'from the bundle'\n")
    (workspace / "main.py").write_text("import helper\ndef go(ctx):\n    return helper.WORD\n")
    run = atoll.launch("main:go", replicas=2, store=store, workspace=str(workspace))
    (workspace / "helper.py").unlink()
    run.wait(LIMIT_S)
    assert run.result().raise_for_failures().values == ["from the bundle"] * 2


def test_an_entry_point_that_cannot_be_in_a_bundle_is_refused_before_it_is_sent(jobs, store, tmp_path):
    workspace = tmp_path / "elsewhere"
    workspace.mkdir()
    (workspace / "main.py").write_text("class Trainer:\n    pass\n")
    with pytest.raises(InvalidSpec, match="`Trainer`"):
        atoll.launch("main:Trainer", store=store, workspace=str(workspace))
    assert not (tmp_path / "store").exists()


def test_the_command_line_of_an_image_can_start_a_replica(jobs, store):
    command = [sys.executable, "-m", "atoll.replica", "--rendezvous", store, "--world-size", "2", "--run-id", "img"]
    command += ["--trainer-module", "jobs", "--trainer-fn", "echo", "--trainer-kwargs-json", '{"lr": 0.5}']
    done = [
        subprocess.run(command, env={**os.environ, "REPLICA_RANK": str(r)}, capture_output=True, text=True, check=True)
        for r in range(2)
    ]
    assert done[1].stdout == "rank 1 of 2\n"
    from atoll.runs.stored import StoredRun

    outcomes = StoredRun(atoll.open_store(store), "img").outcomes()
    assert {r: o.result["args"] for r, o in outcomes.items()} == {0: {"lr": 0.5}, 1: {"lr": 0.5}}


def test_a_container_started_again_by_its_service_is_the_next_attempt(jobs, store):
    command = [sys.executable, "-m", "atoll.replica", "--rendezvous", store, "--world-size", "1", "--run-id", "again"]
    command += ["--trainer-module", "jobs", "--trainer-fn", "fail_until", "--trainer-kwargs-json", '{"attempt": 2}']
    codes = [
        subprocess.run(command, env={**os.environ, "REPLICA_RANK": "0"}, capture_output=True, check=False).returncode
        for _ in range(3)
    ]
    assert codes == [1, 1, 0]
    from atoll.runs.stored import StoredRun

    stored = StoredRun(atoll.open_store(store), "again")
    assert stored.log.attempts(0) == [0, 1, 2]
    assert stored.outcomes()[0].result == 2


def test_a_container_that_cannot_reach_its_store_says_so(jobs, tmp_path):
    (tmp_path / "file").write_text("in the way")
    command = [sys.executable, "-m", "atoll.replica", "--rendezvous", str(tmp_path / "file"), "--world-size", "1"]
    command += ["--trainer-module", "jobs", "--trainer-fn", "echo"]
    done = subprocess.run(command, env={**os.environ, "REPLICA_RANK": "0"}, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith("error: ")


def test_a_container_told_to_stop_says_that_it_was_preempted(jobs, store):
    command = [sys.executable, "-m", "atoll.replica", "--rendezvous", store, "--world-size", "1", "--run-id", "pre"]
    command += ["--trainer-module", "jobs", "--trainer-fn", "hang"]
    process = subprocess.Popen(command, env={**os.environ, "REPLICA_RANK": "0"}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "hanging\n"
    process.terminate()
    assert process.wait(LIMIT_S) == 143
    process.stdout.close()
    from atoll.runs.stored import StoredRun

    outcome = StoredRun(atoll.open_store(store), "pre").outcomes()[0]
    assert (outcome.state, outcome.reason) == (ReplicaState.FAILED, Reason.PREEMPTED)


@pytest.mark.parametrize(
    ("function", "kwargs", "limit", "code"),
    [("hang", "{}", "0.5", 124), ("exit_with", '{"code": 0}', "60", 1), ("exit_with", '{"code": 5}', "60", 5)],
)
def test_the_exit_code_of_a_container_says_whether_its_replica_succeeded(jobs, store, function, kwargs, limit, code):
    command = [sys.executable, "-m", "atoll.replica", "--rendezvous", store, "--world-size", "1", "--run-id", "code"]
    command += ["--trainer-module", "jobs", "--trainer-fn", function, "--trainer-kwargs-json", kwargs]
    variables = {**os.environ, "REPLICA_RANK": "0", "ATOLL_TIMEOUT_S": limit}
    assert subprocess.run(command, env=variables, capture_output=True, check=False).returncode == code


def test_a_function_of_the_calling_script_can_be_launched(tmp_path, store):
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys, atoll\n"
        "def work(ctx):\n    return ctx.rank * 10\n"
        "if __name__ == '__main__':\n"
        "    run = atoll.launch(work, replicas=2, store=sys.argv[1]); run.wait(60)\n"
        "    print(run.result().raise_for_failures().values)\n"
    )
    done = subprocess.run([sys.executable, str(script), store], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "[0, 10]\n"


def test_the_local_index_is_only_a_cache(jobs, store, own_home):
    run = atoll.launch("jobs:echo", store=store, run_id="cached")
    run.wait(LIMIT_S)
    subprocess.run(["rm", "-rf", str(own_home / "index")], check=True)
    again = atoll.attach("cached", store=store)
    assert again.result().raise_for_failures().values == run.result().values
    assert atoll.attach(str(run.handle)).id == "cached"
    subprocess.run(["rm", "-rf", str(spool_of(run).root)], check=True)
    assert atoll.attach(str(run.handle), store=store).id == "cached"
    with pytest.raises(RunNotFound):
        atoll.attach(str(run.handle))


def test_paths_with_hostile_names_work(tmp_path, monkeypatch):
    folder = tmp_path / 'it\'s "a" $HOME;\n`x` é'
    folder.mkdir()
    (folder / "jobs.py").write_text(TESTS.joinpath("jobs.py").read_text())
    monkeypatch.chdir(folder)
    run = atoll.launch("jobs:echo", store=str(folder / "st ore"), run_id="Ünï 'code' \"run\"; $(x)")
    run.wait(LIMIT_S)
    assert run.result().raise_for_failures().values[0]["rank"] == 0


def test_a_run_cancelled_before_it_started_never_starts(jobs, store, tmp_path):
    from atoll import journal

    draft = atoll.prepare("jobs:echo", store=store, run_id="never")
    journal.record_run(draft.store, draft.spec, executor="local")  # the launcher dies here
    run = atoll.attach("never", store=store)
    assert run.status().state is ReplicaState.PENDING
    run.cancel()
    assert run.status().state is ReplicaState.CANCELLED
    with pytest.raises(Conflict) as caught:
        draft.submit()
    assert caught.value.reason == "cancelled"
    assert not processes.of_label(draft.plan.request["label"])


def test_cancel_stops_what_a_launcher_started_before_it_died(jobs, store):
    from atoll import journal

    draft = atoll.prepare("jobs:hang", replicas=2, store=store, run_id="half", grace_s=1)
    journal.record_run(draft.store, draft.spec, executor="local")
    journal.record_intent(draft.store, "half", draft.plan.request, draft.executor.handle(draft.plan))
    draft.executor.submit(draft.plan)  # and the launcher dies before it can record the handle
    assert processes.of_label(draft.plan.request["label"])
    run = atoll.attach("half", store=store)
    run.cancel()
    assert not processes.of_label(draft.plan.request["label"])
    assert run.status().state is ReplicaState.CANCELLED


def test_a_launch_begun_elsewhere_is_neither_doubled_nor_called_stopped(jobs, store, tmp_path, monkeypatch):
    from atoll import journal

    draft = atoll.prepare("jobs:hang", replicas=2, store=store, run_id="elsewhere", grace_s=1)
    journal.record_run(draft.store, draft.spec, executor="local")
    journal.record_intent(draft.store, "elsewhere", draft.plan.request, draft.executor.handle(draft.plan))
    draft.executor.submit(draft.plan)  # and the launcher dies before it can record the handle
    with monkeypatch.context() as other:
        other.setenv("ATOLL_HOME", str(tmp_path / "another home"))
        with pytest.raises(Conflict) as caught:
            atoll.launch("jobs:hang", replicas=2, store=store, run_id="elsewhere", grace_s=1)
        assert [line.partition(":")[0] for line in caught.value.differences] == ["launch"]
        assert not (tmp_path / "another home" / "local").exists()
        atoll.attach("elsewhere", store=store).cancel()  # the intent has the handle, which names the other home
    assert not processes.of_label(draft.plan.request["label"])


def test_opening_the_output_anew_does_not_wipe_the_log(jobs, store):
    (jobs / "reopen.py").write_text(
        "import subprocess\n"
        "def go(ctx):\n"
        "    print('before', flush=True)\n"
        "    subprocess.run(['sh', '-c', 'echo anew > /dev/stderr; echo again > /dev/stdout'])\n"
        "    print('after')\n"
    )
    run = atoll.launch("reopen:go", store=store)
    run.wait(LIMIT_S)
    assert list(run.logs(0)) == ["before", "anew", "again", "after"]


def test_a_replica_that_closes_its_outputs_lives_on(jobs, store):
    (jobs / "closing.py").write_text(
        "import os\ndef go(ctx):\n    print('last words', flush=True)\n    os.close(1); os.close(2)\n    return 7\n"
    )
    run = atoll.launch("closing:go", store=store)
    run.wait(LIMIT_S)
    assert run.result().raise_for_failures().values == [7]
    assert list(run.logs(0)) == ["last words"]


def test_a_child_without_label_and_session_does_not_outlive_the_run(jobs, store):
    (jobs / "escape.py").write_text(
        "import subprocess\n"
        "def go(ctx):\n"
        "    return subprocess.Popen(['/bin/sleep', '600'], env={}, start_new_session=True).pid\n"
    )
    run = atoll.launch("escape:go", store=store)
    run.wait(LIMIT_S)
    assert processes.is_dead(run.result().values[0])


@pytest.mark.parametrize(
    "entry", ["'itself.py'", "work", "'itself.py:work'", "'itself:work'", "os.path.abspath('itself.py')"]
)
def test_a_script_that_launches_itself_is_stopped_at_the_first_turn(jobs, store, entry):
    """`atoll run train.py` for a script that is meant to be started with `python train.py`."""
    (jobs / "itself.py").write_text(
        "import os, atoll\n\ndef work():\n    return 1\n\n"
        f"if __name__ == '__main__':\n    atoll.launch({entry}, store={store!r})\n"
    )
    run = atoll.launch("itself.py", store=store)
    run.wait(LIMIT_S)
    (outcome,) = run.result().outcomes
    assert (outcome.state, outcome.exit_code) == (ReplicaState.FAILED, 2)
    assert outcome.error is not None
    assert outcome.error.type == "atoll.errors.ConfigError"
    assert "`python itself.py`" in outcome.error.traceback
    assert [*journal.run_ids(run.store)] == [run.id]


def test_a_script_may_launch_other_code(jobs, store):
    (jobs / "other.py").write_text(
        f"import atoll\nrun = atoll.launch('jobs:echo', run_id='inner', store={store!r})\nrun.wait({LIMIT_S})\n"
        "run.result().raise_for_failures()\n"
    )
    run = atoll.launch("other.py", store=store, run_id="outer")
    assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
    assert sorted(journal.run_ids(run.store)) == ["inner", "outer"]


def test_threads_and_forked_workers_may_all_report_progress(jobs, store):
    (jobs / "many.py").write_text(
        "import os, threading\n"
        "def go(ctx):\n"
        "    def speak():\n"
        "        for i in range(200): ctx.log(loss=float(i))\n"
        "    child = os.fork()\n"
        "    threads = [threading.Thread(target=speak) for _ in range(4)]\n"
        "    [t.start() for t in threads]; [t.join() for t in threads]\n"
        "    if child == 0: os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    return 'fine'\n"
    )
    run = atoll.launch("many:go", store=store)
    run.wait(LIMIT_S)
    assert run.result().raise_for_failures().values == ["fine"]


def test_a_full_disk_does_not_hide_how_a_run_ended(jobs, store, tmp_path):
    room = tmp_path / "small"
    room.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(room)], check=False).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        run = atoll.launch("jobs:shout", store=store, args={"megabytes": 6}, settings={"root": str(room)})
        assert run.wait(LIMIT_S).state is ReplicaState.SUCCEEDED
        assert run.result().ok
    finally:
        subprocess.run(["umount", "-l", str(room)], check=True)


FORK_FAILS = """
import errno, os, sys
fork, calls = os.fork, iter(range(100))
def failing():
    if next(calls) == 3:
        raise OSError(errno.EAGAIN, "no more processes")
    return fork()
os.fork = failing
from atoll.replica.__main__ import main
main(sys.argv[1:])
"""


def test_if_not_all_replicas_can_be_started_none_is(jobs, store):
    draft = atoll.prepare("jobs:hang", replicas=4, store=store)
    request = draft.plan.request
    broken = {**request, "command": [sys.executable, "-c", FORK_FAILS, "--spool", request["label"]]}
    with pytest.raises(SubmitError, match="no more processes") as caught:
        draft.executor.submit(dataclasses.replace(draft.plan, request=broken))
    assert caught.value.left_running == ()
    assert not processes.of_label(request["label"])
    assert not Spool(request["label"]).status.exists()
