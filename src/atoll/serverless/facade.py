"""The five methods for any `Executor`. Each public executor only creates its adapter."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll._time import SYSTEM_CLOCK, Clock, Deadline
from atoll.context import RANK
from atoll.errors import ConfigError, WaitTimeout
from atoll.executors.base import Executor
from atoll.handle import RunHandle
from atoll.registry import open_store
from atoll.result import ReplicaOutcome
from atoll.runs.run import Run, prepare
from atoll.runs.stop import stop
from atoll.serverless.protocol import ReplicaHandle
from atoll.status import ReplicaState


class Facade:
    """Stateless: the handles contain all that later calls need."""

    backend_name: str
    supports_inter_replica_network: bool
    earlier_names: tuple[str, ...] = ()
    """Backend names in handles of earlier versions, which this facade reads too."""

    def __init__(
        self,
        executor: Executor,
        *,
        store: str | os.PathLike[str],
        run_id: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._executor, self._store, self._run_id, self._clock = executor, store, run_id, clock

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | None = None,
        timeout: float = 3600,
    ) -> list[ReplicaHandle]:
        if entrypoint_args is not None and not isinstance(entrypoint_args, Mapping):
            message = f"entrypoint_args is a mapping of names to JSON values, not {entrypoint_args!r}"
            raise ConfigError(message, reason="entrypoint_args")
        args = dict(entrypoint_args or {})
        rank_env = args.pop("rank_env", RANK)
        draft = prepare(
            _with_colon(entrypoint),
            on=self._executor,
            store=self._store,
            args=args,
            run_id=self._run_id,
            replicas=n_replicas,
            gpu=gpu,
            timeout_s=timeout,
            rank_env=rank_env,
        )
        run = draft.submit()
        metadata = {"run_id": run.id, "run": str(run.handle), "store": run.store.uri, "launch": run.launch}
        return [ReplicaHandle(rank, self.backend_name, dict(metadata)) for rank in range(n_replicas)]

    def poll(self, handle: ReplicaHandle) -> str:
        return str(self._run(handle).status(progress=False).replicas[handle.rank].state)

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        return "".join(f"{line}\n" for line in self._run(handle).logs(handle.rank, tail=n_lines))

    def cancel(self, handle: ReplicaHandle) -> None:
        self._check(handle)
        stop(str(handle.metadata["run"]), lambda: self._run(handle), lambda _: self._executor)

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        deadline = Deadline(timeout, self._clock)
        runs: dict[str, dict[int, dict[str, Any]]] = {}
        for handle in handles:
            name = str(handle.metadata.get("run"))
            if name not in runs:
                run = self._run(handle)
                rows = self._rows(run, None if timeout is None else deadline.remaining_s)
                runs[name] = {row["rank"]: row for row in rows}
        return [runs[str(handle.metadata.get("run"))][handle.rank] for handle in handles]

    def _rows(self, run: Run, timeout_s: float | None) -> list[dict[str, Any]]:
        native = {"run_id": run.id, "run": str(run.handle)}
        try:
            run.wait(timeout_s)
        except WaitTimeout as exc:
            # The run continues; the caller decides whether to cancel it or to collect again.
            status = run.status(progress=False)
            return [
                {
                    "rank": replica.rank,
                    "status": str(replica.state),
                    "exit_code": replica.exit_code,
                    "error": None if replica.state is ReplicaState.SUCCEEDED else exc.message,
                    "result": None,
                    **native,
                }
                for replica in status.replicas
            ]
        return [{**_row(outcome), **native} for outcome in run.result().outcomes]

    def _run(self, handle: ReplicaHandle) -> Run:
        """The run of a handle, found from the handle alone."""
        self._check(handle)
        from atoll.journal import read_run
        from atoll.spec import RunSpec

        store = open_store(handle.metadata["store"])
        spec = RunSpec.from_json(read_run(store, handle.metadata["run_id"])["spec"])
        if not isinstance(handle.rank, int) or not 0 <= handle.rank < spec.placement.replicas:
            raise ConfigError(f"rank {handle.rank}: run `{spec.run_id}` has {spec.placement.replicas} replicas")
        launch, run = handle.metadata.get("launch", 1), RunHandle.parse(handle.metadata["run"])
        return Run(spec, self._executor, store, run, self._clock, launch=launch)

    def _check(self, handle: ReplicaHandle) -> None:
        """Raise `ConfigError` if the handle is not one of this backend."""
        if handle.backend_name not in (self.backend_name, *self.earlier_names):
            raise ConfigError(
                f"the handle belongs to `{handle.backend_name}`, but this executor is `{self.backend_name}`"
            )
        missing = [name for name in ("run_id", "run", "store") if name not in handle.metadata]
        if missing:
            raise ConfigError(f"the handle has no {', '.join(missing)}; use handles that `launch_replicas` returned")


def _with_colon(entrypoint: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Accept `package.module.function`, too, as other tools write it."""
    if isinstance(entrypoint, str) and ":" not in entrypoint and not entrypoint.endswith(".py") and "." in entrypoint:
        module, _, function = entrypoint.rpartition(".")
        return f"{module}:{function}"
    return entrypoint


def _row(outcome: ReplicaOutcome) -> dict[str, Any]:
    error = None
    if outcome.state is not ReplicaState.SUCCEEDED:
        error = outcome.error.traceback if outcome.error and outcome.error.traceback else outcome.message
    return {
        "rank": outcome.rank,
        "status": str(outcome.state),
        "exit_code": outcome.exit_code,
        "error": error,
        "result": outcome.result,
        "reason": str(outcome.reason),
        "attempt": outcome.attempt,
    }
