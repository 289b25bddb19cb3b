"""`atoll doctor hf-jobs`: what would be in the way."""

from __future__ import annotations

import pytest

from atoll.cli.main import main
from atoll.executors.base import Diagnoser
from atoll.testing.bench import Call, Fault
from services.hf_jobs import server


def found(executor):
    return {check.name: check for check in executor.diagnose()}


def test_all_is_well(executor):
    assert isinstance(executor(), Diagnoser)
    checks = found(executor(flavor="a10g-small"))
    assert all(check.ok for check in checks.values()), checks
    assert list(checks) == ["token", "namespace", "image", "flavor", "jobs"]
    assert "$1.00/h" in checks["flavor"].message


def test_each_thing_that_is_wrong_has_a_hint(hub, executor):
    checks = found(executor(namespace="other"))
    assert (checks["namespace"].ok, "tester" in checks["namespace"].hint) == (False, True)
    assert not found(executor(flavor="a10g-smal"))["flavor"].ok
    hub.faults.fail(Call.DESCRIBE, Fault.FORBIDDEN)
    checks = found(executor())
    assert (checks["jobs"].ok, "scopes" in checks["jobs"].hint) == (False, True)


@pytest.mark.parametrize(
    "token",
    [{"role": "read"}, {"role": "fineGrained", "fineGrained": {"scoped": [], "global": ["discussion.write"]}}],
)
def test_a_token_that_may_not_run_jobs_is_told(hub, executor, monkeypatch, token):
    monkeypatch.setattr(server, "_identity", lambda: {"name": "tester", "auth": {"accessToken": token}})
    assert found(executor())["token"].ok is False


def test_no_token_is_told_first(hub, executor, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    checks = executor().diagnose()
    assert [(check.name, check.ok) for check in checks] == [("token", False)]
    assert "hf auth login" in checks[0].hint
    assert executor(token="hf_other").diagnose()[0].ok is False


def test_the_command_takes_a_dash(hub, capsys):
    words = ["doctor", "hf-jobs", "--setting", "namespace=tester", "--setting", "image=team/train:1", "--json"]
    assert main(words) == 0
    assert "cpu-basic" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "code"), [((), 2), (("--setting", "store_is_mounted=true"), 0)], ids=["out of reach", "mounted"]
)
def test_a_folder_that_replicas_cannot_see_is_no_good_store(hub, tmp_path, capsys, settings, code):
    words = ["doctor", "hf-jobs", "--setting", "namespace=tester", "--setting", "image=team/train:1"]
    assert main([*words, "--store", str(tmp_path / "store"), *settings]) == code
    assert ("replicas are on other machines" in capsys.readouterr().out) == (code == 2)
