"""Tiers: the markers `process`, `server` and `training` say what a test needs, and the tests keep them true.

A test has a marker because of a fixture that it uses, or because its module or the test itself names the marker. A test
that starts a process, listens on a socket or takes an optimizer step without the marker fails, in every run:
so `make test-fast`, which leaves the marked tests out, starts no process and no server and trains nothing.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest

TIERS = {
    "process": "starts a process",
    "server": "listens on a socket",
    "training": "takes steps of a torch optimizer",
}
OF_FIXTURE = {
    "azurite": ["process", "server"],
    "cli": ["process"],
    "cluster": ["process", "server"],
    "coscheduling_cluster": ["process", "server", "coscheduling"],
    "finished": ["process"],
    "gcs": ["server"],
    "mcad_cluster": ["process", "server", "controllers"],
    "nursery": ["process", "server"],
    "queue_cluster": ["process", "server", "controllers"],
    "rclone": ["process", "server"],
    "seaweed": ["process", "server"],
    "shared_cluster": ["process", "server"],
    "shared_hosts": ["process", "server"],
    "shared_hub": ["process", "server"],
    "shared_queue_cluster": ["process", "server", "controllers"],
    "shared_modal_peer": ["process", "server"],
    "shared_peer": ["process", "server"],
}
OF_CLAUSE = {
    "test_s4_one_of_sixteen_writers_in_four_processes_wins": ["process"],
    "test_s7_another_process_sees_it_at_once": ["process"],
    "test_s7_what_another_process_wrote_is_seen_at_once": ["process"],
}
"""Clauses of the Store contract, which ships with the package and so has no markers."""
_LIBRARY_TOOLS = {"ldconfig", "gcc", "cc", "ld", "objdump"}
_STARTS_A_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn"}

_allowed: set[str] | None = None
"""The markers of the test that runs now. None between tests."""
_problems: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    for name, what in TIERS.items():
        config.addinivalue_line("markers", f"{name}: {what}")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        found = [OF_FIXTURE.get(fixture, []) for fixture in getattr(item, "fixturenames", ())]
        found.append(OF_CLAUSE.get(getattr(item, "originalname", item.name), []))
        for name in sorted(set(chain.from_iterable(found))):
            item.add_marker(name)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # the longest ones do not come last


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _allowed
    _watch_optimizers()
    _allowed = {name for name in TIERS if item.get_closest_marker(name)}
    _problems.clear()
    try:
        return (yield)
    finally:
        _allowed = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fail the test even if another thread or an `except` kept the first failure from it."""
    yield
    if _problems:
        pytest.fail(_problems[0], pytrace=False)


@contextmanager
def allowing(name: str) -> Iterator[None]:
    """For a fixture that prepares something once for tests of every tier, as a compiler does."""
    global _allowed
    before = _allowed
    _allowed = None if before is None else before | {name}
    try:
        yield
    finally:
        _allowed = before


def _needs(name: str) -> None:
    if _allowed is not None and name not in _allowed:
        _problems.append(f"this test {TIERS[name]}: mark it with `pytest.mark.{name}`")
        pytest.fail(_problems[-1])


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _STARTS_A_PROCESS and not _asks_for_a_library(event, args):
        _needs("process")


def _asks_for_a_library(event: str, args: tuple[Any, ...]) -> bool:
    """Whether `ctypes.util.find_library` starts this process, as the first import of torch in a worker does."""
    command = args[1] if event == "subprocess.Popen" else ()
    return isinstance(command, list | tuple) and bool(command) and os.path.basename(str(command[0])) in _LIBRARY_TOOLS


def _listen(self: socket.socket, *args: Any) -> None:
    if self.family != socket.AF_UNIX:
        _needs("server")
    _plain_listen(self, *args)


_is_watching = False


def _watch_optimizers() -> None:
    global _is_watching
    if "torch" in sys.modules and not _is_watching:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(lambda *_: _needs("training"))
        _is_watching = True


sys.addaudithook(_audit)
_plain_listen = socket.socket.listen
socket.socket.listen = _listen  # type: ignore[method-assign]
