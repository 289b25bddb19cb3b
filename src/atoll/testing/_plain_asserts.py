"""Imported before the clauses of the executor contract: lets pytest show what their plain asserts compared."""

from __future__ import annotations

import sys

import pytest

_MODULES = [
    "atoll.testing.executor_steps",
    *(f"atoll.testing.executor_contract_{part}" for part in ("life", "plan", "reach", "twins", "wire")),
]

pytest.register_assert_rewrite(*(module for module in _MODULES if module not in sys.modules))
