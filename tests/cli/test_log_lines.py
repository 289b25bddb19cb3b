"""Log lines on the command line and in replicas: `-v`, `-vv`, `ATOLL_LOG`, and no secret in any of them."""

from __future__ import annotations

import re

import pytest

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING) (atoll(\.\w+)*): ", re.M)


def levels(text: str) -> set[str]:
    return {level for level, _, _ in LINE.findall(text)}


def test_without_an_option_nothing_is_logged(cli):
    done = cli("run", "job:ok", "--wait")
    assert done.code == 0
    assert not levels(done.stderr)


@pytest.mark.parametrize("words", [("-v", "run", "job:ok"), ("run", "job:ok", "-v")])
def test_v_logs_rare_events_before_and_after_the_verb(cli, words):
    done = cli(*words, "--wait")
    assert done.code == 0
    assert levels(done.stderr) == {"INFO"}


def test_vv_logs_decisions_and_leaves_the_json_alone(cli):
    done = cli("-v", "run", "job:ok", "--json", "-v")
    assert {"INFO", "DEBUG"} <= levels(done.stderr)
    assert done.envelope["ok"]


def test_the_variable_reaches_local_replicas(cli):
    (cli.folder / "logs_a_line.py").write_text(
        "import logging\ndef main():\n    logging.getLogger('atoll.training').info('from the replica')\n"
    )
    done = cli("run", "logs_a_line:main", "--detach", env={"ATOLL_LOG": "atoll.training=info"})
    assert not levels(done.stderr)
    run = done.stdout.strip()
    assert cli("wait", run).code == 0
    assert "INFO atoll.training: from the replica" in cli("logs", run).stdout
    again = cli("run", "logs_a_line:main", "--detach", "--env", "ATOLL_LOG=debug").stdout.strip()
    assert cli("wait", again).code == 0
    assert "INFO atoll.training: from the replica" in cli("logs", again).stdout


@pytest.mark.parametrize("value", ["loud", "atoll.rounds=loud", "botocore=debug", "atoll.rounds"])
def test_a_bad_value_is_an_error_of_the_command(cli, value):
    done = cli("ps", "--json", env={"ATOLL_LOG": value})
    assert done.code == 2
    assert done.error["code"] == "ConfigError"


def test_a_bad_value_is_only_a_warning_in_a_replica(cli):
    run = cli("run", "job:ok", "--detach", "--env", "ATOLL_LOG=loud").stdout.strip()
    assert cli("wait", run).code == 0
    assert levels(cli("logs", run).stdout) == {"WARNING"}


def test_no_secret_and_no_argument_is_in_a_log_line(cli):
    (cli.folder / "takes.py").write_text("def main(*, password):\n    pass\n")
    hidden = {"HIDDEN": "sesame-1", "ATOLL_LOG": "debug"}
    words = ("--secret", "TOKEN=env:HIDDEN", "--arg", "password=sesame-2", "--env", "MODE=sesame-3")
    done = cli("run", "takes:main", "-vv", "--detach", *words, env=hidden)
    run = done.stdout.strip()
    assert cli("wait", run).code == 0
    assert "DEBUG" in levels(done.stderr)
    for text in (done.stderr, cli("logs", run).stdout, cli("-vv", "status", run, env=hidden).stderr):
        assert "sesame" not in "".join(line for line in text.splitlines() if LINE.match(line))


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/x?aws_secret_access_key=sesame",
        "file:///nowhere?token=sesame",
        "s3://me:sesame@bucket/x",
        "s3://me:sesame/slash@bucket/x",
        "s3://bucket/x?endpoint=http://me:sesame@127.0.0.1:1",
    ],
)
@pytest.mark.parametrize("words", [["run", "job:ok"], ["status", "r1"], ["verify", "r1"]])
def test_credentials_in_the_address_of_a_store_are_in_no_output(cli, words, uri):
    done = cli("-vv", *words, "--store", uri)
    assert done.code != 0
    assert "sesame" not in done.stderr + done.stdout
