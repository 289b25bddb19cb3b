"""Processes of a run are killed, and the call returns when the kernel has ended them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from atoll.replica import processes

pytestmark = pytest.mark.process

# Much memory, so that the kernel takes long to end the process.
_LARGE = "x = b'x' * (512 << 20); print('ready', flush=True); input()"


@pytest.fixture
def large():
    """A process with much memory."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _LARGE], **pipes) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def test_a_killed_process_is_dead_when_the_call_returns(large):
    finds = iter([[large.pid]])
    left = processes.kill_found(lambda: next(finds, []))
    assert left == []
    assert processes.is_dead(large.pid)


def test_a_process_that_the_kernel_is_ending_is_neither_running_nor_dead(large):
    assert not processes.is_exiting(large.pid)
    os.kill(large.pid, signal.SIGKILL)
    while not processes.is_exiting(large.pid):
        assert not processes.is_dead(large.pid), "it was never seen between running and dead"
    large.wait()
    assert processes.is_dead(large.pid)
    assert not processes.is_exiting(large.pid)
