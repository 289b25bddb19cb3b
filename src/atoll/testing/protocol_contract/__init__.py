"""The replica protocol as tests: subclass `ProtocolContract`, give it a `bench` fixture, and pytest does the rest.

    class TestSlurm(ProtocolContract):
        path = "my_package.slurm:SlurmReplicas"

        @pytest.fixture(scope="class")
        @classmethod
        def bench(cls, tmp_path_factory):
            return SlurmFacadeBench(cls.path, tmp_path_factory.mktemp("slurm"), {"partition": "test"})

The tests use only the protocol: the constructor, the five methods, handles and rows. The name of each test begins with
the number of its statement; `docs/replica-protocol.md` explains them.

    P1   two ways to say what runs: a function, or a trainer; anything else is refused.
    P2   the variables of a replica: `REPLICA_RANK`, `WORLD_SIZE`, `RENDEZVOUS_URI`, and the one that `rank_env` names.
    P3   the store is `rendezvous_uri`, else `store=`, else `ATOLL_STORE`; only the local facade has a default.
    P4   with an own `command`, scalar arguments are upper-cased variables; everything else is refused.
    P5   every launch is a new run, unless `idempotency_key=` names an earlier one.
    P6   wrong input is a `ValueError` or `TypeError`, a failed launch a `RuntimeError`; both are Atoll's errors too.
    P7   injected clients need no SDK; a missing call is refused by its name.
    P8   constructor arguments are attributes.
    P9   `cancel` stops that replica, or all of them where the backend can only do that.
    P10  an unknown handle raises nothing: it is `lost`. A malformed or foreign handle raises.
    P11  `collect` waits for its handles only, of one run or several, and keeps their order.
    P12  at the deadline of `collect` each replica has its real row or its current state, and nothing is stopped.
    P13  the fields of a row.
    P14  values that are not JSON are converted, or kept as text with a warning; arguments are converted or refused.
    P15  `stream_logs` returns the replica's lines, or one line in angle brackets that says why there are none.
    P16  `metadata` is JSON: native ids, `submit_ts`, `links`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from atoll.testing.protocol_contract.bench import FacadeBench, LocalFacadeBench
from atoll.testing.protocol_contract.collect import CollectStatements
from atoll.testing.protocol_contract.gallery import Gallery, Held, write_modules
from atoll.testing.protocol_contract.launch import LaunchStatements
from atoll.testing.protocol_contract.logs_and_metadata import LogStatements
from atoll.testing.protocol_contract.poll_and_cancel import CancelStatements
from atoll.testing.protocol_contract.refusals import RefusalStatements

__all__ = ["FacadeBench", "LocalFacadeBench", "ProtocolContract"]

STATEMENTS = range(1, 17)


class ProtocolContract(LaunchStatements, RefusalStatements, CancelStatements, CollectStatements, LogStatements):
    """Statements P1 to P16. Subclasses define `path` and the fixture `bench`, which closes what it opened."""

    path: ClassVar[str]
    """`module:Class`, as in `atoll.serverless.FACADES`."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls) -> FacadeBench:
        """A bench for all tests of the class."""
        pytest.fail(f"{cls.__name__} must define the fixture `bench`")

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _modules(cls, bench: FacadeBench) -> Iterator[None]:
        """Write the suite's modules where this process and the replicas import them. At the end nothing may run."""
        assert bench.path == cls.path, f"{cls.__name__} tests {cls.path}, but its bench builds {bench.path}"
        write_modules(bench.folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(bench.folder))
            patch.setenv("PYTHONPATH", str(bench.folder), prepend=":")
            patch.delenv("ATOLL_STORE", raising=False)
            patch.setenv("ATOLL_HOME", str(bench.folder / "home"))
            yield
        assert bench.running() == [], "replicas are left behind"

    @pytest.fixture(scope="class")
    @classmethod
    def gallery(cls, bench: FacadeBench, _modules: None) -> Gallery:
        """Runs of every kind, launched together and collected in one call."""
        return Gallery(bench)

    @pytest.fixture(scope="class")
    @classmethod
    def held(cls, bench: FacadeBench, _modules: None) -> Held:
        """A run with replicas that ended and replicas that hold, and what each call returned."""
        return Held(bench)
