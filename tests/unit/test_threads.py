"""Calls in threads."""

from __future__ import annotations

import subprocess
import sys
from threading import Barrier, Event

import pytest

from atoll._threads import Unanswered, answer_within, brought_to_its_end, in_background, map_in_background

LIMIT_S = 30.0


def test_the_answer_and_the_error_of_a_call_are_its_own():
    assert answer_within(LIMIT_S, lambda: 7) == 7
    assert answer_within(None, lambda: 8) == 8
    with pytest.raises(ZeroDivisionError):
        answer_within(LIMIT_S, lambda: 1 // 0)
    with pytest.raises(TimeoutError):  # of the call itself, not of the wait for it
        answer_within(LIMIT_S, _times_out)
    assert in_background(lambda: 9).result(LIMIT_S) == 9


def _times_out() -> None:
    raise TimeoutError


def test_a_call_that_hangs_is_left_alone():
    gate = Event()
    with pytest.raises(Unanswered):
        answer_within(0.01, gate.wait)
    gate.set()


def test_items_are_read_at_once_and_their_answers_keep_the_order():
    together = Barrier(4)
    assert map_in_background(lambda n: (together.wait(LIMIT_S), n)[1], range(8), most=4) == list(range(8))
    assert map_in_background(str, [], most=4) == []
    with pytest.raises(ZeroDivisionError):
        map_in_background(lambda n: 1 // n, [1, 0, 1], most=2)


@pytest.mark.process
def test_a_call_that_hangs_does_not_keep_the_process_alive():
    code = """
from threading import Event
from atoll._threads import Unanswered, answer_within, map_in_background
try:
    answer_within(0.01, lambda: map_in_background(lambda _: Event().wait(), range(4), most=4))
except Unanswered:
    print("left")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "left\n"


@pytest.mark.process
def test_an_interrupt_does_not_cut_off_a_call_that_is_brought_to_its_end():
    """The process gets its Ctrl-C after the first step; the second follows, and then the process exits."""
    program = """
import os, signal, time
from atoll._threads import brought_to_its_end
def steps():
    print("deleted", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    print("created", flush=True)
try:
    brought_to_its_end(steps)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.split() == ["deleted", "interrupted", "created"]
    assert brought_to_its_end(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        brought_to_its_end(lambda: 1 // 0)
