"""What only the Modal facade does; `test_protocol.py` has what all facades share."""

from __future__ import annotations

import inspect
import shutil

import pytest

from atoll.errors import InvalidSpec, StoreUnavailable, Unsupported
from atoll.executors.modal.executor import ModalExecutor
from atoll.serverless import ModalSpawnExecutor
from services.modal.bench import HASTE, SETTINGS
from services.modal.facade_bench import hasten


def test_the_constructor_has_these_arguments():
    parameters = inspect.signature(ModalSpawnExecutor.__init__).parameters
    wanted = {
        "app_name": "atoll",
        "function": "replica",
        "environment": None,
        "image": None,
        "secrets": (),
        "volumes": None,
        "region": None,
        "run_id": None,
        "store": None,
        "idempotency_key": None,
        "client": None,
    }
    assert {name: p.default for name, p in parameters.items() if name != "self"} == wanted
    assert not ModalSpawnExecutor.supports_inter_replica_network


def test_a_store_without_credentials_is_refused():
    executor = ModalSpawnExecutor(environment="main", store="s3://bucket/exp")
    with pytest.raises(Unsupported) as caught:
        executor.launch_replicas(2, "atoll.testing.protocol_jobs:act", {})
    assert caught.value.fields == ("store",)


def test_unknown_gpus_and_long_limits_are_refused_together(modal_peer, tmp_path):
    executor = ModalSpawnExecutor.over(ModalExecutor(**SETTINGS, **HASTE), store=str(tmp_path / "store"))
    with pytest.raises(Unsupported) as caught:
        executor.launch_replicas(1, "atoll.testing.protocol_jobs:act", {}, gpu="MI300X", timeout=100_000)
    assert set(caught.value.fields) == {"gpu", "timeout_s"} or set(caught.value.fields) == {"gpu", "timeout"}
    with pytest.raises(InvalidSpec):
        executor.launch_replicas(1, "atoll.testing.protocol_jobs:act", {}, gpu="H1000")
    assert modal_peer.engine.calls == {}


def test_a_handle_is_enough_to_cancel_while_the_store_is_lost(modal_peer, tmp_path, monkeypatch):
    """On another machine, which has no copy of the records either."""
    hasten(monkeypatch)
    store = tmp_path / "store"
    modal_peer.engine.admits.clear()
    try:
        handles = ModalSpawnExecutor(store=str(store)).launch_replicas(2, "atoll.testing.protocol_jobs:act", {})
        shutil.rmtree(store)
        monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "elsewhere"))
        other = ModalSpawnExecutor(store=str(store))
        other.cancel(handles[1])
        ended = {call_id: call.is_over for call_id, call in modal_peer.engine.calls.items()}
        assert ended == {handles[0].metadata["call_id"]: False, handles[1].metadata["call_id"]: True}
        other.cancel(handles[0])
        assert all(call.is_over for call in modal_peer.engine.calls.values())
    finally:
        modal_peer.engine.admits.set()


def test_a_store_that_fails_after_the_start_does_not_lose_the_handles(modal_peer, tmp_path, monkeypatch):
    def fail(*_):
        raise StoreUnavailable("scripted")

    facade = ModalSpawnExecutor.over(ModalExecutor(**SETTINGS, **HASTE), store=str(tmp_path / "store"))
    monkeypatch.setattr(ModalExecutor, "call_ids", fail)
    handles = facade.launch_replicas(2, "atoll.testing.protocol_jobs:echo", {})
    assert [handle.metadata["call_id"] for handle in handles] == [None, None]
    assert [row["status"] for row in facade.collect(handles, timeout=60)] == ["succeeded"] * 2
