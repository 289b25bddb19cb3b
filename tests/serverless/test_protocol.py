"""Every facade of the package keeps the replica protocol, statement by statement."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll import serverless
from atoll.serverless import FACADES
from atoll.testing.protocol_contract import STATEMENTS, FacadeBench, LocalFacadeBench, ProtocolContract
from services.hf_jobs.facade_bench import HFJobsFacadeBench
from services.hf_jobs.facade_bench import hasten as hasten_hf_jobs
from services.kubernetes.facade_bench import EKSFacadeBench
from services.kubernetes.mcad_facade_bench import MCADFacadeBench
from services.modal.facade_bench import ModalFacadeBench
from services.modal.facade_bench import hasten as hasten_modal
from services.peer_bench import enter
from services.sagemaker.facade_bench import SageMakerFacadeBench, hasten

pytestmark = [pytest.mark.process, pytest.mark.server]


class TestLocalProcess(ProtocolContract):
    path = "atoll.serverless.local:LocalProcessExecutor"

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory) -> FacadeBench:
        return LocalFacadeBench.below(tmp_path_factory.mktemp("local"))


class TestSageMaker(ProtocolContract):
    path = "atoll.serverless.sagemaker:SageMakerExecutor"

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory, shared_peer) -> Iterator[FacadeBench]:
        with pytest.MonkeyPatch.context() as patch:
            hasten(patch)
            enter(patch, shared_peer)
            for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
                patch.delenv(name, raising=False)
            yield SageMakerFacadeBench.below(tmp_path_factory.mktemp("sagemaker"), shared_peer)
        shared_peer.reset()


class TestEKS(ProtocolContract):
    path = "atoll.serverless.eks:EKSExecutor"

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory, shared_cluster) -> Iterator[FacadeBench]:
        with EKSFacadeBench.below(tmp_path_factory.mktemp("eks"), shared_cluster) as bench:
            yield bench


class TestMCAD(ProtocolContract):
    """On the real AppWrapper controller, and so under `make test-controllers`."""

    path = "atoll.serverless.mcad:MCADExecutor"

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory, shared_queue_cluster) -> Iterator[FacadeBench]:
        with MCADFacadeBench.below(tmp_path_factory.mktemp("mcad"), shared_queue_cluster) as bench:
            yield bench


class TestHFJobs(ProtocolContract):
    path = "atoll.serverless.hf_jobs:HFJobsExecutor"

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory, shared_hub) -> Iterator[FacadeBench]:
        with pytest.MonkeyPatch.context() as patch:
            hasten_hf_jobs(patch)
            enter(patch, shared_hub)
            yield HFJobsFacadeBench.below(tmp_path_factory.mktemp("hf_jobs"), shared_hub)
        shared_hub.reset()


class TestModal(ProtocolContract):
    path = "atoll.serverless.modal:ModalSpawnExecutor"

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory, shared_modal_peer) -> Iterator[FacadeBench]:
        with pytest.MonkeyPatch.context() as patch:
            hasten_modal(patch)
            enter(patch, shared_modal_peer)
            yield ModalFacadeBench.below(tmp_path_factory.mktemp("modal"), shared_modal_peer)
        shared_modal_peer.reset()


def test_every_registered_facade_is_tested():
    classes = ProtocolContract.__subclasses__()
    assert sorted(each.path for each in classes) == sorted(FACADES.values())


@pytest.mark.parametrize("name", FACADES)
def test_a_facade_is_registered_under_its_backend_name(name):
    module, _, attribute = FACADES[name].partition(":")
    facade = getattr(serverless, attribute)
    assert facade.__module__ == module
    assert facade.backend_name == name


def test_an_alias_leads_to_the_same_class():
    assert ("eks" in FACADES) == hasattr(serverless, "K8sExecutor")
    assert getattr(serverless, "K8sExecutor", None) is getattr(serverless, "EKSExecutor", None)


def test_modal_has_a_short_name():
    assert serverless.ModalExecutor is serverless.ModalSpawnExecutor


def test_every_statement_has_a_test():
    numbers = {int(name[6:8]) for name in dir(ProtocolContract) if name.startswith("test_p")}
    assert numbers == {0, *STATEMENTS}
