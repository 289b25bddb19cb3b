"""What only the facade of Hugging Face Jobs does; `test_protocol.py` has what all facades share."""

from __future__ import annotations

import inspect
from unittest.mock import MagicMock

import pytest

from atoll.errors import BackendError, BackendUnavailable
from atoll.executors.hf_jobs.executor import HubJobsExecutor
from atoll.serverless import HFJobsExecutor
from services.hf_jobs.bench import HASTE, SETTINGS


def test_the_constructor_has_these_arguments():
    parameters = inspect.signature(HFJobsExecutor.__init__).parameters
    wanted = {
        "image": inspect.Parameter.empty,
        "namespace": None,
        "flavor": None,
        "secrets": (),
        "token": None,
        "run_id": None,
        "store": None,
        "idempotency_key": None,
        "client": None,
    }
    assert {name: p.default for name, p in parameters.items() if name != "self"} == wanted
    assert not HFJobsExecutor.supports_inter_replica_network


def test_a_facade_over_an_executor_has_its_settings(hub):
    facade = HFJobsExecutor.over(HubJobsExecutor(**{**SETTINGS, **HASTE}, labels={"team": "a"}), store="s3://b/x")
    assert (facade.image, facade.namespace, facade.labels) == ("team/train:1", "tester", {"team": "a"})
    assert facade.store == "s3://b/x"


def test_a_service_that_fails_after_the_start_does_not_lose_the_handles(hub, store, monkeypatch):
    def fail(*_):
        raise BackendUnavailable("scripted")

    facade = HFJobsExecutor.over(HubJobsExecutor(**{**SETTINGS, **HASTE}), store=store)
    monkeypatch.setattr(HubJobsExecutor, "job_ids", fail)
    handles = facade.launch_replicas(2, "atoll.testing.protocol_jobs:echo", {}, timeout=600)
    assert [handle.metadata["job_id"] for handle in handles] == [None, None]
    assert [row["status"] for row in facade.collect(handles, timeout=60)] == ["succeeded"] * 2


@pytest.mark.parametrize("answer", [{}, None, MagicMock()])
def test_a_client_that_does_not_tell_the_user_is_an_error_of_the_service(answer):
    client = MagicMock()
    client.whoami.return_value = answer
    with pytest.raises(BackendError, match="whoami"):
        HFJobsExecutor("train:1", client=client, store="s3://b/x").launch_replicas(1, "train:main", {})
