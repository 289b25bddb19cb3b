"""Hints about what is missing are commands that work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atoll import registry
from atoll.errors import MissingExtra

ROOT = Path(registry.__file__).parents[2]


def test_in_a_clone_the_hint_installs_the_clone(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert MissingExtra("torch", extra="train").hint == "pip install -e '.[train]'"


def test_elsewhere_the_hint_says_where_the_clone_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert registry.install_command("train").strip("'").endswith(f"{ROOT}[train]")


def test_a_working_folder_that_is_gone_is_no_hindrance(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert f"{ROOT}[train]" in registry.install_command("train")


def test_a_copy_that_pip_installed_is_no_clone(tmp_path):
    module = tmp_path / "lib" / "python3.12" / "site-packages" / "atoll" / "registry.py"
    assert registry.checkout(module) is None
    assert registry.checkout(tmp_path / "src" / "atoll" / "registry.py") is None
    (tmp_path / "pyproject.toml").touch()
    assert registry.checkout(tmp_path / "src" / "atoll" / "registry.py") == tmp_path


def installed(folder: Path, direct_url: str | None) -> Path:
    """Our module in a site-packages folder, with what pip writes beside it."""
    info = folder / "atoll-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atoll\nVersion: 0.1.0\n")
    if direct_url is not None:
        (info / "direct_url.json").write_text(direct_url)
    return folder / "atoll" / "registry.py"


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ({"url": "file:///home/me/a%20clone", "dir_info": {}}, "'/home/me/a clone[train]'"),
        ({"url": "file:///tmp/atoll-0.1.0-py3-none-any.whl", "archive_info": {}},
         "'/tmp/atoll-0.1.0-py3-none-any.whl[train]'"),
        ({"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "ab", "requested_revision": "main"}},
         "'atoll[train] @ git+https://host/x.git@main'"),
        ({"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "ab"}},
         "'atoll[train] @ git+https://host/x.git'"),
        ({"url": "https://host/atoll.tar.gz", "archive_info": {}}, "'atoll[train] @ https://host/atoll.tar.gz'"),
        ({}, "'atoll[train]'"),
    ],
)  # fmt: skip
def test_a_copy_is_extended_from_where_it_came(tmp_path, origin, words):
    assert registry.requirement(installed(tmp_path, json.dumps(origin)), "[train]") == words


@pytest.mark.parametrize("written", [None, "", "not JSON", "[]"])
def test_a_copy_that_says_nothing_of_its_origin_is_from_an_index(tmp_path, written):
    assert registry.requirement(installed(tmp_path, written), "[train]") == "'atoll[train]'"
    assert registry.requirement(tmp_path / "elsewhere" / "atoll" / "registry.py") == "atoll"


def test_a_copy_of_the_clone_one_stands_in_is_extended_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = installed(tmp_path, json.dumps({"url": tmp_path.as_uri(), "dir_info": {}}))
    assert registry.requirement(module, "[train]") == "'.[train]'"


@pytest.mark.process
def test_an_estimate_needs_no_more_than_the_core() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('numpy', 'torch', 'xxhash', 'obstore', 'fsspec')))\n"
        "from atoll.cli.main import main; sys.exit(main(['estimate', '--params', '8B', '-n', '16', '--codec', 'int4']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for value in ("8B", "int4", "int8", "16"):
        assert value in done.stdout.splitlines()[0]


@pytest.mark.process
@pytest.mark.parametrize("package", ["numpy", "torch", "xxhash"])
def test_a_name_that_needs_training_says_what_to_install(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import atoll; atoll.DiLoCo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"MissingExtra: `{package}`" in done.stderr
    assert "[train]" in done.stderr


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise ImportError('refused by an import hook')", "cannot be imported: refused by an import hook"),
        ("import a_missing_dependency", "cannot be imported: No module named 'a_missing_dependency'"),
        (None, "is not installed"),
    ],
)
def test_a_package_that_cannot_be_imported_is_missing(tmp_path, monkeypatch, code, problem):
    if code is not None:
        (tmp_path / "broken_sdk.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        registry.require("broken_sdk", extra="sagemaker")
    assert isinstance(caught.value, MissingExtra)
    assert caught.value.message == f"`broken_sdk` {problem}"
    assert "[sagemaker]" in str(caught.value.hint)
