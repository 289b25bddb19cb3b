"""The part of the ssh executor that runs on a host, without a connection."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

import atoll
from atoll.executors.ssh import host
from atoll.executors.ssh.protocol import MARK, PROTOCOL, VERBS
from atoll.spec import Placement

RUN = {"run_id": "exp", "store": "s3://bucket/x", "launch": 1, "first_rank": 2, "world_size": 5, "replicas": 2}


class Stream(io.StringIO):
    def __init__(self, data: bytes = b"") -> None:
        super().__init__()
        self.buffer = io.BytesIO(data)


@pytest.fixture
def ask(monkeypatch):
    """Send a request to the host module in this process; returns its last line."""

    def send(verb: str, request: object) -> dict:
        monkeypatch.setattr(sys, "stdin", Stream(json.dumps(request).encode() + b"\n"))
        monkeypatch.setattr(sys, "stdout", Stream())
        assert host.main(verb) == 0
        *_, last = sys.stdout.buffer.getvalue().splitlines()
        assert last.startswith(MARK)
        return json.loads(last.removeprefix(MARK))

    return send


def test_every_verb_has_an_action() -> None:
    assert set(host._ACTIONS) == set(VERBS)


def test_an_answer_has_both_versions(ask) -> None:
    answer = ask("strays", {"protocol": PROTOCOL})
    assert (answer["protocol"], answer["atoll"]) == (PROTOCOL, atoll.__version__)
    assert answer["ok"] == {"strays": []}


@pytest.mark.parametrize(
    "request_", [{}, [], 5, {"protocol": 99}, {"protocol": PROTOCOL}, {"protocol": PROTOCOL, **RUN, "run_id": "../x"},
                 {"protocol": PROTOCOL, **RUN, "launch": "x"}]
)  # fmt: skip
def test_a_request_that_is_damaged_or_of_another_version_is_an_error(ask, request_) -> None:
    assert "error" in ask("status", request_)


def test_a_run_that_the_host_does_not_know_is_lost(ask) -> None:
    rows = ask("status", {"protocol": PROTOCOL, **RUN})["ok"]["replicas"]
    assert [(row["rank"], row["state"]) for row in rows] == [(0, "lost"), (1, "lost")]
    assert ask("logs", {"protocol": PROTOCOL, **RUN, "rank": 0})["error"]["class"] == "RunNotFound"


def test_a_start_that_was_sent_before_a_stop_starts_nothing(ask, own_home, store) -> None:
    """This process is older than the stop, as a start is whose connection was lost on its way to the host."""
    run = {"protocol": PROTOCOL, **RUN, "store": store}
    assert "ok" in ask("stop", run)
    placement = Placement(replicas=2).to_json()
    answer = ask("start", {**run, "placement": placement})
    assert (answer["error"]["class"], answer["error"]["reason"]) == ("BackendError", "stopped")
    (mark,) = (path for path in (own_home / "ssh" / host.MARKED).iterdir() if path.suffix != ".lock")
    os.utime(mark, (0, 0))  # a stop that is older than this process does not concern it
    answer = ask("start", {**run, "placement": placement})
    assert answer["error"]["reason"] == "other_store", "nothing recorded the run"
