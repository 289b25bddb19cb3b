"""Mistakes and misfortunes: one form of message, the next step, the right exit code, no traceback."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

PLUGIN = """
class Executor:
    name = "odd"
    def __init__(self):
        raise ZeroDivisionError("odd indeed")
"""


@pytest.fixture
def plugins(cli, tmp_path: Path) -> None:
    """Two third-party executors: one does not even import, the other breaks when it is built."""
    place = tmp_path / "plugins"
    info = place / "odd-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[atoll.executors]\nodd = odd_plugin:Executor\ngone = gone_plugin:Executor\n"
    )
    (place / "odd_plugin.py").write_text(PLUGIN)
    cli.env["PYTHONPATH"] = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["staus"], "`status`?", "atoll --help"),
        (["run", "job:ok", "--replcas", "2"], "`--replicas`?", "`--`"),
        (["ps", "--al"], "--al", "`atoll ps --help`"),
        (["status"], "issing argument 'RUN'", "`atoll status --help`"),
        (["run"], "", "atoll run module:function"),
        (["run", "job:tpyed"], "`typed`?", None),
        (["run", "jobb:ok"], "`job`?", None),
        (["run", "job.py"], "`job.py:ok`", None),
        (["run", "wrods.py"], "`words.py`?", None),
        (["run", "job:ok", "--arg", "stepz=1"], "`steps`?", None),
        (["run", "job:ok", "--on", "locl"], "`local`?", None),
        (["run", "job:ok", "--timeout", "soon"], "`90s`, `15m`, `2h`", None),
        (["run", "job:ok", "--arg", "steps"], "--arg NAME=VALUE", None),
        (["run", "job:ok", "--arg", "steps=1", "--arg", "steps=2"], "--arg steps", None),
        (["run", "job:ok", "--args-json", "[1]"], "--args-json: ", None),
        (["run", "job:ok", "--args-file", "none.json"], "none.json", None),
        (["run", "job:ok", "--detach", "--wait"], "--detach", None),
        (["run", "job:ok", "--setting", "colour=red"], "colour: ", None),
        (["run", "job:ok", "--profile", "big"], "`big`", None),
        (["run", "job:ok", "-n", "0", "--gpu", "H1000"], "replicas=`0`", None),
        (["logs", "x", "--tail", "many"], "many", None),
        (["completion", "csh"], "csh", None),
    ],
)
def test_a_mistake_in_the_input_is_code_2_and_starts_nothing(inside, words, message, hint):
    done = inside(*words)
    assert done.code == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert hint is None or hint in done.stderr.partition("\nhint: ")[2]
    assert not (inside.home / "store").exists()
    assert not (inside.home / "local").exists()


@pytest.mark.parametrize(
    ("words", "code"), [(["staus", "--json"], "UnknownName"), (["ps", "--al", "--json"], "UsageError")]
)
def test_a_mistake_is_told_to_programs_as_json(inside, words, code):
    done = inside(*words)
    assert done.code == 2
    assert done.error["code"] == code
    assert done.error["hint"]


@pytest.mark.parametrize("command", ["status", "logs", "wait", "cancel", "result", "top", "verify", "trace"])
def test_an_unknown_run_is_code_3_with_a_suggestion(finished, inside, command):
    done = inside.at(finished.cli)(command, "went-wel", "--json")
    assert done.code == 3
    assert done.error["code"] == "RunNotFound"
    assert "`went-well`?" in done.error["message"]
    assert (finished.cli.home / "store").as_uri() in done.error["message"], "the searched store is named"
    assert "error: " in done.stderr


def test_the_searched_stores_are_named_with_their_origins(inside, tmp_path, monkeypatch):
    """A hint leads to a store only if it has runs."""
    done = inside("status", "nope", "--json")
    assert (inside.home / "store").as_uri() in done.error["message"]
    assert "atoll ps" not in done.error["hint"]
    given = inside("status", "nope", "--store", str(tmp_path / "given"), "--json").error
    assert f"{(tmp_path / 'given').as_uri()} (--store)" in given["message"]
    monkeypatch.setenv("ATOLL_STORE", str(tmp_path / "set"))
    configured = inside("status", "nope", "--json").error
    assert f"{(tmp_path / 'set').as_uri()} (`store` of ATOLL_STORE)" in configured["message"]


def test_a_run_of_the_searched_store_is_suggested_although_the_index_lacks_it(finished, inside, monkeypatch, tmp_path):
    store = (finished.cli.home / "store").as_uri()
    done = inside("status", "went-wel", "--store", store, "--json")
    assert "`went-well`?" in done.error["message"]
    assert f"atoll status went-well --store {store}" in done.error["hint"]
    assert f"atoll ps --store {store}" in inside("status", "zzzzzz", "--store", store, "--json").error["hint"]


def test_a_run_that_is_in_another_store_is_said_to_be_there(finished, inside, tmp_path):
    done = inside.at(finished.cli)("status", finished.ok, "--store", str(tmp_path / "elsewhere"), "--json")
    assert done.code == 3
    assert "`?" not in done.error["message"], "there is nothing to guess"
    assert finished.cli("status", finished.ok, "--json").data["store"] in done.error["hint"]


def test_a_name_that_is_much_like_a_run_of_another_store_comes_with_that_store(finished, inside, tmp_path):
    at = inside.at(finished.cli)
    home = at("status", finished.ok, "--json").data["store"]
    there = at("status", "went-wel", "--json").error
    assert home in there["hint"]
    assert f"`atoll status {finished.ok}`" in there["hint"]
    other = at("status", "went-wel", "--store", str(tmp_path / "elsewhere"), "--json").error
    assert re.search(r"elsewhere .*`went-well`\?$", other["message"])
    assert home in other["hint"]
    assert "`atoll status went-well`" in other["hint"]


def test_a_run_whose_records_are_gone_is_not_said_to_be_where_it_is_not(cli, inside):
    run = cli.detached("job:ok")
    assert cli("wait", run).code == 0
    uri = inside("status", run, "--json").data["store"]
    shutil.rmtree(cli.home / "store")
    for options in ([], ["--store", uri]):
        error = inside("status", run, *options, "--json").error
        assert "`?" not in error["message"]
        assert uri in error["message"]
        assert "`atoll ps`" in error["hint"]


@pytest.mark.parametrize("command", ["status", "trace", "verify"])
def test_the_error_of_an_unknown_run_names_the_store_that_was_asked(inside, tmp_path, command):
    store = (tmp_path / "elsewhere").as_uri()
    assert store in inside(command, "nobody", "--store", store, "--json").error["message"]


def test_a_store_that_cannot_be_written_is_code_4_and_starts_nothing(inside):
    done = inside("run", "job:ok", "--store", "job.py/below-a-file")
    assert done.code == 4, done.stderr
    assert not (inside.home / "local").exists()


def test_a_bug_is_code_70_with_the_last_lines_and_no_traceback(cli, plugins):
    done = cli("plan", "job:ok", "--on", "odd", "--json")
    assert done.code == 70
    assert done.error["code"] == "InternalError"
    assert "ZeroDivisionError: odd indeed" in done.error["message"]
    assert "odd_plugin.py:5" in done.stderr
    assert "ATOLL_DEBUG=1" in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_whole_traceback(cli, plugins):
    done = cli("plan", "job:ok", "--on", "odd", env={"ATOLL_DEBUG": "1"})
    assert done.code == 70
    assert "Traceback (most recent call last)" in done.stderr


def test_a_broken_plug_in_is_listed_as_broken_and_breaks_nothing(cli, plugins):
    done = cli("backends", "--json")
    assert done.code == 0
    states = {adapter["name"]: adapter["state"] for adapter in done.data["adapters"]}
    assert states["local"] == "ready"
    assert states["gone"] == "broken"
    assert states["odd"] == "broken"
    assert cli("ps").code == 0
    named = cli("plan", "job:ok", "--on", "gone")
    assert named.code == 2
    assert "`gone`" in named.stderr


def test_ctrl_c_is_code_130_with_one_line(cli):
    run = cli.detached("job:until", "--arg", f"gate={cli.folder / 'gate'}")
    process = cli.start("logs", run, "-f", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"rank 0 waits\n"
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(talk.decode().strip().splitlines()) == 1
    (cli.folder / "gate").touch()
    assert cli("wait", run).code == 0


def test_a_reader_that_has_had_enough_is_no_error(cli):
    run = cli.detached("job:many", "--arg", "lines=200000")
    assert cli("wait", run).code == 0
    process = cli.start("logs", run, "--tail", "all", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"line 0\n"
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(60) == 0


def test_output_is_utf_8_whatever_the_locale(cli):
    done = cli("config", env={"LC_ALL": "C", "ATOLL_STORE": "./läuft", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"})
    assert done.code == 0
    assert "läuft" in done.stdout


def test_colours_are_only_for_terminals(finished):
    done = finished.cli("status", finished.ok)
    assert "\x1b" not in done.stdout + done.stderr
    assert os.environ.get("TERM") is None or done.code == 0
