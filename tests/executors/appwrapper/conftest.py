"""The scenarios of runs in AppWrappers: on the real controllers of AppWrapper and Kueue, and on MCAD."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from services.kubernetes.controllers.queues import QueueNamespace
    from services.kubernetes.namespace import Namespace
    from services.kubernetes.wrapper_scenario import WrapperScenario


@pytest.fixture
def wrapped(queue_namespace: QueueNamespace, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Runs of the executor in a namespace of their own. Their run id is the name of the test."""
    with _scenario(queue_namespace, request, tmp_path) as found:
        yield found


@contextmanager
def _scenario(
    namespace: Namespace, request: pytest.FixtureRequest, folder: Path, **settings: Any
) -> Iterator[WrapperScenario]:
    from services.kubernetes.wrapper_scenario import WrapperScenario

    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
    with WrapperScenario.of(folder, name, namespace, **settings) as found:
        yield found
        found.check()
        if request.config.getoption("--record"):
            found.record()


@pytest.fixture
def dispatched(mcad_namespace: Namespace, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The same on the cluster with MCAD."""
    with _scenario(mcad_namespace, request, tmp_path) as found:
        yield found
