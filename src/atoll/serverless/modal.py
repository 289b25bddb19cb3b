"""ModalSpawnExecutor: the replica protocol on Modal, one call of a deployed function for each replica."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

from atoll.errors import BackendError, StoreError
from atoll.executors.modal.executor import ModalExecutor
from atoll.runs.run import Run
from atoll.serverless.facade import SettingsFacade, arguments_named, keeps_arguments
from atoll.serverless.protocol import ReplicaHandle


class ModalSpawnExecutor(SettingsFacade):
    """Replicas are calls of the function that `atoll deploy modal` deploys. `volumes` is path -> name of a volume.

    `gpu` of a launch is a name such as `H100` or `A10G:2`.
    """

    backend_name = "modal"
    argument_names: ClassVar[Mapping[str, str]] = {"app": "app_name"}
    _executor: ModalExecutor

    @keeps_arguments
    def __init__(
        self,
        app_name: str = "atoll",
        *,
        function: str = "replica",
        environment: str | None = None,
        image: str | None = None,
        secrets: Sequence[str] = (),
        volumes: Mapping[str, str] | None = None,
        region: str | None = None,
        run_id: str | None = None,
        store: str | os.PathLike[str] | None = None,
        idempotency_key: str | None = None,
        client: Any = None,
    ) -> None:
        with arguments_named(type(self).__name__, self.argument_names, ModalExecutor.name):
            calls = ModalExecutor(
                app=app_name,
                function=function,
                environment=environment,
                image=image,
                secrets=secrets,
                volumes=volumes or {},
                region=region,
                client=client,
            )
        self._use(calls, store=store, run_id=run_id, idempotency_key=idempotency_key)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Stop this replica. The call id in its handle makes that possible also while the store does not answer."""
        replica = self._replica(handle)
        call_id = replica.native.get("call_id")
        with self._executor.knowing_call(replica.run, replica.rank, call_id) if call_id else nullcontext():
            super().cancel(handle)

    def _native(self, run: Run, ranks: Sequence[int]) -> list[dict[str, Any]]:
        found: list[str | None] = [None for _ in ranks]
        with suppress(BackendError, StoreError):  # the replicas run already, and handles work without it
            found = self._executor.call_ids(run.handle, ranks)
        return [{"call_id": call_id} for call_id in found]
