"""The pages about the command line say what is so."""

from __future__ import annotations

import re
import tomllib

import pytest

from atoll import errors
from atoll.cli.app import Interrupted, root
from atoll.runs import config
from atoll.runs.config import FIELDS, OTHER_VARIABLES
from repository import DOCS

pytestmark = pytest.mark.docs

EXIT_CODES = (DOCS / "exit-codes.md").read_text()
CONFIGURATION = (DOCS / "configuration.md").read_text()
CLI = (DOCS / "cli.md").read_text()


def families() -> dict[int, set[str]]:
    """Exit code -> the classes that have it; the root of the tree is never raised itself."""
    found: dict[int, set[str]] = {}
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.AtollError) and value is not errors.AtollError:
            found.setdefault(value.exit_code, set()).add(name)
    return found


def test_every_error_class_is_in_the_row_of_its_exit_code():
    rows = {int(code): set(re.findall(r"`(\w+)`", line)) for line, code in _rows()}
    for code, classes in families().items():
        assert rows[code] == classes, f"exit code {code}"
    assert set(rows) == {0, Interrupted.exit_code, *families()}


def test_every_exit_code_has_its_way_out():
    sections = {int(code) for code in re.findall(r"^## (\d+)$", EXIT_CODES, re.M)}
    assert sections == {int(code) for _, code in _rows()}


def test_the_overview_of_help_lists_every_exit_code():
    assert root.epilog is not None
    listed = {int(code) for code in re.findall(r"\d+", root.epilog)}
    assert listed == {int(code) for _, code in _rows()}


def _rows() -> list[tuple[str, str]]:
    return [(match[0], match[1]) for match in re.finditer(r"^\| \[(\d+)\].*$", EXIT_CODES, re.M)]


@pytest.mark.parametrize("name", root.list_commands(None))  # type: ignore[arg-type]
def test_every_command_has_a_section(name):
    assert f"\n## {name}\n" in CLI


@pytest.mark.parametrize("field", FIELDS.values(), ids=lambda field: field.key)
def test_every_key_is_in_the_table_with_its_variable(field):
    row = next(line for line in CONFIGURATION.splitlines() if line.startswith(f"| `{field.key}` |"))
    assert f"`{field.variable}`" in row
    if field.default is not None:
        assert f"{field.show(field.default)}" in row


def test_the_example_file_is_valid(tmp_path, monkeypatch):
    example = re.search(r"```toml\n(.*?)```", CONFIGURATION, re.S)
    assert example is not None
    assert tomllib.loads(example[1])
    (tmp_path / "atoll.toml").write_text(example[1])
    monkeypatch.chdir(tmp_path)
    found = config.load(profile="big", environ={})
    assert found.get("replicas") == 32
    assert found.table("args") == {"lr": 0.001}


@pytest.mark.process
def test_the_python_of_the_page_launches_what_the_file_says(tmp_path, monkeypatch):
    source = re.search(r"```python\n(.*?)```", CONFIGURATION, re.S)
    assert source is not None
    (tmp_path / "atoll.toml").write_text('entry = "json:loads"\nstore = "./runs"\n[args]\ns = "[1]"\n')
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(source[1], names)
    names["run"].wait(60)
    assert names["run"].result().raise_for_failures().values == [[1]] * 8


def test_variables_that_are_no_settings_are_explained():
    for name in ("ATOLL_HOME", "ATOLL_CONFIG", "ATOLL_DEBUG", "ATOLL_LOG", "ATOLL_PROFILE", "NO_COLOR"):
        assert f"`{name}`" in CONFIGURATION
        assert name in OTHER_VARIABLES or name == "NO_COLOR"
