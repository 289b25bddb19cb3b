"""Hints about what is missing are commands that work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll import installing
from atoll.errors import MissingExtra

ROOT = Path(installing.__file__).parents[2]


def test_in_a_clone_the_hint_installs_the_clone(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert MissingExtra("torch", extra="train").hint == "pip install -e '.[train]'"


def test_elsewhere_the_hint_says_where_the_clone_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert installing.install_command("train").strip("'").endswith(f"{ROOT}[train]")


def test_a_working_folder_that_is_gone_is_no_hindrance(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert f"{ROOT}[train]" in installing.install_command("train")


def test_a_copy_that_pip_installed_is_no_clone(tmp_path):
    module = tmp_path / "lib" / "python3.12" / "site-packages" / "atoll" / "installing.py"
    assert installing.checkout(module) is None
    assert installing.checkout(tmp_path / "src" / "atoll" / "installing.py") is None
    (tmp_path / "pyproject.toml").touch()
    assert installing.checkout(tmp_path / "src" / "atoll" / "installing.py") == tmp_path


@pytest.mark.parametrize("package", ["numpy", "torch", "xxhash"])
def test_a_name_that_needs_training_says_what_to_install(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import atoll; atoll.DiLoCo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"MissingExtra: `{package}` is not installed" in done.stderr
