"""Which known name a misspelt one suggests."""

from __future__ import annotations

import pytest

from atoll.errors import UnknownName, did_you_mean

BACKENDS = ["local", "sagemaker"]
COMMANDS = ["cancel", "logs", "ps", "result", "run", "status", "sweep", "top", "trace", "verify", "wait"]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("locla", BACKENDS, "local"),
        ("lokal", BACKENDS, "local"),
        ("sagemkr", BACKENDS, "sagemaker"),
        ("LOCAL", BACKENDS, "local"),
        ("stauts", COMMANDS, "status"),
        ("results", COMMANDS, "result"),
        ("H1000", ["A100", "H100", "H200"], "H100"),
        ("restarts", ["max_restarts", "replicas"], "max_restarts"),
        ("inner_step", ["inner_stop", "inner_steps", "inner_steps_total"], "inner_steps"),
        ("train", ["train", "Train"], "Train"),
    ],
)
def test_a_misspelt_name_suggests_the_nearest_one(name, known, meant):
    assert did_you_mean(name, known) == f", did you mean `{meant}`?"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("modal", BACKENDS),
        ("kubernetes", BACKENDS),
        ("start", COMMANDS),
        ("rm", COMMANDS),
        ("", COMMANDS),
        ("cpu", ["gpu"]),
        ("anything", []),
        ("train", ["train"]),
    ],
)
def test_another_name_suggests_nothing(name, known):
    assert did_you_mean(name, known) == ""


def test_an_unknown_name_reads_as_a_sentence_with_a_suggestion_and_without():
    known = ["int8", "int4", "bf16"]
    assert UnknownName("codec", "int9", known).message == (
        "unknown codec `int9`, did you mean `int8`? Known: `bf16`, `int4`, `int8`"
    )
    assert UnknownName("codec", "zip", known).message == "unknown codec `zip`; known: `bf16`, `int4`, `int8`"
