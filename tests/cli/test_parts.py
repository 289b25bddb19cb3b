"""A run on several backends, from the command line."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.process]


def test_one_run_on_two_parts(inside):
    done = inside("run", "job:ok", "--on", "local:1", "--on", "local:2", "--run-id", "p", "--wait", "--json")
    assert done.code == 0, done.stderr
    shown = inside("status", "p", "--json").data
    assert [replica["backend"] for replica in shown["replicas"]] == ["local"] * 3
    assert shown["parts"] == [{"backend": "local", "ranks": [0, 0]}, {"backend": "local", "ranks": [1, 2]}]
    assert inside("result", "p", "--json").data["parts"] == shown["parts"]
    assert inside("ps", "--json").data["runs"][0]["parts"] == shown["parts"]
    again = inside("resume", "p", "--on", "local:3", "--wait", "--json")
    assert again.code == 0, again.stderr
    assert inside("status", "p", "--json").data["launch"] == 2
    other = inside("resume", "p", "--on", "local:1", "--on", "local:1", "--json")
    assert (other.code, other.error["code"]) == (2, "ConfigError")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--on", "local:1", "--on", "local:2", "-n", "4"], "replicas"),
        (["--on", "local:1", "--on", "local"], "on"),
        (["--on", "local:1", "--on", "local:1", "--set", "root=x"], "root"),
        (["--on", "local:1", "--on", "local:1", "--set", "local.cpus=3"], "cpus"),
    ],
)
def test_a_mistake_about_parts_is_code_2(inside, words, field):
    done = inside("plan", "job:ok", *words, "--json")
    assert done.code == 2
    assert any(problem.startswith(field) for problem in done.error["problems"]), done.error
