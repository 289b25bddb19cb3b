"""The bootstrap: its command, run with a pip of our own, and its rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.kube import bootstrap
from atoll.kube.bootstrap import (
    MOST_BYTES,
    Wheel,
    bootstrap_command,
    bootstrap_notes,
    bootstrap_problems,
    wheel_problems,
    with_wheel,
)

WHEEL = Wheel("atoll-0.1.0-py3-none-any.whl", "ab")


def test_the_wheel_with_its_extras_is_installed():
    *start, what = bootstrap_command("python3", "0.1.0", ["train", "cloud", "cloud"], wheel=WHEEL, index=None)
    assert start[:2] == ["python3", "-c"]
    assert what == f"atoll[cloud,train] @ file://{bootstrap.FOLDER}/{WHEEL.file}"


def test_an_index_gives_exactly_this_version():
    command = bootstrap_command("python", "0.1.0", [], wheel=None, index="https://pypi.invalid/simple")
    assert command[3:] == ["--index-url", "https://pypi.invalid/simple", "atoll==0.1.0"]


def test_kubernetes_would_not_change_the_command():
    assert not any("$" in word for word in bootstrap_command("python", "1", ["a"], wheel=WHEEL, index=None))


def run(tmp_path: Path, exit_code: int) -> subprocess.CompletedProcess[str]:
    """Run the command with a pip and an atoll that only print what they get."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").write_text("")
    (tmp_path / "pip/__main__.py").write_text(
        f"import sys; print('pip', *sys.argv[1:], flush=True); sys.exit({exit_code})"
    )
    (tmp_path / "atoll/replica").mkdir(parents=True)
    (tmp_path / "atoll/__init__.py").write_text("")
    (tmp_path / "atoll/replica/__init__.py").write_text("")
    (tmp_path / "atoll/replica/__main__.py").write_text("print('replica')")
    command = bootstrap_command(sys.executable, "0.1.0", ["cloud"], wheel=None, index=None)
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})


@pytest.mark.process
def test_the_command_installs_and_then_becomes_the_replica(tmp_path):
    done = run(tmp_path, 0)
    pip, replica = done.stdout.splitlines()
    assert pip.startswith("pip install ")
    assert pip.endswith(" atoll[cloud]==0.1.0")
    assert (replica, done.returncode) == ("replica", 0)


@pytest.mark.process
def test_a_failed_installation_has_its_own_exit_code_and_words(tmp_path):
    done = run(tmp_path, 3)
    assert done.returncode == bootstrap.EXIT_CODE
    assert done.stderr.startswith(bootstrap.WORDS)
    assert "replica" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ((None, None, [], False), []),
        (("pip", None, ["train"], False), []),
        ((None, "https://x", ["train"], False), ["pip_index", "pip_extras"]),
        (("pip", None, [], True), ["bootstrap"]),
        (("pip", "https://user:word@x/simple", ["A b"], False), ["pip_index", "pip_extras"]),
        (("pip", "https://x/simple", [], False), []),
    ],
)
def test_rules(arguments, fields):
    kind, index, extras, owns = arguments
    assert [p.partition(":")[0] for p in bootstrap_problems(kind, index, extras, owns=owns)] == fields


def test_a_wheel_that_no_config_map_holds_is_refused():
    assert list(wheel_problems(Wheel("a.whl", "ab", MOST_BYTES))) == []
    assert [p.partition(":")[0] for p in wheel_problems(Wheel("a.whl", "ab", MOST_BYTES + 1))] == ["bootstrap"]


def test_only_the_config_map_of_the_wheel_gets_its_bytes():
    made = bootstrap.wheel_config_map("run", WHEEL)
    assert with_wheel(made, lambda: b"zip")["binaryData"] == {"wheel": "emlw"}
    other = {"metadata": {"name": "x"}}
    assert with_wheel(other, lambda: b"zip") is other


def test_the_plan_says_for_which_platform_the_kernels_are():
    (note,) = bootstrap_notes(Wheel("a.whl", "ab", 1, "linux x86_64"), "0.1.0", None)
    assert "linux x86_64" in note
    assert len(list(bootstrap_notes(None, "0.1.0", "https://pypi.invalid/simple"))) == 1
