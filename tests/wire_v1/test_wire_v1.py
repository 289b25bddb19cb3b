"""A store that version 0.1 wrote: today's code reads, verifies and continues it to the same bits.

`write.py` says how the store was written. It is never written again: when one of these tests fails, the code has left
format version 1, and the code is what must change.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from wire_keys import canonical
from wire_means import ENDED, SPACES, leave_parts, mean_again, own_tensors
from wire_toys import CASES, Case, only, run_case, verified, weights_digest
from write import objects

import atoll

HERE = Path(__file__).parent
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
KEYS = sorted(EXPECTED["objects"])
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


STORE = (HERE / "store").as_uri()
"""For tests that only read."""


def copied(tmp_path: Path, folder: str) -> str:
    """The address of a store that has this folder of the fixture and may be written to."""
    shutil.copytree(HERE / "store" / folder, tmp_path / "store" / folder)
    return (tmp_path / "store").as_uri()


def test_the_store_holds_what_version_0_1_wrote() -> None:
    assert objects(HERE / "store") == EXPECTED["objects"]


@pytest.mark.parametrize("run", ["launched", "failed run", "cancelled", *(r for c in CASES for r in c.runs)])
def test_keys_of_a_run_are_spelled_as_today(run: str) -> None:
    part = {"failed run": "~failed-run-a13451a351b1"}.get(run, run)
    mine = [key for key in KEYS if key.startswith(f"runs/{part}/")]
    assert len(mine) > 5
    for key in mine:
        assert canonical(key, run) == key


def test_every_other_key_is_spelled_as_today() -> None:
    others = [key for key in KEYS if not key.startswith("runs/")]
    assert {key.split("/")[0] for key in others} == {"allreduce", "bundles", "index"}
    for key in others:
        assert canonical(key) == key


@cases
def test_a_finished_run_verifies(case: Case) -> None:
    found = verified(STORE, case.finished)
    assert found == EXPECTED["cases"][case.name]["verified"]
    assert found["difference"] is None
    assert found["rounds"] >= 2


@cases
def test_a_finished_run_gives_its_final_weights_to_a_process_that_joins(case: Case, tmp_path: Path) -> None:
    store = copied(tmp_path, f"runs/{case.finished}")
    final = only(run_case(store, case.finished, case, attempt=1))
    assert asdict(final) == EXPECTED["cases"][case.name]["finished"]


@pytest.mark.parametrize("case", [c for c in CASES if "snapshot" not in c.options], ids=lambda case: case.name)
def test_a_finished_run_can_be_replayed_from_its_first_round(case: Case, tmp_path: Path) -> None:
    store = copied(tmp_path, f"runs/{case.finished}")
    opened = atoll.open_store(store)
    snapshots = list(opened.list(f"runs/{case.finished}/sync/snapshots/"))
    assert snapshots
    for key in snapshots:
        opened.delete(key)
    final = only(run_case(store, case.finished, case, attempt=1))
    assert asdict(final) == EXPECTED["cases"][case.name]["finished"]


@pytest.mark.training
@cases
def test_a_stopped_run_is_continued_to_the_same_bits(case: Case, tmp_path: Path) -> None:
    store = copied(tmp_path, f"runs/{case.stopped}")
    final = only(run_case(store, case.stopped, case, attempt=1, checkpoint=case.checkpoint))
    expected = EXPECTED["cases"][case.name]
    assert asdict(final) == expected["continued"]
    if case.checkpoint is not None:  # then the stop leaves no trace in the weights
        assert expected["continued"] == expected["finished"]
    found = verified(store, case.stopped)
    assert found["difference"] is None
    assert found["first_round"] + found["rounds"] == case.rounds


@pytest.mark.training
@cases
def test_the_same_training_writes_the_same_objects(case: Case, tmp_path: Path) -> None:
    """Old code must read what new code writes, so members of records and headers are compared as well."""
    final = only(run_case(str(tmp_path / "fresh"), case.finished, case))
    assert asdict(final) == EXPECTED["cases"][case.name]["finished"]
    fresh, stored = (described(uri, case.finished) for uri in (str(tmp_path / "fresh"), STORE))
    if case.name == "plain-bf16":  # when old rounds are deleted is a matter of time
        shared = fresh.keys() & stored.keys()
        assert any("/offer/" in key for key in shared)
        fresh, stored = ({key: found[key] for key in shared} for found in (fresh, stored))
    assert fresh == stored


@cases
def test_each_commit_of_a_run_names_the_one_before_it(case: Case) -> None:
    opened = atoll.open_store(STORE)
    prefix = f"runs/{case.stopped}/sync/"
    commits = [bytes(opened.get(key)) for key in sorted(opened.list(f"{prefix}commits/"))]
    digests = [xxhash.xxh3_128_hexdigest(commit) for commit in commits]
    named = [json.loads(commit)["previous"] for commit in commits]
    assert named[1:] == digests[:-1]
    if json.loads(commits[0])["round"] == 0:
        assert named[0] == xxhash.xxh3_128_hexdigest(opened.get(f"{prefix}agreement.json"))


@pytest.mark.process
def test_the_verify_command_reads_the_store() -> None:
    done = atoll_command("verify", "scatter-int8-finished", "--store", STORE, "--json")
    assert done["data"].items() >= EXPECTED["cases"]["scatter-int8"]["verified"].items()


@pytest.mark.process
def test_the_trace_command_reads_metrics_and_events(tmp_path: Path) -> None:
    atoll_command("trace", "rejected-finished", "--store", STORE, "-o", str(tmp_path / "trace.json"), "--json")
    drawn = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in drawn} == {0, 1, 2}
    assert {"update_rejected", "left", "compute", "apply"} <= {event["name"] for event in drawn}


@pytest.mark.parametrize("space", SPACES)
def test_parts_of_a_named_mean_are_read(space: str | None, tmp_path: Path) -> None:
    assert mean_again(copied(tmp_path, "allreduce"), space) == EXPECTED["means"][str(space)]


def test_a_named_space_that_has_ended_begins_a_new_session(tmp_path: Path) -> None:
    zeros = [torch.zeros_like(tensor) for tensor in own_tensors(0)]
    assert mean_again(copied(tmp_path, "allreduce"), ENDED) == weights_digest(zeros)


def test_the_same_named_means_write_the_same_objects(tmp_path: Path) -> None:
    leave_parts(str(tmp_path / "fresh"))
    fresh = objects(tmp_path / "fresh")
    assert fresh == {key: digest for key, digest in EXPECTED["objects"].items() if key.startswith("allreduce/")}


class TestLaunchedRuns:
    """What `atoll.launch` left of runs whose machine is gone: journal, outcomes, results, heartbeats, logs."""

    @pytest.fixture(autouse=True)
    def same_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("socket.gethostname", lambda: "machine")

    def test_results_and_restarts(self) -> None:
        run = atoll.attach("launched", store=STORE)
        result = run.result()
        assert [outcome.state.value for outcome in result.outcomes] == ["succeeded", "succeeded"]
        assert [outcome.attempt for outcome in result.outcomes] == [0, 1]
        assert result.outcomes[0].result == {"rank": 0, "attempt": 0, "long": "y" * 66000}
        assert result.outcomes[1].result == {"rank": 1, "attempt": 1, "long": "y"}
        assert run.spec.task.args == {"greeting": "héllo"}
        assert run.spec.placement.max_restarts == 1

    def test_progress(self) -> None:
        progress = atoll.attach("launched", store=STORE).status().replicas[1].progress
        assert progress is not None
        assert (progress.round_no, progress.metrics) == (3, {"loss": 0.25})

    def test_logs_of_every_attempt(self) -> None:
        run = atoll.attach("launched", store=STORE)
        assert list(run.logs(0)) == ["héllo: rank 0, attempt 0"]
        first = list(run.logs(1, attempt=0))
        assert first[0] == "héllo: rank 1, attempt 0"
        assert first[-1] == "ValueError: the first attempt of rank 1 fails"
        assert list(run.logs(1, attempt=1)) == ["héllo: rank 1, attempt 1"]

    def test_a_failure(self) -> None:
        [outcome] = atoll.attach("failed run", store=STORE).result().outcomes
        assert outcome.state is atoll.ReplicaState.FAILED
        assert outcome.error is not None
        assert (outcome.error.type, outcome.error.message) == ("ValueError", "this one fails")

    def test_a_cancelled_run(self) -> None:
        assert atoll.attach("cancelled", store=STORE).status().replicas[0].state is atoll.ReplicaState.CANCELLED

    def test_the_code_bundle_is_built_to_the_same_bytes(self, tmp_path: Path) -> None:
        from write import JOBS

        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "jobs.py").write_text(JOBS)
        draft = atoll.prepare(
            "jobs:stumble", on="local", store=STORE, workspace=str(tmp_path / "code"), args={"greeting": "."}
        )
        digest = atoll.attach("launched", store=STORE).spec.task.code.digest
        assert draft.spec.task.code.digest == digest
        assert f"bundles/{digest}.tar.gz" in KEYS


def atoll_command(*words: str) -> dict[str, Any]:
    """The last line that `atoll` prints, as JSON."""
    done = subprocess.run([sys.executable, "-m", "atoll", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


_VARIES = {"token", "norm", "by", "xxh3", "previous", "time"}
"""Members that differ between two runs: random, of a clock, of the machine's order of addition, or made of such."""


def described(uri: str, run_id: str) -> dict[str, Any]:
    """Key → what its object says that is the same every time."""
    opened = atoll.open_store(uri)
    return {
        key: as_described(bytes(opened.get(key)))
        for key in opened.list(f"runs/{run_id}/")
        if "/events/" not in key and "/metrics/" not in key
    }


def as_described(data: bytes) -> Any:
    """The header of a frame and a digest of its payload; the members of a record; a digest of anything else."""
    if data.startswith(b"ATOL"):
        end = 32 + int.from_bytes(data[8:12], "little")
        return steady(json.loads(data[32:end])), end, xxhash.xxh3_64_hexdigest(data[end:])
    if re.match(rb'\{"', data):
        return steady(json.loads(data))
    return xxhash.xxh3_64_hexdigest(data)


def steady(value: Any) -> Any:
    """The same JSON, with the values that vary replaced by their type."""
    if isinstance(value, dict):
        return {k: type(v).__name__ if k in _VARIES else steady(v) for k, v in value.items()}
    return [steady(item) for item in value] if isinstance(value, list) else value
