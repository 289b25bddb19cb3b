"""Folders in which tests use the real command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_process import Cli, Inside


def _cli(folder: Path) -> Iterator[Cli]:
    made = Cli(folder)
    try:
        yield made
    finally:
        made.end_everything()


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """A fresh folder and home."""
    yield from _cli(tmp_path)


@pytest.fixture
def inside(cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    """Commands in this very process."""
    return Inside(cli, monkeypatch, capsys)


@dataclass(frozen=True)
class Finished:
    """Runs that are over, for tests that only look."""

    cli: Cli
    ok: str
    bad: str


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """One run that went well and one that did not. Do not change them."""
    for made in _cli(tmp_path_factory.mktemp("finished")):
        ok = made.detached("job:ok", "-n", 2, "--run-id", "went-well")
        bad = made.detached("job:bad", "-n", 2, "--run-id", "went-badly")
        assert made("wait", ok).code == 0
        assert made("wait", bad).code == 1
        yield Finished(made, ok, bad)
