"""The contract suites that every executor and store passes, and fakes for tests, shipped for third parties."""

from __future__ import annotations

import sys

if (pytest := sys.modules.get("pytest")) is not None:  # replicas run `contract_jobs` without pytest
    _suites = ("atoll.testing.bench", "atoll.testing.executor_contract", "atoll.testing.store_contract")
    pytest.register_assert_rewrite(*(name for name in _suites if name not in sys.modules))
