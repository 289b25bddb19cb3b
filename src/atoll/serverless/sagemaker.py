"""SageMakerExecutor: the replica protocol on Amazon SageMaker, one training job for each replica."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from atoll.executors.base import Executor
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.executors.sagemaker.machines import CPU_INSTANCE_TYPE, GPU_INSTANCE_TYPE, INSTANCE_TYPE, MACHINES
from atoll.executors.sagemaker.request import job_name
from atoll.runs.prepare import Draft
from atoll.runs.run import Run
from atoll.serverless.facade import SettingsFacade, arguments_named, keeps_arguments
from atoll.serverless.forms import Form
from atoll.serverless.handles import Replica


class SageMakerExecutor(SettingsFacade):
    """Replicas are training jobs that exchange updates through S3. The image contains Atoll and the code.

    `gpu` of a launch is a name such as `A100` or `H100:8`, or an instance type such as `ml.p4d.24xlarge`.
    """

    backend_name = "sagemaker"
    _executor: SageMakerTrainingExecutor

    @keeps_arguments
    def __init__(
        self,
        *,
        role_arn: str,
        image_uri: str,
        output_s3_path: str,
        instance_type: str = GPU_INSTANCE_TYPE,
        cpu_instance_type: str = CPU_INSTANCE_TYPE,
        volume_size_gb: int = 100,
        run_id: str | None = None,
        region: str | None = None,
        sagemaker_client: Any = None,
        logs_client: Any = None,
        store_is_mounted: bool = False,
        store: str | os.PathLike[str] | None = None,
        idempotency_key: str | None = None,
        command: Sequence[str] = (),
    ) -> None:
        with arguments_named(type(self).__name__, self.argument_names, SageMakerTrainingExecutor.name):
            jobs = SageMakerTrainingExecutor(
                role_arn=role_arn,
                image_uri=image_uri,
                output_s3_path=output_s3_path,
                # A default is no choice of the user, so it does not contradict the GPU of a launch.
                instance_type=None if instance_type == GPU_INSTANCE_TYPE else instance_type,
                cpu_instance_type=None if cpu_instance_type == CPU_INSTANCE_TYPE else cpu_instance_type,
                volume_size_gb=volume_size_gb,
                region=region,
                sagemaker_client=sagemaker_client,
                logs_client=logs_client,
                store_is_mounted=store_is_mounted,
                command=command,
            )
        self._use(jobs, store=store, run_id=run_id, idempotency_key=idempotency_key, command=command)

    def _for_launch(self, gpu: str | None, form: Form) -> tuple[Executor, dict[str, Any]]:  # noqa: ARG002
        """An instance type given as a GPU becomes a setting; the executor interprets the names of GPUs."""
        if not isinstance(gpu, str) or not INSTANCE_TYPE.match(gpu):
            return self._executor, {"gpu": gpu}
        if gpu in MACHINES:
            return self._executor.with_settings(instance_type=gpu), {"gpu": f"any:{MACHINES[gpu].gpus}"}
        return self._executor.with_settings(cpu_instance_type=gpu), {"gpu": None}

    def _warnings(self, draft: Draft) -> list[str]:
        mark = "warning: "
        return [note.removeprefix(mark) for note in draft.plan.notes if note.startswith(f"{mark}gpu=")]

    def _native(self, run: Run, ranks: Sequence[int]) -> list[dict[str, Any]]:
        return [{"training_job_name": job_name(run.handle.native_id, rank)} for rank in ranks]

    def _details(self, replica: Replica, ranks: Sequence[int]) -> list[dict[str, Any]]:
        return self._executor.details(replica.run, ranks)
