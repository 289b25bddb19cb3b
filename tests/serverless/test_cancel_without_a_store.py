"""`cancel` of the replica protocol does not wait for a store that hangs."""

from __future__ import annotations

import threading

import pytest

from atoll.serverless import LocalProcessExecutor

pytestmark = pytest.mark.process


def test_cancel_stops_the_replicas_though_the_store_never_answers(tmp_path, monkeypatch):
    executor = LocalProcessExecutor(store=tmp_path / "store", root=tmp_path / "spools")
    (handle,) = executor.launch_replicas(1, "atoll.testing.contract_jobs:hold", {}, timeout=600)
    hangs = threading.Event()
    monkeypatch.setattr("atoll.serverless.facade.RECORD_TIMEOUT_S", 0.2)
    monkeypatch.setattr("atoll.serverless.facade.open_store", lambda _uri: hangs.wait(60))
    executor.cancel(handle)
    monkeypatch.undo()
    hangs.set()
    assert executor.poll(handle) == "cancelled"
