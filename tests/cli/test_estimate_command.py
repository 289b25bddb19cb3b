"""`atoll estimate`: the numbers a person sees, and what happens when the question makes no sense."""

from __future__ import annotations

import re

import pytest

from repository import DOCS

pytestmark = pytest.mark.docs

PAGE = (DOCS / "planning.md").read_text()
QUESTION = ["estimate", "--params", "8B", "--replicas", "16", "--inner-steps", "100", "--step-time", "2s"]


def test_the_page_shows_what_the_command_says(inside):
    command = re.search(r"\$ atoll (estimate .*)", PAGE)
    shown = re.search(r"```text\n(.*?)```", PAGE, re.S)
    assert command is not None
    assert shown is not None
    done = inside(*command[1].split())
    assert done.code == 0, done.stderr
    assert done.stdout + done.stderr == shown[1]


def test_for_programs_it_is_all_there(inside):
    data = inside(*QUESTION, "--bandwidth", "25Gbit", "--codec", "int8", "--json").data
    assert data["exchange"]["mode"] == "scatter"
    assert data["setting"]["bandwidth_bytes_s"] == 25e9 / 8
    assert set(data["dollars"]) == {"S3", "GCS", "Azure"}
    assert data["dollars"]["S3"]["per_hour"] > data["dollars"]["S3"]["per_round"]


def test_streaming_is_shown_next_to_blocking(inside):
    done = inside(*QUESTION, "--fragments", 4, "--delay", 1)
    assert "1 of 4 fragments" in done.stdout
    assert re.search(r"\bstreaming +0\.0 %.*\b0ms\b.*\b100 %", done.stdout)
    blocking = inside("estimate", "--params", "8B", "-n", 16, "--inner-steps", 100, "--step-time", "50ms")
    assert re.search(r"to hide it +stream with a delay of 105 steps", blocking.stdout) is None, "more than there are"
    assert "to hide it" in inside("estimate", "--params", "8B", "-n", 16, "--step-time", "200ms").stdout


def test_a_note_is_for_people_and_goes_to_stderr(inside):
    done = inside("estimate", "--params", "70B", "-n", 64, "--chunk", "8MiB", "--connections", 8)
    assert "note: 8 " in done.stderr
    assert "note" not in done.stdout


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (["--params", "8X", "-n", "4"], ["`8X`", "`350M`"]),
        (["--params", "8B", "-n", "4", "--bandwidth", "25G"], ["`25G`", "`25Gbit`"]),
        (["--params", "8B", "-n", "4", "--step-time", "soon"], ["`soon`", "`15m`"]),
        (["--params", "8B", "-n", "4", "--chunk", "big"], ["`big`", "`64MiB`"]),
        (["--params", "8B", "-n", "1"], ["replicas=1: ", "1024"]),
        (["--params", "8B", "-n", "4", "--codec", "int9"], ["`int9`", "`int8`"]),
        (["--params", "8B", "-n", "4", "--mode", "ring"], ["mode=ring: ", "auto, whole, scatter"]),
        (["--params", "8B", "-n", "4", "--fragments", "3"], ["fragments=3: ", "inner_steps=100"]),
        (["-n", "4"], ["--params"]),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(inside, options, values):
    done = inside("estimate", *options)
    assert done.code == 2
    assert [value for value in values if value not in done.stderr] == []
