"""Which name somebody may have meant."""

from __future__ import annotations

import pytest

from atoll.errors import did_you_mean
from atoll.suggestion import closest

BACKENDS = ["local", "sagemaker"]
COMMANDS = ["cancel", "logs", "ps", "result", "run", "status", "sweep", "top", "trace", "verify", "wait"]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("locla", BACKENDS, "local"),
        ("locl", BACKENDS, "local"),
        ("lokal", BACKENDS, "local"),
        ("sagemkr", BACKENDS, "sagemaker"),
        ("sage", BACKENDS, "sagemaker"),
        ("LOCAL", BACKENDS, "local"),
        ("modal", BACKENDS, None),
        ("kubernetes", BACKENDS, None),
        ("stauts", COMMANDS, "status"),
        ("results", COMMANDS, "result"),
        ("sp", COMMANDS, "ps"),
        ("start", COMMANDS, None),
        ("rm", COMMANDS, None),
        ("x", COMMANDS, None),
        ("", COMMANDS, None),
        ("x", ["y"], None),
        ("anything", [], None),
        ("H1000", ["A100", "H100", "H200"], "H100"),
        ("restarts", ["max_restarts", "replicas"], "max_restarts"),
        ("h100sxm", ["A100", "H100", "H200"], "H100"),
    ],
)
def test_only_a_slip_of_the_hand_is_taken_for_another_name(name, known, meant):
    assert closest(name, known) == meant
    assert did_you_mean(name, known) == (f", did you mean `{meant}`?" if meant else "")


def test_the_nearest_of_several_is_meant():
    assert closest("inner_step", ["inner_stop", "inner_steps", "inner_steps_total"]) == "inner_steps"
