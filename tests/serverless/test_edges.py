"""Odd input and odd moments of the replica protocol, on this machine."""

from __future__ import annotations

import dataclasses
import os
from functools import partial

import numpy as np
import pytest

from atoll import serverless
from atoll.errors import AuthError, BackendError, ConfigError, Conflict, InvalidSpec, StoreUnavailable
from atoll.serverless import LocalProcessExecutor
from atoll.serverless.forms import read_form

LIMIT_S = 60.0
JOBS = "atoll.testing.contract_jobs"


@pytest.fixture
def executor(store):
    return LocalProcessExecutor(store=store)


def trainer(**kwargs):
    return {"trainer_module": "jobs", "trainer_fn": "echo", "trainer_kwargs": kwargs}


def test_arguments_of_the_trainer_are_never_optional():
    form = read_form("replica_entrypoint", {**trainer(rank_env="a", b=1), "rank_env": "MY_RANK"})
    assert (form.args, form.optional_args, form.rank_env) == ({"rank_env": "a", "b": 1}, (), "MY_RANK")
    form = read_form("replica_entrypoint", {**trainer(b=1), "rendezvous_uri": "s3://b/x"})
    assert (form.args, form.optional_args) == ({"b": 1, "rendezvous_uri": "s3://b/x"}, ("rendezvous_uri",))


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ({"trainer_module": "jobs", "trainer_kwargs": 0}, ("trainer_kwargs",)),
        ({"trainer_module": "jobs", "trainer_func": "f"}, ("trainer_func",)),
        ({}, ("trainer_module",)),
    ],
)
def test_a_wrong_trainer_form_names_its_arguments(args, fields):
    with pytest.raises(InvalidSpec) as caught:
        read_form("mine.replica_entrypoint", args)
    assert caught.value.fields == fields


def test_a_variable_of_atoll_is_no_argument_of_an_own_command():
    with pytest.raises(InvalidSpec) as caught:
        read_form("", {"atoll_args": 1, "lr": 0.5}, command=["train"])
    assert caught.value.fields == ("atoll_args",)
    assert read_form("", {"lr": 0.5, "debug": True}, command=["train"]).env == {"LR": "0.5", "DEBUG": "True"}


def test_an_argument_does_not_replace_what_starts_an_own_command():
    for mounts_arguments in (True, False):
        with pytest.raises(InvalidSpec) as caught:
            read_form("", {"path": "/data", "ld_preload": "a.so"}, command=["train"], mounts_arguments=mounts_arguments)
        assert caught.value.fields == ("path", "ld_preload")
    assert read_form("", {"paths": "/data", "ld_rate": 0.5}, command=["train"]).env == {
        "PATHS": "/data",
        "LD_RATE": "0.5",
    }


@pytest.mark.parametrize(
    ("facade", "given", "field"),
    [
        ("LocalProcessExecutor", {"root": 3}, "root"),
        ("SageMakerExecutor", {"role_arn": "", "image_uri": "train:1", "output_s3_path": "s3://b/out"}, "role_arn"),
        ("ModalSpawnExecutor", {"app_name": ""}, "app_name"),
        ("ModalSpawnExecutor", {"client": object()}, "client"),
        ("HFJobsExecutor", {"image": ""}, "image"),
        ("EKSExecutor", {"image": "train:1", "service_account_name": 3}, "service_account_name"),
        ("MCADExecutor", {"image": "train:1", "queue": 3}, "queue"),
    ],
)
def test_problems_of_a_constructor_name_its_arguments(facade, given, field):
    with pytest.raises(InvalidSpec, match=facade) as caught:
        getattr(serverless, facade)(**given)
    assert (caught.value.fields, caught.value.hint) == ((field,), None)


class Callable:
    def __call__(self):
        """Nothing."""


NO_NAME = [lambda: 1, partial(print), Callable(), Callable, Callable().__call__, "".join]


@pytest.mark.parametrize("entrypoint", ["train.py", "./train.py:main", "a b", "pkg.:fn", ":fn", "", None, 3, *NO_NAME])
def test_other_entry_points_are_refused_with_both_forms(executor, entrypoint):
    with pytest.raises(InvalidSpec) as caught:
        executor.launch_replicas(1, entrypoint, {})
    assert "trainer_module" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"n_replicas": 10**5000}, "n_replicas"),
        ({"n_replicas": "3"}, "n_replicas"),
        ({"timeout": 10**400}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
    ],
)
def test_problems_name_the_arguments_of_the_call(executor, given, field):
    with pytest.raises(InvalidSpec) as caught:
        executor.launch_replicas(**{"n_replicas": 1, "entrypoint": f"{JOBS}:echo", **given})
    assert caught.value.fields == (field,)


def test_a_store_that_cannot_be_reached_is_an_error_of_the_store(executor):
    with pytest.raises(StoreUnavailable):
        executor.launch_replicas(1, f"{JOBS}:echo", {"rendezvous_uri": "ftp://nohost.invalid/x"})


@pytest.mark.parametrize("timeout", [2, np.int64(2), np.float32(2.5)])
def test_a_deadline_may_be_a_number_of_numpy(executor, timeout):
    assert executor.collect([], timeout=timeout) == []


@pytest.mark.parametrize("handle", [{"rank": 0}, None, 3])
def test_something_that_is_no_handle_is_refused(executor, handle):
    with pytest.raises(ConfigError) as caught:
        executor.poll(handle)
    assert caught.value.reason == "handle"
    with pytest.raises(ConfigError):
        executor.collect(handle)


@pytest.mark.process
def test_a_handle_with_the_rank_of_another_is_refused(executor, jobs):
    first, second = executor.launch_replicas(2, "jobs:echo", {})
    with pytest.raises(ConfigError):
        executor.cancel(dataclasses.replace(first, rank=1))
    assert [row["status"] for row in executor.collect([first, second], timeout=LIMIT_S)] == ["succeeded"] * 2


@pytest.mark.process
def test_metadata_that_the_caller_adds_replaces_no_field_of_the_row(executor, jobs):
    (handle,) = executor.launch_replicas(1, "jobs:echo", {})
    (before,) = executor.collect([handle], timeout=LIMIT_S)
    handle.metadata |= {**dict.fromkeys(before.keys() - handle.metadata.keys(), "stale"), "note": "mine"}
    assert executor.collect([handle], timeout=LIMIT_S) == [{**before, "note": "mine"}]


@pytest.mark.process
def test_a_parameter_named_context_keeps_its_own_default(executor, jobs):
    handles = [
        handle for args in ({}, {"context": 4096}) for handle in executor.launch_replicas(1, "jobs:tokens", args)
    ]
    assert [row["result"] for row in executor.collect(handles, timeout=LIMIT_S)] == [[2048, 0.1], [4096, 0.1]]


@pytest.mark.process
def test_a_store_that_fails_after_the_start_does_not_lose_the_handles(executor, jobs, monkeypatch):
    def fail(*_):
        raise StoreUnavailable("scripted")

    monkeypatch.setattr("atoll.serverless.facade.journal.read_run", fail)
    handles = executor.launch_replicas(1, "jobs:echo", {})
    monkeypatch.undo()
    assert executor.collect(handles, timeout=LIMIT_S)[0]["status"] == "succeeded"


@pytest.mark.process
def test_true_is_other_content_than_one(store, jobs):
    one = LocalProcessExecutor(store=store, idempotency_key="k")
    first = one.launch_replicas(1, "jobs:echo", {"a": 1})
    assert one.launch_replicas(1, "jobs:echo", {"a": 1}) == first
    with pytest.raises(Conflict):
        one.launch_replicas(1, "jobs:echo", {"a": True})
    one.collect(first, timeout=LIMIT_S)


@pytest.mark.process
def test_a_key_adopts_a_launch_that_was_cancelled(store, jobs):
    one = LocalProcessExecutor(store=store, idempotency_key="k")
    first = one.launch_replicas(1, "jobs:hang", {})
    one.cancel(first[0])
    again = one.launch_replicas(1, "jobs:hang", {})
    assert [handle.metadata["run_id"] for handle in again] == [handle.metadata["run_id"] for handle in first]
    assert one.poll(again[0]) == "cancelled"


@pytest.mark.process
def test_collect_waits_for_a_run_whose_record_is_lost(tmp_path, jobs):
    executor = LocalProcessExecutor(store=tmp_path / "store")
    (handle,) = executor.launch_replicas(1, "jobs:hang", {}, timeout=3)
    next((tmp_path / "store").rglob("run.json")).unlink()
    (row,) = executor.collect([handle], timeout=LIMIT_S)
    assert row["status"] == "failed"  # at its own limit; without a wait it would still run
    assert "no run" in row["error"]


@pytest.mark.process
def test_a_handle_of_another_machine_is_lost_and_cannot_be_cancelled(executor, jobs):
    (handle,) = executor.launch_replicas(1, "jobs:echo", {})
    elsewhere = dataclasses.replace(handle, metadata=dict(handle.metadata))
    elsewhere.metadata["run"] = handle.metadata["run"].replace(f"://{os.uname().nodename}/", "://elsewhere/")
    assert elsewhere.metadata["run"] != handle.metadata["run"]
    assert executor.poll(elsewhere) == "lost"
    rows = executor.collect([elsewhere, handle], timeout=LIMIT_S)
    assert [row["status"] for row in rows] == ["lost", "succeeded"]
    with pytest.raises(BackendError):
        executor.cancel(elsewhere)


@pytest.mark.process
def test_a_log_that_may_not_be_read_is_not_called_empty(executor, jobs, monkeypatch):
    handles = executor.launch_replicas(1, "jobs:echo", {})
    executor.collect(handles, timeout=LIMIT_S)

    def refuse(*_, **__):
        raise AuthError("scripted refusal")

    monkeypatch.setattr(executor._executor, "logs", refuse)
    monkeypatch.setattr("atoll.replica.stored_log.StoredLog.lines", lambda *_, **__: iter(()))
    assert "scripted refusal" in executor.stream_logs(handles[0])


@pytest.mark.process
def test_a_stopped_replica_has_the_reason_as_its_error(executor, jobs):
    handles = [*executor.launch_replicas(1, "jobs:hang", {}), *executor.launch_replicas(1, "jobs:hang", {}, timeout=1)]
    executor.cancel(handles[0])
    rows = executor.collect(handles, timeout=LIMIT_S)
    assert [(row["status"], row["reason"]) for row in rows] == [("cancelled", "cancelled"), ("failed", "timeout")]
    assert not any("Traceback" in row["error"] for row in rows)


@pytest.mark.process
def test_another_entry_module_of_the_user_is_not_run_and_named(executor, jobs, monkeypatch):
    (jobs / "replica_entrypoint.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.chdir(jobs)
    with pytest.warns(UserWarning, match="replica_entrypoint"):
        handles = executor.launch_replicas(1, "replica_entrypoint", trainer())
    assert executor.collect(handles, timeout=LIMIT_S)[0]["status"] == "succeeded"
