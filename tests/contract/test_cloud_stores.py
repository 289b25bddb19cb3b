"""The cloud store keeps the Store contract on S3 (SeaweedFS), Azure (Azurite) and GCS (our shim)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.stores.base import Store
from atoll.stores.cloud.store import CloudStore
from atoll.testing.store_contract import NewStore, StoreContract
from services.fault_proxy import Fault, FaultProxy, creates
from services.stores import Service

IMPATIENT = {"max_retries": 1, "retry_timeout_s": 5.0, "connect_timeout_s": 2.0}


class CloudContract(StoreContract):
    """What the three services have in common."""

    wrong_credentials: tuple[str, str]

    @pytest.fixture
    def service(self) -> Service:
        pytest.fail(f"{type(self).__name__} must define the fixture `service`")

    @pytest.fixture(autouse=True)
    def _environment(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)

    @pytest.fixture
    def new_store(self, service: Service) -> NewStore:
        place = service.new_place()
        return lambda name: CloudStore.from_uri(service.uri(f"{place}/{name}"))

    @pytest.fixture
    def proxy(self, service: Service) -> Iterator[FaultProxy]:
        with FaultProxy(service.endpoint) as proxy:
            yield proxy

    @pytest.fixture
    def proxied_store(self, service: Service, proxy: FaultProxy) -> Store:
        return CloudStore.from_uri(service.uri(service.new_place(), endpoint=proxy.url), **IMPATIENT)

    @pytest.fixture
    def refused_store(self, proxied_store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setenv(*self.wrong_credentials)
        return proxied_store

    @pytest.fixture
    def throttled_store(self, proxied_store: Store, proxy: FaultProxy) -> Store:
        proxy.faults.append(Fault(times=float("inf")))
        return proxied_store

    @pytest.fixture
    def unreachable_store(self, service: Service) -> Store:
        return CloudStore.from_uri(service.uri("bucket", endpoint="http://127.0.0.1:9/x"), **IMPATIENT)

    @pytest.fixture
    def conflicting_store(self, proxied_store: Store, proxy: FaultProxy) -> Store:
        proxy.faults.append(Fault(creates, status=409, code="ConditionalRequestConflict"))
        return proxied_store

    @pytest.fixture(params=["connection broken", "error after effect"])
    def answer_losing_store(self, request: pytest.FixtureRequest, proxied_store: Store, proxy: FaultProxy) -> Store:
        status = None if request.param == "connection broken" else 500
        proxy.faults.append(Fault(creates, status=status, code="InternalError", is_after_effect=True))
        return proxied_store


class TestS3Store(CloudContract):
    wrong_credentials = ("AWS_SECRET_ACCESS_KEY", "wrong")

    @pytest.fixture
    def service(self, seaweed: Service) -> Service:
        return seaweed


class TestAzureStore(CloudContract):
    wrong_credentials = ("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")

    @pytest.fixture
    def service(self, azurite: Service) -> Service:
        return azurite


class TestGcsStore(CloudContract):
    wrong_credentials = ("GOOGLE_BEARER_TOKEN", "wrong")

    @pytest.fixture
    def service(self, gcs: Service) -> Service:
        return gcs
