"""`pytest tests/golden --update-golden` writes the requests anew; look at the difference before you keep it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden requests anew")
