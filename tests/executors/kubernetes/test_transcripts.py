"""What a real control plane answered, read again without one: the same rows, the same lines.

`pytest --record tests/executors/kubernetes` writes the transcripts anew; each is named after its scenario.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.executors.kubernetes.executor import KubernetesExecutor
from atoll.handle import RunHandle
from atoll.status import Reason, ReplicaState
from services.kubernetes.transcripts import FOLDER, Answers, LogReading, Transcript

FILES = sorted(FOLDER.glob("*.json"))
MOST_BYTES = 1_000_000
TRANSCRIPTS = {path.stem: Transcript.load(path) for path in FILES}
LOGS = [(name, number) for name, found in TRANSCRIPTS.items() for number in range(len(found.logs))]


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_the_same_answers_give_the_same_rows(name: str):
    transcript = TRANSCRIPTS[name]
    assert transcript.rounds or transcript.logs
    for recorded, found in transcript.replayed():
        assert found == recorded


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_a_terminal_state_does_not_change(name: str):
    last: dict[int, str] = {}
    for each in TRANSCRIPTS[name].rounds:
        for row in each["rows"]:
            before = last.get(row["rank"])
            assert before is None or row["state"] in (before, ReplicaState.LOST)
            if ReplicaState(row["state"]).is_terminal:
                last[row["rank"]] = row["state"]


@pytest.mark.parametrize(("name", "number"), LOGS)
def test_the_same_answers_give_the_same_lines(name: str, number: int):
    transcript = TRANSCRIPTS[name]
    reading: LogReading = transcript.logs[number]
    path = next(each["path"] for each in reading.answers if "/jobs/" in each["path"])
    executor = KubernetesExecutor(api_client=Answers(reading.answers), image="busybox", namespace="namespace")
    handle = RunHandle("kubernetes", "namespace", path.rpartition("/")[2], transcript.replicas)
    assert list(executor.logs(handle, reading.rank, **reading.options)) == reading.lines


def test_every_reason_of_a_cluster_was_recorded():
    rows = [row for found in TRANSCRIPTS.values() for each in found.rounds for row in each["rows"]]
    wanted = {
        Reason.OK, Reason.WAITING, Reason.STARTING, Reason.RESTARTING, Reason.STOPPING, Reason.USER_ERROR,
        Reason.KILLED, Reason.OOM, Reason.TIMEOUT, Reason.IMAGE, Reason.CONFIG, Reason.QUOTA, Reason.UNSCHEDULABLE,
        Reason.PREEMPTED, Reason.CANCELLED, Reason.LOST,
    }  # fmt: skip
    assert {Reason(row["reason"]) for row in rows} >= wanted


def test_transcripts_are_small_and_say_nothing_of_the_machine_they_were_recorded_on():
    texts = {path.name: path.read_text() for path in FILES}
    assert sum(map(len, texts.values())) < MOST_BYTES
    private = ("BEGIN CERT", "PRIVATE KEY", "/tmp/", "/home/", "/root/", "/work/", str(Path.home()))
    assert [(name, word) for name, text in texts.items() for word in private if word in text] == []
