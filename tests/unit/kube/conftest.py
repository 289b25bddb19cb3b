"""Fixtures of the tests of requests to a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kube_api import ScriptedApi


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedApi]:
    """An API server as the test tells it. Nothing of this machine's own clusters is seen."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with ScriptedApi().running() as api:
        yield api
