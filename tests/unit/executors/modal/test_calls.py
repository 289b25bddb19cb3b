"""What a look at a call makes of what the client raises."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from atoll._time import SYSTEM_CLOCK
from atoll.executors.modal.calls import Calls, Phase


class Client:
    """Its only call has these words in the graph, one at each look, and `get` raises `error`."""

    def __init__(self, error: BaseException, words: Sequence[str] = ()) -> None:
        self.error, self.words = error, list(words)

    def function_call(self, call_id: str) -> SimpleNamespace:
        return SimpleNamespace(get_call_graph=lambda: self._graph(call_id), get=self._get)

    def _graph(self, call_id: str) -> list[SimpleNamespace]:
        words, self.words = self.words[:1], self.words[1:]
        return [
            SimpleNamespace(function_call_id=call_id, status=SimpleNamespace(name=word), children=[]) for word in words
        ]

    def _get(self, timeout: float) -> None:
        raise self.error

    def call(self, operation: str, what: str, send, *, tries=None):
        return send()


def looking_at(error: BaseException, *words: str) -> Calls:
    return Calls(Client(error, words), clock=SYSTEM_CLOCK, pause_s=1.0, stop_s=1.0)


def test_an_interrupt_of_the_launcher_is_no_end_of_the_call():
    with pytest.raises(KeyboardInterrupt):
        looking_at(KeyboardInterrupt()).look("fc-1")


@pytest.mark.parametrize(
    ("error", "phase"),
    [
        (SystemExit(0), Phase.FAILED),
        (TimeoutError("of the function"), Phase.FAILED),
        (TimeoutError(), Phase.PENDING),
    ],
)
def test_what_the_function_raised_is_its_end(error, phase):
    assert looking_at(error).look("fc-1").phase is phase


@pytest.mark.parametrize(
    ("message", "phase"),
    [
        ("Input was cancelled or its container was terminated", Phase.TERMINATED),
        ("The container was preempted", Phase.TERMINATED),
        ("Runner failed with exit code -9", Phase.FAILED),
        ("Container was terminated with exit code 137", Phase.FAILED),
        ("Container terminated: out of memory", Phase.FAILED),
    ],
)
def test_without_a_graph_a_call_that_was_terminated_is_told_by_its_message(message, phase):
    from modal.exception import RemoteError

    assert looking_at(RemoteError(message)).look("fc-1").phase is phase


@pytest.mark.parametrize(
    ("word", "phase"),
    [("INIT_FAILURE", Phase.NOT_STARTED), ("TERMINATED", Phase.TERMINATED), ("PENDING", Phase.FAILED)],
)
def test_a_call_that_ends_between_the_two_requests_has_the_end_of_the_graph(word, phase):
    look = looking_at(ImportError("No module named 'atoll'"), "PENDING", word).look("fc-1")
    assert (look.phase, look.message) == (phase, "No module named 'atoll'")
