"""What a replica calls, and with which arguments, if the launch has not decided it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.entry import Entry
from atoll.errors import ConfigError, EntryMissing
from atoll.registry import open_store
from atoll.runs.prepare import Draft, prepare
from atoll.runs.stored import StoredRun
from atoll.status import ReplicaState

pytestmark = pytest.mark.process

LIMIT_S = 60.0


GIVEN = """
import atoll

def none(ctx):
    return {"ctx": ctx.args, "current": atoll.current().args}

def one(ctx, lr, rank_env="?"):
    return {"ctx": ctx.args, "passed": rank_env}

def any_keyword(ctx, **rest):
    return {"ctx": ctx.args, "passed": rest}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "code"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("def train(): return 'train of pkg'\n")
    (folder / "pkg" / "both.py").write_text("def main(): return 'main of pkg.both'\n")
    (folder / "pkg" / "data.py").write_text("def load(): return 'load of pkg.data'\n")
    (folder / "given.py").write_text(GIVEN)
    monkeypatch.chdir(folder)
    return folder


def undecided(draft: Draft, entry: str) -> Draft:
    """The draft as it is if the code is not on the launching machine."""
    draft.spec = replace(draft.spec, task=replace(draft.spec.task, entry=entry))
    return draft


def ended(draft: Draft) -> tuple[ReplicaState, Any]:
    run = draft.submit()
    run.wait(LIMIT_S)
    (outcome,) = run.result().outcomes
    return outcome.state, outcome.result if outcome.error is None else outcome.error.type


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("pkg.both", (ReplicaState.SUCCEEDED, "main of pkg.both")),
        ("pkg.train", (ReplicaState.SUCCEEDED, "train of pkg")),
        ("pkg.data.load", (ReplicaState.SUCCEEDED, "load of pkg.data")),
        ("pkg.data", (ReplicaState.FAILED, "atoll.errors.ConfigError")),
        ("nowhere", (ReplicaState.FAILED, "atoll.errors.ConfigError")),
        ("nowhere.at.all", (ReplicaState.FAILED, "ModuleNotFoundError")),
    ],
)
def test_the_replica_decides_what_a_dotted_name_names(package, store, name, end):
    draft = prepare(Entry(dotted="pkg.both"), store=store)
    assert ended(undecided(draft, name)) == end


def test_the_launch_decides_it_where_the_code_is(package, store):
    assert prepare(Entry(dotted="pkg.both"), store=store).spec.task.entry == "pkg.both:main"
    assert prepare(Entry(dotted="pkg.data.load"), store=store).spec.task.entry == "pkg.data:load"
    sent = prepare(Entry(dotted="pkg.data.load"), store=store, workspace=str(package))
    assert sent.spec.task.entry == "pkg.data:load"
    with pytest.raises(EntryMissing):
        prepare(Entry(dotted="pkg.data"), store=store)


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        ("none", {}, {"ctx": {}, "current": {}}),
        ("one", {"lr": 1}, {"ctx": {"lr": 1, "rank_env": "RANK"}, "passed": "RANK"}),
        ("any_keyword", {"lr": 1}, {"ctx": {"lr": 1}, "passed": {"lr": 1}}),
    ],
)
def test_an_optional_argument_is_passed_only_to_a_parameter_of_its_name(package, store, function, args, result):
    optional = {"rank_env": "RANK", "rendezvous_uri": "memory:x"}
    draft = prepare(f"given:{function}", store=store, args=args | optional, optional_args=tuple(optional))
    assert ended(draft) == (ReplicaState.SUCCEEDED, result)


def test_replicas_of_another_launcher_may_have_different_working_folders(package, store, tmp_path):
    command = [sys.executable, "-m", "atoll.serverless.replica_entrypoint", "--rendezvous", store, "--world-size", "2"]
    command += ["--trainer-module", "pkg"]
    shutil.copytree("pkg", tmp_path / "elsewhere" / "pkg")
    for rank, folder in enumerate([None, tmp_path / "elsewhere"]):
        environment = {**os.environ, "REPLICA_RANK": str(rank)}
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    outcomes = StoredRun(open_store(store), "pkg.train").outcomes(with_results=True)
    assert [outcomes[rank].result for rank in range(2)] == ["train of pkg"] * 2
    with pytest.raises(ConfigError) as caught:
        atoll.attach("pkg.train", store=store)
    assert caught.value.reason == "other_launcher"


def test_the_replica_entry_module_calls_train_of_the_trainer_module(package, store):
    command = [sys.executable, "-m", "atoll.serverless.replica_entrypoint", "--rendezvous", store, "--world-size", "1"]
    command += ["--trainer-module", "pkg"]
    subprocess.run(command, env={**os.environ, "REPLICA_RANK": "0"}, capture_output=True, check=True)
    outcomes = StoredRun(open_store(store), "pkg.train").outcomes(with_results=True)
    assert outcomes[0].result == "train of pkg"
