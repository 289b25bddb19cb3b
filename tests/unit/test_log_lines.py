"""The levels in `ATOLL_LOG`, and the handlers of the logger `atoll`."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import atoll
from atoll.errors import ConfigError
from atoll.log_lines import LOGGERS, log_to_stderr, log_to_stderr_of_replica, parse_levels


@pytest.fixture(autouse=True)
def top() -> Iterator[logging.Logger]:
    top = logging.getLogger("atoll")
    handlers, level = top.handlers[:], top.level
    yield top
    top.handlers[:] = handlers
    top.setLevel(level)


def test_levels_are_for_all_of_atoll_or_for_a_package():
    assert parse_levels("") == {}
    assert parse_levels("debug") == {"atoll": logging.DEBUG}
    assert parse_levels(" INFO , atoll.rounds = debug,") == {"atoll": logging.INFO, "atoll.rounds": logging.DEBUG}


@pytest.mark.parametrize("text", ["x", "debug,x", "atoll.rounds=", "=x", "atollx=debug", "root=debug"])
def test_a_bad_value_is_a_config_error(text):
    with pytest.raises(ConfigError) as caught:
        parse_levels(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint


@pytest.mark.parametrize(
    ("value", "unknown"),
    [("atoll.nope=info", ["atoll.nope"]), ("atoll.rounds=debug,atoll.kernels=info", []), ("atoll.rounds.x=info", []),
     ("atoll=info,atoll.round=info,atoll.x.y=debug", ["atoll.round", "atoll.x.y"])],
)  # fmt: skip
@pytest.mark.parametrize("set_up", [log_to_stderr, log_to_stderr_of_replica])
def test_a_logger_that_no_package_has_is_a_warning(capsys, monkeypatch, set_up, value, unknown):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    set_up({"ATOLL_LOG": value})
    warned = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert [re.search("`(.*?)`", line)[1] for line in warned] == unknown  # type: ignore[index]


def test_every_logger_of_the_code_is_known():
    used = set()
    for path in Path(atoll.__file__).parent.rglob("*.py"):
        used |= set(re.findall(r'getLogger\("(atoll\.\w+)"', path.read_text()))
    assert used == set(LOGGERS)


@pytest.mark.process
def test_a_library_user_gets_nothing_but_a_null_handler():
    code = "import atoll, logging; atoll.launch; print(logging.getLogger('atoll').handlers, logging.root.handlers)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["[<NullHandler", "(NOTSET)>]", "[]"]


def test_a_second_call_replaces_the_first(capsys):
    log_to_stderr({}, verbosity=2)
    log_to_stderr({}, verbosity=1)
    logging.getLogger("atoll.x").debug("hidden")
    logging.getLogger("atoll.x").info("shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO atoll.x: shown")


def test_handlers_of_user_code_replace_ours_in_a_replica(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_stderr_of_replica({"ATOLL_LOG": "info"})
    logging.getLogger("atoll.x").info("one")
    theirs = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(theirs)])
    logging.getLogger("atoll.x").info("two")
    assert capsys.readouterr().err.endswith("one\n")
    assert theirs.getvalue() == "two\n"
