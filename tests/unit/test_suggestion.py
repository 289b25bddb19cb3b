"""Which name somebody may have meant."""

from __future__ import annotations

import pytest

from atoll.errors import UnknownName, did_you_mean
from atoll.suggestion import closest, likely

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


def test_nobody_who_said_a_name_means_that_name():
    assert did_you_mean("train", ["train", "Train"]) == ", did you mean `Train`?"
    assert did_you_mean("train", ["train"]) == ""


def test_names_that_are_just_as_close_are_all_offered():
    assert did_you_mean("int9", ["int8", "int4", "bf16"]) == ", did you mean `int4` or `int8`?"
    assert likely("gpu9", [f"gpu{i}" for i in range(9)]) == ["gpu0", "gpu1", "gpu2"]


def test_an_unknown_name_reads_as_a_sentence_with_a_guess_and_without():
    known = ["int8", "int4", "bf16"]
    with_a_guess = UnknownName("codec", "int9", known)
    assert with_a_guess.message == "unknown codec `int9`, did you mean `int4` or `int8`? Known: `bf16`, `int4`, `int8`"
    assert UnknownName("codec", "zip", known).message == "unknown codec `zip`; known: `bf16`, `int4`, `int8`"
