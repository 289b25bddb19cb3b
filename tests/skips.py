"""`pytest --strict-skips`: a skip whose reason is not in `allowed_skips.txt` fails the run. CI runs the tests so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ALLOWED = Path(__file__).with_name("allowed_skips.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips",
        nargs="?",
        const=str(ALLOWED),
        metavar="FILE",
        help="fail the run if a test is skipped for a reason that this file does not list",
    )


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--strict-skips"):
        config.pluginmanager.register(StrictSkips(config, allowed_reasons(Path(path))), "strict skips")


def allowed_reasons(path: Path) -> list[re.Pattern[str]]:
    """The patterns of a file. A line is `pattern :: why CI accepts it`, or a comment."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            pattern, _, why = line.partition(" :: ")
            if not why.strip():
                raise pytest.UsageError(f"{path}:{number} does not say why: `pattern :: why`")
            found.append(re.compile(pattern.strip()))
    return found


class StrictSkips:
    """Collects skips where they happen; under pytest-xdist the workers send theirs to the controller."""

    def __init__(self, config: pytest.Config, allowed: list[re.Pattern[str]]) -> None:
        self._config, self._allowed = config, allowed
        self._unexpected: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._unexpected.update(getattr(node, "workeroutput", {}).get("unexpected skips", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["unexpected skips"] = sorted(self._unexpected)
        elif self._unexpected:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unexpected:
            terminalreporter.section("unexpected skips", red=True)
            for line in sorted(self._unexpected):
                terminalreporter.line(line)
            terminalreporter.line("Install what is missing, or list the reason in tests/allowed_skips.txt.")

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = _reason(report)
            if not any(pattern.fullmatch(reason) for pattern in self._allowed):
                self._unexpected.add(f"{report.nodeid}: {reason}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
