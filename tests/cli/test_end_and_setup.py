"""`cancel`, `sweep`, `doctor`, `config`, `completion` and `backends`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_terminal import terminal

import atoll
from atoll.registry import open_store
from atoll.replica import processes


@pytest.fixture
def stray(cli) -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries the label of a run whose supervisor is gone."""
    label = str(cli.home / "local" / "old-run-0123456789ab")
    os.makedirs(label)
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, "ATOLL_LABEL": label})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_cancel_returns_when_nothing_runs_and_twice_is_quiet(cli):
    run = cli.detached("job:until", "-n", 2, "--arg", f"gate={cli.folder / 'gate'}")
    done = cli("cancel", run)
    assert done.code == 0
    assert f"`{run}`" in done.stderr
    assert "2 cancelled" in done.stderr
    assert not [label for _, label in processes.labelled() if label.startswith(str(cli.home))]
    again = cli("cancel", run, "--json")
    assert again.code == 0
    over = {"was": "cancelled", "state": "cancelled", "was_over": True, "recorded": True}
    assert again.data["runs"] == [{"run_id": run, **over}]


def labels(cli) -> list[str]:
    """The labels of the running processes of this test's runs."""
    return [label for _, label in processes.labelled() if label.startswith(str(cli.home))]


@pytest.mark.parametrize("by_handle", [False, True])
def test_cancel_stops_a_run_whose_store_was_deleted_and_says_what_that_means(cli, by_handle):
    run = cli.detached("job:until", "-n", 2, "--arg", f"gate={cli.folder / 'gate'}")
    found = cli("status", run, "--json").data
    shutil.rmtree(open_store(found["store"]).root)
    done = cli("cancel", found["handle"] if by_handle else run, "--json")
    assert done.code == 0
    (row,) = done.data["runs"]
    assert (row["state"], row["recorded"]) == ("cancelled", False)
    assert row["warning"]
    assert labels(cli) == []


@pytest.mark.parametrize("text", ["x = [\n", "[executors.local]\nroot = 7\n"])
def test_cancel_stops_a_run_though_the_configuration_is_wrong(cli, text):
    run = cli.detached("job:until", "-n", 2, "--arg", f"gate={cli.folder / 'gate'}")
    (cli.folder / "atoll.toml").write_text(text)
    done = cli("cancel", run)
    assert (done.code, labels(cli)) == (0, [])


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("run.json", ""),
        ("run.json", "{}"),
        ("run.json", '{"spec": 7, "executor": "local"}'),
        ("launch/handle.json", "[]"),
        ("launch/handle.json", '{"handle": "what"}'),
    ],
)
def test_cancel_stops_a_run_whose_record_is_damaged(cli, record, text):
    run = cli.detached("job:until", "-n", 2, "--arg", f"gate={cli.folder / 'gate'}")
    root = open_store(cli("status", run, "--json").data["store"]).root
    (root / "runs" / run / record).write_text(text)
    assert cli("sweep", "--dry-run", "--json").code == 0
    done = cli("cancel", run, "--json")
    assert done.code == 0
    assert labels(cli) == []


def test_sweep_stops_replicas_of_an_unknown_run_only_on_request(cli):
    run = cli.detached("job:until", "-n", 2, "--arg", f"gate={cli.folder / 'gate'}")
    shutil.rmtree(open_store(cli("status", run, "--json").data["store"]).root)
    listed = cli("sweep", "--yes", "--json").data
    assert [row["state"] for row in listed["strays"]] == ["unknown"]
    assert listed["stopped"] == []
    assert labels(cli) != []
    stopped = cli("sweep", "--yes", "--include-unknown", "--json").data
    assert stopped["stopped"] == [row["handle"] for row in listed["strays"]]
    assert labels(cli) == []


def test_cancel_of_several_stops_all_it_can_and_says_what_it_could_not(cli):
    run = cli.detached("job:until", "--arg", f"gate={cli.folder / 'gate'}")
    done = cli("cancel", "nope", run, "--json")
    assert done.code == 3
    assert [found.get("state", found.get("error")) for found in done.data["runs"]] == ["RunNotFound", "cancelled"]


def test_cancel_of_ranks_stops_these_and_says_what_the_others_do(cli):
    run = cli.detached("job:until", "-n", 4, "--arg", f"gate={cli.folder / 'gate'}")
    done = cli("cancel", run, "--rank", "1-2")
    assert done.code == 0
    assert "ranks 1-2 are stopped" in done.stderr
    assert "ranks 0,3 go on" in done.stderr
    states = [replica["state"] for replica in cli("status", run, "--json").data["replicas"]]
    assert states == ["running", "cancelled", "cancelled", "running"]
    again = cli("cancel", run, "--rank", "2", "--json")
    assert again.code == 0
    over = {"was": "running", "state": "running", "was_over": True, "recorded": True}
    assert again.data["runs"] == [{"run_id": run, "ranks": [2], **over}]
    (cli.folder / "gate").touch()
    assert cli("wait", run).code == 1, "not every replica succeeded"
    assert labels(cli) == []


def test_cancel_of_ranks_needs_no_store(cli):
    run = cli.detached("job:until", "-n", 2, "--arg", f"gate={cli.folder / 'gate'}")
    shutil.rmtree(open_store(cli("status", run, "--json").data["store"]).root)
    (row,) = cli("cancel", run, "--rank", "1", "--json").data["runs"]
    assert (row["ranks"], row["state"], row["recorded"]) == ([1], "running", False)
    cli("cancel", run)
    assert labels(cli) == []


def test_cancel_refuses_ranks_that_are_not_there_and_ranks_of_several_runs(cli):
    run = cli.detached("job:until", "-n", 2, "--arg", f"gate={cli.folder / 'gate'}")
    for given in ("2", "x"):
        done = cli("cancel", run, "--rank", given, "--json")
        assert (done.code, done.error["code"]) == (2, "ConfigError")
    several = cli("cancel", run, "nope", "--rank", "0", "--json")
    assert (several.code, several.error["code"]) == (2, "UsageError")
    assert cli("status", run, "--json").data["state"] == "running"
    cli("cancel", run)


def test_sweep_shows_then_stops_what_a_dead_run_left(cli, inside, stray):
    shown = cli("sweep", "--dry-run")
    assert shown.code == 0
    assert str(stray.pid) in shown.stdout
    unasked = inside("sweep")
    assert unasked.code == 2
    assert "--yes" in unasked.stderr
    assert stray.poll() is None
    done = cli("sweep", "--on", "local", "--yes", "--json")
    assert done.code == 0
    assert [found["id"] for found in done.data["strays"]] == [str(stray.pid)]
    assert len(done.data["stopped"]) == 1
    assert stray.wait(10) == -9
    assert inside("sweep", "--json").data["strays"] == []


def test_sweep_asks_on_a_terminal_and_no_means_no(cli, stray):
    with terminal(cli, "sweep") as screen:
        screen.until("stop it?")
        screen.press("n\n")
        assert screen.end() == 0
    assert stray.poll() is None


def test_sweep_leaves_living_runs_alone(cli):
    gate = cli.folder / "gate"
    run = cli.detached("job:until", "--arg", f"gate={gate}")
    assert cli("sweep", "--yes", "--json").data["strays"] == []
    gate.touch()
    assert cli("wait", run).code == 0


def test_doctor_checks_machine_backend_and_store(cli):
    done = cli("doctor")
    assert done.code == 0, done.stdout
    for check in (
        "machine python",
        "machine packages",
        "machine codecs",
        "machine home",
        "machine config",
        "backend spools",
        "store probe",
    ):
        assert any(line.startswith(check) and " ok " in line for line in done.stdout.splitlines()), check
    assert list((cli.home / "store").rglob("*probe/*")) == []


def test_doctor_says_who_computes(inside, monkeypatch):
    monkeypatch.setenv("ATOLL_PURE", "1")
    [codecs] = [c for c in inside("doctor", "--json").data["checks"] if c["name"] == "codecs"]
    assert codecs["ok"]
    assert "ATOLL_PURE" in codecs["message"]
    assert codecs["hint"] == ""


def test_doctor_says_in_plain_words_that_there_was_no_compiler(cli):
    """An Atoll without libraries, as it is where nothing could be compiled."""
    shutil.copytree(Path(atoll.__file__).parent, cli.folder / "lib" / "atoll", ignore=shutil.ignore_patterns("*.so"))
    bare = {"PYTHONPATH": str(cli.folder / "lib"), "ATOLL_PURE": "0"}
    done = cli("doctor", "--json", env={**bare, "CC": "no-such-compiler"})
    [codecs] = [c for c in done.data["checks"] if c["name"] == "codecs"]
    assert codecs["ok"]
    assert "numpy" in codecs["message"]
    again = "`pip install --force-reinstall --no-deps atoll`"
    assert "`apt install gcc`" in codecs["hint"]
    assert codecs["hint"].endswith(again)
    shown = cli("doctor", env={**bare, "CC": sys.executable})
    assert f"{again}\n" in shown.stdout
    assert "`apt install gcc`" not in shown.stdout
    assert "shared object" not in shown.stdout, "the words of the loader"


@pytest.mark.parametrize(
    ("words", "code", "failed"),
    [
        (["--store", "job.py/below-a-file"], 4, "store probe"),
        (["--store", "redis://x"], 2, "store probe"),
        (["--store", "s3://"], 2, "store probe"),
        (["nowhere"], 2, None),
    ],
)
def test_doctor_says_what_is_wrong_and_what_to_do(inside, words, code, failed):
    done = inside("doctor", *words)
    assert done.code == code
    if failed:
        assert f"{failed}  " in done.stdout
        assert "FAILED" in done.stdout
        assert "hint: " in done.stdout
        assert failed in done.stderr


@pytest.mark.parametrize("store", ["redis://x", "s3://", "file://relative", "job.py/below-a-file"])
def test_doctor_and_run_end_alike_for_the_same_store(inside, store):
    assert inside("doctor", "--store", store).code == inside("run", "job:ok", "--store", store).code


@pytest.mark.parametrize("setting", ["roof = 1", "root = 1", 'root = ""', 'root = "job.py/below-a-file"'])
def test_doctor_and_run_end_alike_for_the_same_settings(inside, setting):
    (inside.folder / "atoll.toml").write_text(f"[executors.local]\n{setting}\n")
    assert inside("doctor").code == inside("run", "job:ok", "--run-id", "r").code == 2
    assert not (inside.home / "store" / "r").exists(), "the run id is taken"


def test_doctor_finds_a_home_that_cannot_be_written_and_a_broken_backend(inside, monkeypatch):
    monkeypatch.setenv("ATOLL_HOME", str(inside.folder / "job.py"))
    done = inside("doctor", "--store", inside.folder / "store", "--json")
    assert done.code == 2
    failed = {f"{c['kind']} {c['name']}": c["hint"] for c in done.data["checks"] if not c["ok"]}
    assert set(failed) == {"machine home", "backend spools"}
    assert all("ATOLL_HOME" in hint for hint in failed.values())


def test_doctor_reports_a_mistake_in_the_configuration(inside):
    (inside.folder / "atoll.toml").write_text("replica = 3\n")
    done = inside("doctor", "--json")
    assert done.code == 2
    assert "`replicas`?" in next(c["message"] for c in done.data["checks"] if c["name"] == "config")


def test_doctor_prints_the_permissions_of_a_launcher(inside):
    words = ("doctor", "kubernetes", "--permissions", "--setting", "namespace=team-a")
    found = inside(*words, "--json").data["permissions"]
    assert (found["kind"], found["metadata"]["namespace"]) == ("Role", "team-a")
    assert "kubectl -n team-a create rolebinding" in inside(*words).stdout
    assert inside("doctor", "local", "--permissions").code == 2


def test_doctor_is_code_3_when_only_the_backend_is_in_trouble(inside):
    (inside.folder / "atoll.toml").write_text('[executors.local]\nroot = "/proc/none"\n')
    done = inside("doctor", "--json")
    assert done.code == 3
    assert done.error["code"] == "BackendError"


def test_config_shows_every_value_and_where_it_came_from(cli):
    (cli.folder / "atoll.toml").write_text('replicas = 3\n\n[env]\nMODE = "x"\n\n[executors.local]\nroot = "/spools"\n')
    done = cli("config", env={"ATOLL_TIMEOUT": "2h"})
    assert done.code == 0
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["replicas"] == ["3", "atoll.toml:1"]
    assert rows["env.MODE"] == ["x", "atoll.toml:4"]
    assert rows["executors.local.root"] == ["/spools", "atoll.toml:7"]
    assert rows["timeout"] == ["2h", "ATOLL_TIMEOUT"]
    assert rows["on"] == ["local", "default"]
    data = cli("config", "--json").data
    assert data["file"] == "atoll.toml"
    assert data["settings"]["replicas"] == {"value": 3, "origin": "atoll.toml:1"}


def test_a_mistake_in_the_configuration_names_file_and_line(inside):
    (inside.folder / "atoll.toml").write_text("replicas = 2\nrestarts = 3\n")
    done = inside("config")
    assert done.code == 2
    assert re.search(r"atoll\.toml:2: .*`restarts`.*`max_restarts`\?", done.stderr)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(inside, shell):
    done = inside("completion", shell)
    assert done.code == 0
    assert "_ATOLL_COMPLETE" in done.stdout


def test_completion_knows_commands_and_runs(finished):
    def completed(words: str) -> list[str]:
        count = str(len(words.split(" ")) - 1)
        env = {"_ATOLL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count}
        return [line.partition(",")[2] for line in finished.cli(env=env).stdout.splitlines()]

    assert completed("atoll sta") == ["status"]
    assert completed("atoll logs went-w") == ["went-well"]


def test_backends_lists_what_is_registered(cli):
    done = cli("backends")
    assert done.code == 0
    assert any(line.split()[:2] == ["local", "ready"] for line in done.stdout.splitlines())
    assert any(line.split()[:2] == ["file", "ready"] for line in done.stdout.splitlines())
    assert cli("backends", "--json").data["adapters"][0]["kind"] == "executor"


def test_deploy_is_refused_where_nothing_has_to_be_deployed(inside):
    done = inside("deploy", "local", "--json")
    assert done.code == 2
    assert done.error["code"] == "ConfigError"


@pytest.mark.server
@pytest.mark.process
def test_deploy_tells_what_it_left(inside, modal_peer):
    modal_peer.engine.functions.clear()
    done = inside("deploy", "modal", "--json", "--setting", 'image="registry.invalid/team/train:1"')
    assert done.code == 0
    assert done.data["deployment"]["name"] == "atoll"
    assert modal_peer.engine.find("atoll", "replica") is not None
