from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from atoll.training.background import Background

NAME = "atoll-background-under-test"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background(NAME)
    yield made
    made.close()
    assert not threads()


def test_jobs_run_one_after_the_other_in_one_thread_that_starts_with_the_first(background: Background) -> None:
    assert not threads()
    background.rest()
    assert not threads(), "resting needs no thread"
    seen: list[tuple[int, str]] = []
    futures = [background.submit(lambda i=i: seen.append((i, threading.current_thread().name))) for i in range(20)]
    background.rest()
    assert all(future.done() for future in futures)
    assert seen == [(i, NAME) for i in range(20)]
    assert background.do(lambda: 7) == 7


def test_the_error_of_a_job_is_raised_by_its_future_and_the_next_job_runs(background: Background) -> None:
    failed = background.submit(lambda: 1 // 0)
    background.rest()
    with pytest.raises(ZeroDivisionError):
        failed.result()
    with pytest.raises(SystemExit):
        background.do(lambda: exec("raise SystemExit"))
    assert background.do(lambda: "on") == "on"


def test_a_job_before_which_the_check_raises_is_not_run() -> None:
    is_stopped, ran = threading.Event(), []

    def check() -> None:
        if is_stopped.is_set():
            raise RuntimeError("stopped")

    stoppable = Background(NAME, check)
    stoppable.do(lambda: ran.append("before"))
    is_stopped.set()
    late = stoppable.submit(lambda: ran.append("after"))
    stoppable.close()
    with pytest.raises(RuntimeError, match="stopped"):
        late.result()
    assert ran == ["before"]


def test_closing_waits_for_what_was_submitted_and_a_later_job_starts_a_new_thread(background: Background) -> None:
    go = threading.Event()
    waiting, last = background.submit(go.wait), background.submit(lambda: "done")
    background.close(wait=False)
    assert not last.done()
    go.set()
    assert waiting.result()
    assert last.result() == "done"
    later = background.submit(lambda: "again")
    background.close()
    assert later.done()
    assert not threads()


def test_what_a_job_used_and_returned_is_let_go_when_it_is_over(background: Background) -> None:
    array = np.zeros(3)
    seen = weakref.ref(array)
    background.submit(lambda array=array: array)
    del array
    background.rest()
    background.rest()
    assert seen() is None
