"""Settings on the command line: every problem of a run at once, exit code 2, and a plan that ends with the price."""

from __future__ import annotations

import json
from typing import Any

import pytest

SAGEMAKER = {
    "region": "eu-west-1",
    "role_arn": "arn:aws:iam::123456789012:role/replicas",
    "image_uri": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1",
    "output_s3_path": "s3://bucket/output",
}


@pytest.fixture(autouse=True)
def _no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")


def words(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--setting", f"{name}={value}")]


def fields(done: Any) -> list[str]:
    return [problem.split("=")[0].split(":")[0] for problem in done.error["problems"]]


@pytest.mark.parametrize("command", ["plan", "run"])
def test_every_problem_of_settings_flags_store_and_placement_is_told_at_once(inside, command):
    wrong = {
        **SAGEMAKER,
        "instance_type": "ml.m5.xlrage",
        "volume_size_gb": "many",
        "tags": "[1]",
        "retry_attempts": 99,
    }
    done = inside(
        *(command, "job:ok", "--on", "sagemaker", "-n", "two", "--timeout", "soon", "--cpus", "x", "--grace", "-"),
        *("--store", "s3//bucket/x", "--gpu", "H1000", "--run-id", "r", *words(wrong), "--json"),
    )
    assert (done.code, done.error["code"]) == (2, "InvalidSpec")
    assert fields(done) == [
        *("--replicas", "--cpus", "--timeout", "--grace"),
        *("volume_size_gb", "tags", "instance_type"),
        *("store `s3//bucket/x`", "gpu", "retry_attempts"),
    ]
    assert "'s3://bucket/x'" in done.error["hint"]
    assert not (inside.home / "store").exists()


def test_a_wrong_file_or_variable_hides_no_other_problem(inside, monkeypatch):
    (inside.folder / "atoll.toml").write_text('replicas = "two"\non = "loca"\n')
    monkeypatch.setenv("ATOLL_TIMEOUT", "soon")
    done = inside("plan", "job:nothing", "--image", "", "--cpus", "3", "--json")
    assert done.code == 2
    starts = (
        "--image=",
        "atoll.toml:1: replicas=",
        "ATOLL_TIMEOUT: timeout=",
        "unknown executor `loca`",
        "entry=",
    )
    for problem, start in zip(done.error["problems"], [*starts, "cpus=3"], strict=True):
        assert problem.startswith(start)


def test_a_setting_of_a_wrong_type_is_never_a_bug_of_ours(inside):
    values = ["null", "-1", "0", "NaN", "1e999", "[]", '{"a": [1]}', '""', "true", "x" * 300]
    names = ["root", "devices", "clock", "name", "self", "settings_class"]
    for on, more in (("local", names), ("sagemaker", [*SAGEMAKER, "timeout_s", "tags", "prices", "sagemaker_client"])):
        for name in more:
            for value in values:
                done = inside("plan", "job:ok", "--on", on, "--setting", f"{name}={value}", "--json")
                assert done.code in (0, 2), (name, value, done.stderr)


@pytest.mark.parametrize("setting", ["root = 5", "root = nan", "root = 2020-01-01", "rot = 'x'"])
def test_commands_with_wrong_settings_in_the_file_are_code_2(finished, inside, tmp_path, setting):
    at = inside.at(finished.cli)
    file = tmp_path / "wrong.toml"
    file.write_text(f"[executors.local]\n{setting}\n")
    inside._monkeypatch.setenv("ATOLL_CONFIG", str(file))
    name = setting.split()[0]
    for command in (["status", finished.ok], ["logs", finished.ok], ["plan", "job:ok"], ["run", "job:ok"]):
        done = at(*command, "--json")
        assert (done.code, done.error["code"], fields(done)) == (2, "InvalidSpec", [name]), command
        assert "[executors.local]" in done.error["hint"]
    doctor = at("doctor", "--json")
    assert doctor.code == 2
    assert [c["kind"] for c in doctor.data["checks"] if c["is_input"]] == ["backend"]


def test_doctor_and_run_end_alike_without_a_region(inside):
    run = inside("run", "job:ok", "--on", "sagemaker", "--store", "s3://bucket/x", "--json")
    doctor = inside("doctor", "sagemaker", "--json")
    assert (run.code, doctor.code) == (2, 2)
    [region] = [c for c in doctor.data["checks"] if c["name"] == "region"]
    for hint in (run.error["problems"][0], region["message"]):
        assert "`--setting region=" in hint
        assert "atoll.toml" in hint
    wrong = inside("doctor", "sagemaker", "--setting", "region=mars-1", "--setting", "spot=5", "--json")
    [backend] = [c for c in wrong.data["checks"] if c["name"] == "sagemaker"]
    assert (wrong.code, "region=" in backend["message"], "spot=" in backend["message"]) == (2, True, True)


def test_a_store_on_this_machine_is_refused_for_a_cloud_unless_it_is_mounted(inside):
    plan = ("plan", "job:ok", "--on", "sagemaker", *words(SAGEMAKER), "--json")
    for store in ("./runs", "memory://x"):
        refused = inside(*plan, "--store", store)
        assert (refused.code, fields(refused)) == (2, ["store"])
    assert "store_is_mounted" in inside(*plan, "--store", "./runs").error["problems"][0]
    assert inside(*plan, "--store", "./runs", "--setting", "store_is_mounted=true").code == 0
    assert inside(*plan, "--store", "memory://x", "--setting", "store_is_mounted=true").code == 2


def test_a_plan_shows_near_equal_requests_once_and_ends_with_the_price(inside):
    given = ("plan", "job:ok", "--on", "sagemaker", *words(SAGEMAKER), "--store", "s3://bucket/x", "--run-id", "r")
    done = inside(*given, "-n", 3)
    assert done.code == 0, done.stderr
    jobs = inside(*given, "-n", 3, "--json").data["plan"]["request"]["jobs"]
    shown = json.loads(done.stdout)["jobs"]
    assert [set(each) for each in shown["each"]] == [
        {"TrainingJobName", "Environment.REPLICA_RANK", "Environment.ATOLL_LAUNCH", "Tags[1].Value", "Tags[3].Value"}
    ] * 3
    for job, each in zip(jobs, shown["each"], strict=True):
        assert each["TrainingJobName"] == job["TrainingJobName"]
        assert each["Environment.REPLICA_RANK"] == job["Environment"]["REPLICA_RANK"]
        assert each["Tags[3].Value"] == job["Environment"]["ATOLL_LAUNCH"]
    assert shown["common"]["ResourceConfig"] == jobs[0]["ResourceConfig"]
    assert shown["common"]["Environment"]["REPLICA_RANK"] == "…"
    assert done.stdout.count("InstanceType") == 1
    assert "3 × ml.m5.xlarge" in done.stderr.splitlines()[-1]
    assert "$" in done.stderr.splitlines()[-1]
    alone = inside(*given, "--setting", "keep_alive_s=60")
    assert len(json.loads(alone.stdout)["jobs"]) == 1
    assert "1 × ml.m5.xlarge" in alone.stderr.splitlines()[-1]


def test_the_text_of_a_plan_of_unlike_parts_is_its_request():
    from atoll.cli.plan_text import plan_text

    for request in (
        {"a": [{"x": 1, "y": 2}, {"x": 3, "y": 4}], "b": [1, 2], "c": []},
        {"a": [{"x": 1, "y": 2}, {"x": 1, "z": 2}], "b": {"c": [{"d": 1}]}},
        {"a": [{"x": 1}, 5]},
    ):
        assert json.loads(plan_text(request)) == request
    [common] = json.loads(plan_text({"a": [{"x": [1, {}], "y": "\0", "z": k} for k in range(2)]})).values()
    assert common == {"common": {"x": [1, {}], "y": "\0", "z": "…"}, "each": [{"z": 0}, {"z": 1}]}


def test_a_setting_given_twice_hides_no_other_setting(inside):
    given = ("role_arn=a", "role_arn=b", "region=us-east-1", "output_s3_path=s3://b/o", "image_uri=i")
    options = [part for text in given for part in ("--setting", text)]
    error = inside("plan", "job:ok", "--on", "sagemaker", "--store", "s3://b/x", *options, "--json").error
    assert not [problem for problem in error.get("problems", ()) if "not set" in problem]
    assert "role_arn" in error["message"]
