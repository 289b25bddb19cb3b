"""An fsspec file system that can `create` keeps the Store contract; here s3fs on a real S3 server."""

from __future__ import annotations

import pytest

from atoll.registry import known
from atoll.testing.store_contract import NewStore, StoreContract
from services.stores import Service

pytest.importorskip("s3fs", minversion="2025.3", reason="needs s3fs, whose botocore pin does not fit our other tools")


@pytest.mark.skipif("s3a" not in known("store"), reason="no registry row sends s3a:// to fsspec")
class TestFsspecStore(StoreContract):
    why_no_faults = "fsspec has no place for an owner's mark, and its errors are each file system's own"

    @pytest.fixture(autouse=True)
    def _environment(self, seaweed: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {**seaweed.environment, "AWS_ENDPOINT_URL": seaweed.endpoint}.items():
            monkeypatch.setenv(name, value)

    @pytest.fixture
    def new_store(self, seaweed: Service) -> NewStore:
        from atoll.stores.fsspec import FsspecStore

        place = seaweed.new_place()
        return lambda name: FsspecStore(f"s3a://{place}/{name}")
