"""HFJobsExecutor: the replica protocol on Hugging Face Jobs, one job for each replica."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from atoll.errors import BackendError, UnknownName
from atoll.executors.base import Executor
from atoll.executors.hf_jobs.executor import HubJobsExecutor
from atoll.runs.prepare import Draft
from atoll.runs.run import Run
from atoll.serverless.facade import SettingsFacade, arguments_named, keeps_arguments
from atoll.serverless.forms import Form
from atoll.serverless.handles import Replica
from atoll.spec import Gpu


class HFJobsExecutor(SettingsFacade):
    """Replicas are jobs that exchange updates through a bucket. The image contains Atoll and the code.

    `gpu` of a launch is a name such as `A100` or `H200:8`, or a flavor such as `a10g-small`. Without `namespace`, the
    user of the token pays. `secrets` names variables of this process, such as the credentials of the store.
    """

    backend_name = "hf_jobs"
    _executor: HubJobsExecutor

    @keeps_arguments
    def __init__(
        self,
        image: str,
        *,
        namespace: str | None = None,
        flavor: str | None = None,
        secrets: Sequence[str] = (),
        token: str | None = None,
        run_id: str | None = None,
        store: str | os.PathLike[str] | None = None,
        idempotency_key: str | None = None,
        client: Any = None,
    ) -> None:
        with arguments_named(type(self).__name__, self.argument_names, HubJobsExecutor.name):
            jobs = HubJobsExecutor(
                image=image, namespace=namespace, flavor=flavor, secrets=secrets, token=token, client=client
            )
        self._use(jobs, store=store, run_id=run_id, idempotency_key=idempotency_key)

    def _for_launch(self, gpu: str | None, form: Form) -> tuple[Executor, dict[str, Any]]:  # noqa: ARG002  no command
        """A flavor given as a GPU becomes a setting; the executor interprets the names of GPUs."""
        jobs = self._in_namespace()
        if not isinstance(gpu, str):
            return jobs, {"gpu": gpu}
        with suppress(UnknownName, ValueError):
            Gpu.parse(gpu)
            return jobs, {"gpu": gpu}
        if any(machine.flavor == gpu for machine in jobs.hardware("plan")):
            return jobs.with_settings(flavor=gpu), {"gpu": None}
        return jobs, {"gpu": gpu}

    def _in_namespace(self) -> HubJobsExecutor:
        """The executor with a namespace: that of the user of the token, if none was given."""
        if self._executor.settings.namespace is None:
            self._executor = self._executor.with_settings(namespace=str(self._executor.whoami()["name"]))
        return self._executor

    def _warnings(self, draft: Draft) -> list[str]:
        if draft.spec.placement.gpu is None or not isinstance(draft.executor, HubJobsExecutor):
            return []
        mark = "warning: "
        return [note.removeprefix(mark) for note in draft.executor.prices(draft.plan) if note.startswith(mark)]

    def _native(self, run: Run, ranks: Sequence[int]) -> list[dict[str, Any]]:
        found: list[str | None] = [None for _ in ranks]
        with suppress(BackendError):  # the replicas run already, and handles work without it
            found = self._executor.job_ids(run.handle)
        return [{"job_id": found[rank]} for rank in ranks]

    def _details(self, replica: Replica, ranks: Sequence[int]) -> list[dict[str, Any]]:
        return self._executor.details(replica.run, ranks)
