"""SageMakerExecutor: the replica protocol on Amazon SageMaker, one training job for each replica."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from atoll._threads import Unanswered, answer_within
from atoll._time import Deadline
from atoll.context import RANK
from atoll.errors import BackendError, ConfigError
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.executors.sagemaker.machines import CPU_INSTANCE_TYPE, GPU_INSTANCE_TYPE, INSTANCE_TYPE, MACHINES
from atoll.executors.sagemaker.request import job_name
from atoll.handle import RunHandle
from atoll.runs.run import prepare
from atoll.serverless.facade import LEAST_S, Facade
from atoll.serverless.protocol import ReplicaHandle
from atoll.spec import Entry

_NEEDED = ("rendezvous_uri", "trainer_module", "trainer_fn")
_TAKEN = (*_NEEDED, "trainer_kwargs", "rank_env")
_CONTAINER = ("", "atoll.replica", "python -m atoll.replica")


class SageMakerExecutor(Facade):
    """Replicas are training jobs that exchange updates through S3. The image contains Atoll and the trainer."""

    backend_name = "sagemaker"
    supports_inter_replica_network = False

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
    ) -> None:
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
        )
        self._take(jobs, run_id)

    @classmethod
    def over(cls, jobs: SageMakerTrainingExecutor, *, run_id: str | None = None) -> SageMakerExecutor:
        """The protocol for an executor with any settings: spot, tags, subnets, …"""
        made = cls.__new__(cls)
        made._take(jobs, run_id)
        return made

    def _take(self, jobs: SageMakerTrainingExecutor, run_id: str | None) -> None:
        self._jobs = jobs
        super().__init__(jobs, store="", run_id=run_id)

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | None = None,
        timeout: float = 3600,
    ) -> list[ReplicaHandle]:
        """As in the protocol. The container runs `python -m atoll.replica` with these `entrypoint_args`:
        `rendezvous_uri`, `trainer_module`, `trainer_fn`, and optionally `trainer_kwargs` and `rank_env`.
        `gpu` is a name such as `A100` or `H100:8`, or an instance type such as `ml.p4d.24xlarge`.
        """
        args = _checked_args(entrypoint, entrypoint_args)
        executor, asked = self._for_gpu(gpu)
        draft = prepare(
            f"{args['trainer_module']}:{args['trainer_fn']}",
            on=executor,
            store=args["rendezvous_uri"],
            args=args.get("trainer_kwargs") or {},
            run_id=self._run_id,
            replicas=n_replicas,
            gpu=asked,
            timeout_s=timeout,
            rank_env=args.get("rank_env", RANK),
        )
        for note in draft.plan.notes:
            if note.startswith("warning: gpu="):
                warnings.warn(note.removeprefix("warning: "), stacklevel=2)
        run = draft.submit()
        metadata = {"run_id": run.id, "run": str(run.handle), "store": run.store.uri, "launch": run.launch}
        jobs = [job_name(run.handle.native_id, rank) for rank in range(n_replicas)]
        return [
            ReplicaHandle(rank, self.backend_name, {**metadata, "training_job_name": jobs[rank]})
            for rank in range(n_replicas)
        ]

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """As in the protocol, with `training_job_name` and, if SageMaker reports it, `billable_seconds`."""
        deadline = Deadline(timeout)
        rows = super().collect(handles, timeout=timeout)
        runs = {str(row["run"]) for row in rows}
        billed: dict[str, list[int | None]] = {}
        with suppress(Unanswered):
            left_s = None if timeout is None else max(deadline.remaining_s, LEAST_S)
            billed = answer_within(left_s, lambda: {run: self._billed(run) for run in runs})
        names = [handle.metadata.get("training_job_name") for handle in handles]
        return [
            {**row, "training_job_name": name, "billable_seconds": _nth(billed.get(str(row["run"])), row["rank"])}
            for row, name in zip(rows, names, strict=True)
        ]

    def _billed(self, run: str) -> list[int | None]:
        handle = RunHandle.parse(run)
        try:
            return self._jobs.billable_seconds(handle)
        except BackendError:  # the results are complete without it
            return [None] * handle.replicas

    def _for_gpu(self, gpu: str | None) -> tuple[SageMakerTrainingExecutor, str | None]:
        """An instance type given as a GPU becomes a setting; the executor interprets the names of GPUs."""
        if gpu is None or not INSTANCE_TYPE.match(gpu):
            return self._jobs, gpu
        if gpu in MACHINES:
            return self._jobs.with_settings(instance_type=gpu), f"any:{MACHINES[gpu].gpus}"
        return self._jobs.with_settings(cpu_instance_type=gpu), None


def _nth(seconds: list[int | None] | None, rank: int) -> int | None:
    return None if seconds is None else seconds[rank]


def _checked_args(entrypoint: str | Callable[..., Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments; `ConfigError` if one is missing or unknown."""
    args = dict(given or {})
    problems = [f"`{name}` is missing" for name in _NEEDED if not args.get(name)]
    problems += [f"`{name}` is not known; pass it in `trainer_kwargs`" for name in args if name not in _TAKEN]
    if not isinstance(args.get("trainer_kwargs") or {}, Mapping):
        problems.append("`trainer_kwargs` is a mapping of names to JSON values")
    named = _function_of(entrypoint)
    trainer = f"{args.get('trainer_module')}:{args.get('trainer_fn')}"
    if not problems and named is not None and named != trainer:
        problems.append(f"entrypoint `{named}` is not `{trainer}`; name the same function in both")
    if problems:
        raise ConfigError(
            f"entrypoint_args of SageMakerExecutor: {'; '.join(problems)}",
            hint="pass {'rendezvous_uri': 's3://bucket/exp', 'trainer_module': 'train', 'trainer_fn': 'main', "
            "'trainer_kwargs': {...}}",
        )
    return args


def _function_of(entrypoint: str | Callable[..., Any]) -> str | None:
    """The function that `entrypoint` names; None if it names only the command of the container."""
    if callable(entrypoint):
        try:
            return str(Entry.of(entrypoint))
        except ValueError as exc:
            message = f"SageMaker runs code of its image, not this callable: {exc}"
            raise ConfigError(message, reason="callable") from exc
    if entrypoint in _CONTAINER or ("." not in entrypoint and ":" not in entrypoint):
        return None
    if ":" in entrypoint:
        return entrypoint
    module, _, function = entrypoint.rpartition(".")
    return f"{module}:{function}"
