"""Help and version: instant, true, and the same however they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from atoll import __version__
from atoll.cli.app import SECTIONS, root
from atoll.cli.main import HELP_FILE
from atoll.cli.write_help import help_text

COMMANDS = root.list_commands(None)  # type: ignore[arg-type]


def test_the_shipped_help_is_what_click_renders():
    with open(HELP_FILE, encoding="ascii") as file:
        assert file.read() == help_text(), "run `python -m atoll.cli.write_help`"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_is_the_shipped_text(cli, words):
    done = cli(*words)
    assert (done.code, done.stdout, done.stderr) == (0, help_text(), "")


@pytest.mark.parametrize("words", [["--version"], ["version"]])
def test_version_says_which_one_this_is(cli, words):
    done = cli(*words)
    assert done.code == 0
    assert done.stdout.startswith(f"atoll {__version__}")


@pytest.mark.process
def test_help_and_version_load_no_more_than_a_bare_interpreter_and_this_package():
    code = "import sys; before = set(sys.modules); import atoll.cli.main; print(*sorted(set(sys.modules) - before))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(printed.split()) <= {"__future__", "atoll", "atoll.cli", "atoll.cli.main"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_json_and_a_section(name):
    command = root.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    assert command.name == name
    assert command.section in SECTIONS
    assert command.help
    assert command.short_help
    assert "--json" in [option for param in command.params for option in param.opts]


def test_every_command_that_was_promised_is_there():
    promised = "run plan ps status logs wait cancel result sweep doctor deploy version config top completion backends"
    assert set(promised.split()) <= set(COMMANDS)


def test_help_of_a_command_is_on_stdout(inside):
    done = inside("run", "--help")
    assert done.code == 0
    assert "[ENTRY] [-- ARG...]" in done.stdout
    assert done.stderr == ""


@pytest.mark.process
def test_help_of_the_module_itself_works():
    done = subprocess.run([sys.executable, "-m", "atoll.cli.main"], capture_output=True, text=True, check=True)
    assert done.stdout == help_text()


def test_help_into_a_closed_pipe_is_quiet(cli):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        process = cli.start("--help", stdout=closed, stderr=subprocess.PIPE)
        assert process.communicate()[1] == b""
    assert process.returncode == 0


@pytest.mark.process
@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["--no-such-option"], 2)])
def test_the_package_can_be_run_as_a_module(words, code):
    done = subprocess.run([sys.executable, "-m", "atoll", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.startswith(f"atoll {__version__}") or "`--no-such-option`" in done.stderr
