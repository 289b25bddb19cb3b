"""The levels in `ATOLL_LOG`, and the handlers of the logger `atoll`."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from atoll.errors import ConfigError
from atoll.log_lines import log_to_stderr, log_to_stderr_of_replica, parse_levels


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
