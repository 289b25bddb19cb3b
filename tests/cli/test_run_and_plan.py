"""`atoll run` and `atoll plan`, as processes with real replicas."""

from __future__ import annotations

import json
import os
import re

import pytest
from cli_terminal import terminal


def test_run_waits_shows_progress_on_stderr_and_results_on_stdout(cli):
    done = cli("run", "job:ok", "--replicas", 2, "--arg", "steps=3", "--arg", "note=hi there")
    assert done.code == 0, done.stderr
    assert done.stdout == 'rank 0: {"rank": 0}\nrank 1: {"rank": 1}\n'
    assert re.search(r"job:ok .*\blocal\b.*\b2\b", done.stderr)
    assert "2 succeeded" in done.stderr
    assert "\x1b" not in done.stderr


def test_run_that_fails_is_code_1_with_the_remote_traceback(cli):
    done = cli("run", "job:bad", "-n", 2)
    assert done.code == 1
    assert done.stdout == ""
    assert re.search("^error: .*`", done.stderr, re.M)
    assert "rank 1: failed, user_error" in done.stderr
    assert 'raise ValueError("no good")' in done.stderr
    assert "hint: atoll logs " in done.stderr


def test_run_as_json_is_events_and_then_one_envelope(cli):
    done = cli("run", "job:ok", "-n", 2, "--run-id", "told", "--json")
    assert done.code == 0
    assert done.stderr == ""
    first, *events, last = done.lines()
    assert (first["event"], first["data"]["run_id"]) == ("started", "told")
    assert first["data"]["handle"].startswith("local://")
    assert {line["event"] for line in events} == {"status"}
    assert events[-1]["data"]["counts"] == {"succeeded": 2}
    assert last["data"]["state"] == "succeeded"
    assert [o["result"] for o in last["data"]["result"]["outcomes"]] == [{"rank": 0}, {"rank": 1}]


def test_a_failed_run_as_json_has_the_outcomes_and_the_error(cli):
    done = cli("run", "job:bad", "-n", 2, "--json")
    assert done.code == 1
    assert done.error["code"] == "RunFailed"
    assert done.data["result"]["outcomes"][1]["error"]["type"] == "ValueError"


def test_a_loss_that_is_no_number_is_still_valid_json(cli):
    run = cli.detached("job:nan")
    assert cli("wait", run).code == 0
    done = cli("status", run, "--json")
    assert done.data["replicas"][0]["progress"]["metrics"] == {"loss": "NaN"}


def test_detach_prints_the_run_id_on_stdout_and_the_way_back_on_stderr(cli):
    gate = cli.folder / "gate"
    done = cli("run", "job:until", "--arg", f"gate={gate}", "--detach")
    assert done.code == 0
    run = done.stdout.strip()
    assert done.stdout == f"{run}\n"
    for command in ("atoll top", "atoll logs", "atoll wait", "atoll result", "atoll cancel"):
        assert f"{command} {run}" in done.stderr
    assert "local://" in done.stderr
    gate.touch()
    assert cli("wait", run).code == 0


def test_words_after_two_dashes_are_for_the_script(cli):
    run = cli.detached("words.py", "--", "--lr", "1e-3", "--json")
    assert cli("wait", run).code == 0
    assert cli("logs", run).stdout == "words ['--lr', '1e-3', '--json']\n"


def test_arguments_come_from_a_file_then_json_then_single_ones(cli):
    given = {"steps": 9, "note": "file", "value": {"é": [1, None, "line\nbreak"]}}
    done = cli(
        *("run", "job:ok", "--args-file", "-", "--args-json", '{"steps": 1, "note": "json"}', "--arg", "note=arg"),
        *("--json",),
        stdin=json.dumps(given),
    )
    assert done.code == 0
    assert done.data["result"]["outcomes"][0]["result"] == given["value"]
    assert cli("logs", done.data["run_id"]).stdout == "rank 0 step 0 arg\n"


@pytest.mark.parametrize("words", [("--arg", "note=null"), ("--args-json", '{"note": null}')])
def test_null_is_an_argument_like_any_other(cli, words):
    done = cli("run", "job:ok", "--arg", "steps=1", *words, "--json")
    assert done.code == 0
    assert cli("logs", done.data["run_id"]).stdout == "rank 0 step 0 None\n"


def test_the_same_run_id_adopts_and_other_content_is_a_conflict(cli):
    words = ("run", "job:ok", "--run-id", "mine", "--json")
    first, again, other = cli(*words), cli(*words), cli(*words, "--arg", "steps=5")
    assert (first.code, again.code, other.code) == (0, 0, 2)
    assert first.data["handle"] == again.data["handle"]
    assert other.error["code"] == "Conflict"
    assert any("steps" in line for line in other.error["differences"])


def test_the_configuration_is_used_and_flags_win(inside, monkeypatch):
    (inside.folder / "atoll.toml").write_text(
        'entry = "job:ok"\nreplicas = 3\nstore = "./runs"\n[args]\nsteps = 1\n[profiles.small]\nreplicas = 1\n'
    )
    done = inside("plan", "--json")
    assert done.data["spec"]["placement"]["replicas"] == 3
    assert done.data["spec"]["task"]["args"] == {"steps": 1}
    assert done.data["store"] == (inside.folder / "runs").as_uri()
    assert inside("plan", "--json", "--profile", "small").data["plan"]["replicas"] == 1
    monkeypatch.setenv("ATOLL_REPLICAS", "7")
    monkeypatch.setenv("ATOLL_MAX_RESTARTS", "4")
    flagged = inside("plan", "job:bad", "--json", "-n", "2")
    assert flagged.data["spec"]["task"]["args"] == {}
    assert flagged.data["spec"]["placement"]["replicas"] == 2
    assert flagged.data["spec"]["placement"]["max_restarts"] == 4


def test_what_to_do_about_a_dead_rank_is_part_of_the_task(inside, monkeypatch):
    assert "on_dead" not in inside("plan", "job:ok", "--json").data["spec"]["task"]
    (inside.folder / "atoll.toml").write_text('on_dead = "wait"\non_dead_after = "2m"\n')
    task = inside("plan", "job:ok", "--json").data["spec"]["task"]
    assert (task["on_dead"], task["on_dead_after_s"]) == ("wait", 120.0)
    monkeypatch.setenv("ATOLL_ON_DEAD_AFTER", "90")
    task = inside("plan", "job:ok", "--json", "--on-dead", "fail").data["spec"]["task"]
    assert (task.get("on_dead", "fail"), task["on_dead_after_s"]) == ("fail", 90.0)
    assert inside("plan", "job:ok", "--on-dead", "panic").code == 2
    (inside.folder / "atoll.toml").write_text('on_dead = "panic"\non_dead_after = "soon"\n')
    refused = inside("plan", "job:ok", "--json")
    assert (refused.code, refused.error["code"]) == (2, "InvalidSpec")
    assert len(refused.error["problems"]) == 2


def test_plan_prints_the_exact_request_and_writes_nothing(cli):
    before = sorted(os.listdir(cli.folder))
    words = ("plan", "job:ok", "-n", 2, "--run-id", "p", "--env", "A=b", "--secret", "T=env:VAULT", "--store", "s")
    refused = cli(*words)
    assert refused.code == 2
    assert "`VAULT`" in refused.stderr
    done = cli(*words, env={"VAULT": "canary"})
    assert done.code == 0, done.stderr
    request = json.loads(done.stdout)
    assert request["environment"]["A"] == "b"
    assert request["secrets"] == {"T": "env:VAULT"}
    assert cli(*words, "--json", env={"VAULT": "canary"}).data["plan"]["request"] == request
    assert "canary" not in done.stdout + done.stderr
    assert sorted(os.listdir(cli.folder)) == before


def test_plan_shows_what_replicas_are_given_and_secrets_by_reference(inside, monkeypatch):
    monkeypatch.setenv("VAULT", "canary")
    words = ("plan", "job:ok", "--arg", "steps=3", "--arg", "note=a b", "--arg", f"value={'x' * 200}")
    done = inside(*words, "--secret", "T=env:VAULT")
    assert done.code == 0, done.stderr
    assert f'\n  arguments steps=3, note="a b", value="{"x" * 98}…\n' in done.stderr
    assert re.search("^  secrets T .*env:VAULT$", done.stderr, re.M)
    assert "canary" not in done.stdout + done.stderr
    assert inside(*words, "--json").data["spec"]["task"]["args"] == {"steps": 3, "note": "a b", "value": "x" * 200}
    assert "arguments" not in inside("plan", "job:ok").stderr
    assert "\n  script arguments --lr 'a b'\n" in inside("plan", "words.py", "--", "--lr", "a b").stderr


def test_plan_lists_every_reason_for_a_refusal(inside):
    done = inside("plan", "job:ok", "--image", "x", "--cpus", 2, "--secret", "T=vault:x", "--json")
    assert done.code == 2
    assert done.error["code"] == "Unsupported"
    assert [p.partition("=")[0] for p in done.error["problems"]] == ["image", "cpus", "secrets.T"]


def test_plan_tells_all_that_is_wrong_in_one_go(inside):
    words = ("--on", "loca", "--store", "redis://x", "--arg", "no=1", "-n", "0", "--run-id", "r")
    done = inside("plan", "job:ok", *words, "--json")
    assert (done.code, done.error["code"]) == (2, "InvalidSpec")
    executor, store, replicas, entry = done.error["problems"]
    assert re.search(r"`loca`.*`local`\?", executor)
    assert "`redis`" in store
    assert replicas.startswith("replicas=`0`: ")
    assert entry.startswith("entry=`job:ok`: "), "of the executor that is probably meant"
    assert "`r`" in done.error["message"].splitlines()[0]
    assert done.error["hint"]
    done = inside("plan", "job:ok", "--store", "redis://x", "--arg", "no=1", "--cpus", "2", "--json")
    store, entry, cpus = done.error["problems"]
    assert ("`redis`" in store, entry.split()[0], cpus.split()[0]) == (True, "entry=`job:ok`:", "cpus=2:")
    done = inside("plan", "job:ok", "-n", "0", "--arg", "no=1", "--json")
    assert [problem.split()[0] for problem in done.error["problems"]] == ["replicas=`0`:", "entry=`job:ok`:"]


def test_plan_tells_all_that_is_wrong_with_the_words_and_the_configuration(inside):
    (inside.folder / "atoll.toml").write_text("replica = 3\n")
    done = inside("plan", "job:ok", "--arg", "steps", "--env", "=x", "--json")
    assert [problem.split()[0] for problem in done.error["problems"]] == ["--arg", "--env", "atoll.toml:1:"]
    assert done.code == 2


def test_run_shows_what_the_bundle_holds(cli):
    (cli.folder / ".gitignore").write_text("home/\n")
    (cli.folder / ".git").rmdir()
    done = cli("run", "job:ok", "--workspace", ".", "--arg", "steps=1")
    assert done.code == 0, done.stderr
    assert "bundle " in done.stderr
    assert "job.py" in done.stderr


def test_ctrl_c_detaches_and_the_run_goes_on(cli):
    gate = cli.folder / "gate"
    with terminal(cli, "run", "job:until", "-n", 2, "--arg", f"gate={gate}", "--run-id", "kept") as screen:
        for word in ("rank 1 waits", "state", "running", "loss", "0.5", "Ctrl-C"):
            assert word in screen.until(word)
        screen.interrupt()
        assert screen.end() == 130
        assert "`kept`" in screen.plain
        assert "atoll logs kept -f" in screen.plain
        assert "Traceback" not in screen.plain
    assert cli("status", "kept", "--json").data["state"] == "running"
    gate.touch()
    assert cli("wait", "kept").code == 0
    assert cli("status", "kept", "--json").data["state"] == "succeeded"


def test_the_live_table_ends_with_the_final_one_in_colour(cli):
    with terminal(cli, "run", "job:ok", "-n", 2) as screen:
        assert screen.end() == 0
        assert "succeeded" in screen.plain
        assert 'rank 1: {"rank": 1}' in screen.plain
        assert "\x1b[32msucceeded\x1b[0m" in screen.drawn


def test_no_color_is_honoured_on_a_terminal(cli):
    cli.env["NO_COLOR"] = "1"
    with terminal(cli, "run", "job:bad", "-n", 2) as screen:
        assert screen.end() == 1
        assert "no good" in screen.plain
        assert "\x1b[31m" not in screen.drawn


@pytest.mark.parametrize("flag", ["--wait", "--json"])
def test_a_terminal_can_do_without_the_live_table(cli, flag):
    with terminal(cli, "run", "job:ok", flag) as screen:
        assert screen.end() == 0
        assert "Ctrl-C" not in screen.plain
        assert "\x1b[?25l" not in screen.drawn  # the cursor was never hidden


def test_a_run_for_machines_says_what_it_waits_for_and_join_reports_the_last_round(cli, tmp_path):
    words = ("--on", "join:1", "--store", "store", "--workspace", ".")
    started = cli("run", "job:ok", "--run-id", "r", "--detach", *words)
    line = f"waits for 1 machine to join; on each: atoll join r --store {(tmp_path / 'store').as_uri()}"
    assert line in started.stderr.splitlines()
    outcome = cli("join", "r", "--json").data["outcome"]
    assert (outcome["round_no"], outcome["metrics"]) == (1, {"loss": 0.5})
    resumed = cli("resume", "r", "--detach")
    assert line in resumed.stderr.splitlines()
    assert cli("join", "r").code == 0
    local = cli("run", "job:ok", "--store", "store")
    assert local.code == 0
    assert "to join" not in local.stderr


def test_the_plan_of_a_run_for_machines_names_no_run_that_will_not_exist(inside):
    words = ("plan", "job:ok", "--on", "join:2", "--store", "store", "--workspace", ".")
    planned = inside(*words, "--json").data["plan"]
    assert [note for note in planned["notes"] if "`atoll join RUN --store" in note]
    assert "`atoll join RUN --store" in inside(*words).stderr
    assert "`atoll join mine --store" in inside(*words, "--run-id", "mine").stderr
