"""LocalExecutor: replicas are process groups on this machine.

`submit` starts one supervisor (`atoll.replica.supervisor`) for each run; it outlives the launcher. All other verbs read
the run's spool, so any process on this machine can use a handle.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from atoll import disk
from atoll._time import SYSTEM_CLOCK, Clock, Deadline
from atoll.context import RESERVED, RunContext, home
from atoll.errors import (
    BackendError,
    Conflict,
    InvalidSpec,
    Problems,
    RunNotFound,
    StopFailed,
    SubmitError,
    Unsupported,
)
from atoll.executors.base import OTHER_MACHINE, Capabilities, Check, Plan, Stray, ranks_to_stop
from atoll.executors.local import gpus
from atoll.executors.local.logs import follow_lines, last_lines, lines
from atoll.executors.local.request import CAPABILITIES, local_request, local_status, with_problem
from atoll.executors.secrets import secret_values
from atoll.executors.undo import submit_or_stop
from atoll.handle import RunHandle
from atoll.replica import processes
from atoll.replica.spool import Spool, read_json
from atoll.spec import Placement
from atoll.status import ReplicaStatus, RunStatus
from atoll.validation import CLOCK, FUNCTION, PATH, checks_settings

_READY_S = 60.0
_STOP_S = 150.0
"""Time beyond the grace in which the uploader may store the outcomes."""
_POLL_S = 0.01
_EXIT_S = 5.0
_ROOT_HINT = "set `root` below `[executors.local]` in atoll.toml, or ATOLL_HOME, to a folder you can write to"

log = logging.getLogger("atoll.executors")


class LocalExecutor:
    """Runs replicas on this machine. `root` holds their spools; by default it is below `ATOLL_HOME`."""

    name: ClassVar[str] = "local"
    capabilities: ClassVar[Capabilities] = CAPABILITIES

    @checks_settings
    def __init__(
        self,
        *,
        root: Annotated[str | os.PathLike[str], PATH] | None = None,
        devices: Annotated[Callable[[], Sequence[gpus.Device]], FUNCTION] = gpus.present,
        clock: Annotated[Clock, CLOCK] = SYSTEM_CLOCK,
    ) -> None:
        self._root = Path(root).absolute() if root is not None else home() / "local"
        self._devices = devices
        self._clock = clock

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        request, problems = local_request(context, placement, self._root, self._devices)
        if problems:
            raise Unsupported(self.name, context.run_id, problems)
        return Plan(self.name, context.run_id, placement.replicas, request)

    def preflight(self, plan: Plan) -> None:
        problems = Problems()
        problems.trying(lambda: secret_values(plan.request["secrets"]))
        problems.trying(lambda: _check_root(self._root))
        problems.raise_any(f"run `{plan.run_id}`")

    def handle(self, plan: Plan) -> RunHandle:
        return _handle(Spool(plan.request["label"]), plan.request["ranks"])

    def submit(self, plan: Plan) -> RunHandle:
        return submit_or_stop(self, plan)

    def start(self, plan: Plan) -> RunHandle:
        spool = Spool(plan.request["label"])
        secrets = secret_values(plan.request["secrets"])
        try:
            _write_plan(spool, plan)
            if not spool.status.exists() and spool.supervisor_pid() is None:
                _start_supervisor(plan, spool, secrets)
            else:
                log.info("run `%s`: already started, adopted", plan.run_id)
        except OSError as exc:
            message = f"cannot start run `{plan.run_id}` in {spool.root}: {exc}"
            raise BackendError(message, executor=self.name, operation="submit") from exc
        return self.handle(plan)

    def status(self, handle: RunHandle) -> RunStatus:
        spool = self._spool(handle)
        if not spool.plan.exists():
            return RunStatus.lost(handle.replicas, f"run `{handle.native_id}` is no longer on this machine")
        # In this order: a supervisor that ends between the two reads has written its last status before it ended.
        supervisor_runs = spool.supervisor_pid() is not None
        cancel_requested = spool.cancel.exists()
        rows = read_json(spool.status)
        ranks, first = range(handle.replicas), handle.first_rank
        marked = [r for r in ranks if rows is None and not cancel_requested and spool.cancel_rank(first + r).exists()]
        status = local_status(
            handle.replicas,
            rows,
            supervisor_runs=supervisor_runs,
            cancelled=ranks if cancel_requested else marked,
            first_rank=first,
        )
        if status.is_terminal and supervisor_runs:
            # The supervisor is about to exit. Wait for that: when this returns a terminal status, nothing runs.
            deadline = Deadline(_EXIT_S, self._clock)
            while spool.supervisor_pid() is not None and not deadline.is_past:
                self._clock.sleep(0.001)
        return with_problem(status, disk.problem_of(spool.root))

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        chosen = ranks_to_stop(self, handle, ranks)
        spool = self._spool(handle)
        if len(chosen) < handle.replicas:
            self._cancel_ranks(handle, spool, chosen)
            return
        if spool.plan.exists():
            _request_cancel(spool, spool.cancel)
            self._stop_supervisor(spool)
        if left := processes.kill_all(str(spool.root)):
            problems = {f"process {pid}": "does not end after SIGKILL" for pid in left}
            raise StopFailed(f"run `{handle.native_id}`", problems, executor=self.name)

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        spool = self._spool(handle)
        if not spool.plan.exists() or not 0 <= rank < handle.replicas:
            raise RunNotFound(
                f"this machine has no log of rank {rank} of run `{handle.native_id}`",
                executor=self.name,
                operation="logs",
            )
        number = handle.first_rank + rank
        attempts = spool.attempts(number)
        if not follow:
            path = spool.attempt(number, attempts[-1]).log if attempts else None
            return iter(()) if path is None else iter(last_lines(path, tail)) if tail is not None else lines(path)
        return follow_lines(
            lambda attempt: spool.attempt(number, attempt).log,
            first=attempts[-1] if attempts else 0,
            tail=tail,
            current=lambda: self.status(handle).replicas[rank],
            clock=self._clock,
        )

    def origin(self, handle: RunHandle) -> RunContext | None:
        plan = read_json(self._spool(handle).plan)
        return None if plan is None else _context(plan)

    def first_processes(self, handle: RunHandle) -> dict[int, tuple[int | None, float | None]]:
        """The first process of each rank and when it started, also after the end; empty if there is no record."""
        found = read_json(self._spool(handle).started) or {}
        first = handle.first_rank
        return {int(rank) - first: (pid, started_at) for rank, (pid, started_at) in found.items()}

    def strays(self) -> list[Stray]:
        """Processes on this machine with the label of a run: those without a supervisor, and one for each other run."""
        found: list[Stray] = []
        supervised: set[str] = set()
        for pid, label in processes.labelled():
            spool = Spool(label)
            if spool.root.parent != self._root or (spool.plan.exists() and not spool.status.exists()):
                continue  # not below this root, or its supervisor is starting and has no replicas yet
            supervisor = spool.supervisor_pid()
            if supervisor is None and not processes.is_dead(pid):
                ranks = (read_json(spool.plan) or {}).get("ranks", [0])
                message = f"process {pid} of a run whose supervisor has died"
                found.append(Stray(_handle(spool, ranks), str(pid), message))
            elif supervisor is not None and label not in supervised and (plan := read_json(spool.plan)):
                supervised.add(label)
                context = _context(plan)
                handle, message = _handle(spool, plan["ranks"]), f"run `{context.run_id}` of this machine"
                found.append(Stray(handle, f"supervisor {supervisor}", message, context))
        return found

    def diagnose(self) -> list[Check]:
        devices = self._devices()
        linux = sys.platform == "linux"
        return [
            Check("platform", linux, sys.platform, "" if linux else "local runs need Linux"),
            _writable(self._root),
            Check(
                "gpus",
                True,
                ", ".join(f"{d.name} ({d.uuid})" for d in devices) or "none; only runs with `gpu` need one",
            ),
            Check("cores", True, f"{len(os.sched_getaffinity(0))} usable"),
        ]

    def _spool(self, handle: RunHandle) -> Spool:
        here = socket.gethostname()
        if handle.scope != here:
            raise BackendError(
                f"run `{handle.native_id}` is on machine `{handle.scope}`, and this is `{here}`",
                executor=self.name,
                reason=OTHER_MACHINE,
                hint="use it on that machine, or read its logs and results from the store: `--store URI`",
            )
        return Spool(f"/{handle.native_id}")

    def _cancel_ranks(self, handle: RunHandle, spool: Spool, ranks: Sequence[int]) -> None:
        """Stop these ranks, and return when none of their processes runs; the supervisor and the others go on."""
        if not spool.plan.exists():
            return
        problems: dict[str, str] = {}
        first = handle.first_rank
        for rank in ranks:
            if not _request_cancel(spool, spool.cancel_rank(first + rank)):
                problems[f"rank {rank}"] = f"its cancellation cannot be written to {spool.root}: the disk is full"
        asked = [rank for rank in ranks if f"rank {rank}" not in problems]
        for replica in self._wait_until_settled(handle, spool, asked):
            problems[f"rank {replica.rank}"] = f"process {replica.native_id} does not end"
        left = processes.kill_found(partial(_processes_of, spool, [first + rank for rank in asked]))
        problems |= {f"process {pid}": "does not end after SIGKILL" for pid in left}
        if problems:
            raise StopFailed(f"run `{handle.native_id}`", problems, executor=self.name)

    def _wait_until_settled(self, handle: RunHandle, spool: Spool, ranks: Sequence[int]) -> list[ReplicaStatus]:
        """Signal the supervisor until it has ended these ranks. Returns those that may still run."""
        deadline = Deadline(float(read_json(spool.plan)["grace_s"]) + _STOP_S, self._clock)
        signal_again = Deadline(0.0, self._clock)
        while (pid := spool.supervisor_pid()) is not None:
            # Before its first status, the supervisor does not handle signals yet; it looks for the marks after that.
            is_ready = spool.status.exists()
            replicas = self.status(handle).replicas
            left = [replicas[rank] for rank in ranks if not replicas[rank].state.is_terminal]
            if not left or deadline.is_past:
                return left
            if is_ready and signal_again.is_past:
                _send(pid, signal.SIGHUP)
                _send(pid, signal.SIGCONT)  # it may be suspended
                signal_again = Deadline(1.0, self._clock)
            self._clock.sleep(_POLL_S)
        return []

    def _stop_supervisor(self, spool: Spool) -> None:
        """Signal the supervisor until it has exited; it ends every replica within the grace."""
        deadline = Deadline(float(read_json(spool.plan)["grace_s"]) + _STOP_S, self._clock)
        signal_again = Deadline(0.0, self._clock)
        while (pid := spool.supervisor_pid()) is not None:
            if deadline.is_past:
                log.warning("the supervisor in %s does not stop; sending SIGKILL", spool.root)
                _send(pid, signal.SIGKILL)  # the kernel kills every replica with it
            elif signal_again.is_past:
                _send(pid, signal.SIGUSR1)
                _send(pid, signal.SIGCONT)  # it may be suspended
                signal_again = Deadline(1.0, self._clock)
            self._clock.sleep(_POLL_S)


def _handle(spool: Spool, ranks: Sequence[int]) -> RunHandle:
    """The handle has the whole path, so it does not depend on ATOLL_HOME."""
    path = str(spool.root).removeprefix("/")
    return RunHandle(LocalExecutor.name, socket.gethostname(), path, len(ranks), ranks[0])


def _context(plan: Mapping[str, Any]) -> RunContext:
    """The run of the plan of a spool."""
    found = RunContext.from_variables(plan["environment"])
    assert found is not None
    return found[0]


def _write_plan(spool: Spool, plan: Plan) -> None:
    """Write the plan to the spool. If a different plan is there, raise `Conflict`."""
    spool.root.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plan.request, ensure_ascii=False, sort_keys=True)
    fresh = spool.root / f".plan.{os.getpid()}.{os.urandom(4).hex()}"
    fresh.write_text(text, encoding="utf-8")
    try:
        os.link(fresh, spool.plan)
    except FileExistsError:
        present = read_json(spool.plan)
        wanted = json.loads(text)
        # The command is not compared: `python train.py` and `atoll` may name the same interpreter differently.
        differing = [name for name in sorted(wanted) if name != "command" and present.get(name) != wanted[name]]
        if differing:
            raise Conflict(
                plan.run_id, [f"{n}: there `{present.get(n)}`, here `{wanted[n]}`" for n in differing]
            ) from None
    finally:
        fresh.unlink()


def _start_supervisor(plan: Plan, spool: Spool, secrets: Mapping[str, str]) -> None:
    """Start the supervisor and wait until it has started every replica. It leaves this session by itself."""
    inherited = {name: value for name, value in os.environ.items() if name not in RESERVED}
    environment = {**inherited, **plan.request["environment"], **secrets}
    ready_read, ready_write = os.pipe()
    with open(ready_read, "rb") as ready, open(spool.log, "ab") as output:
        try:
            process = subprocess.Popen(
                [*plan.request["command"], str(ready_write)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[ready_write],
                start_new_session=True,
            )
        finally:
            os.close(ready_write)
        poll = select.poll()  # not `select`, which fails in a process with more than 1024 open files
        poll.register(ready, select.POLLIN)
        answer = ready.read(3) if poll.poll(_READY_S * 1000) else b""
        process.wait(_READY_S)
    if answer != b"ok\n":
        left = [f"process {pid}" for pid in processes.kill_all(str(spool.root))]
        output_lines = " / ".join(last_lines(spool.log, 3))
        message = f"the supervisor of run `{plan.run_id}` did not start: {output_lines}"
        raise SubmitError(message, left_running=left, created=[str(spool.root)], executor=LocalExecutor.name)
    log.debug("run `%s`: supervisor started in %s", plan.run_id, spool.root)


def _request_cancel(spool: Spool, mark: Path) -> bool:
    """Create the mark that the supervisor looks for. False if the disk is full.

    Then a cancel of the whole run goes on, because the signal is enough for that.
    """
    try:
        mark.touch()
    except OSError:
        try:
            spool.reserve.unlink(missing_ok=True)
            mark.touch()
        except OSError:
            return False
    return True


def _processes_of(spool: Spool, ranks: Sequence[int]) -> list[int]:
    """Processes of these ranks that the supervisor has not ended, because it died or because they left their group."""
    rows = read_json(spool.status) or []
    pids = {int(row["native_id"]) for row in rows if row["rank"] in ranks and row["native_id"] is not None}
    forked = [pid for pid in processes.of_label(str(spool.root)) if pid in pids] if pids else []
    forked += [pid for pid in pids if processes.is_exiting(pid)]
    return [*forked, *processes.below({spool.attempts_folder(rank) for rank in ranks})]


def _send(pid: int, number: signal.Signals) -> None:
    if pid <= 0:  # the kernel reports so a process of another pid namespace; `kill` would signal our own group
        message = "the run's supervisor is in another container of this machine"
        raise BackendError(message, executor=LocalExecutor.name, operation="cancel", reason="pid_namespace")
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just exited


def _check_root(root: Path) -> None:
    """Raise `InvalidSpec` if the folder of the spools cannot be created or written."""
    present = next(folder for folder in (root, *root.parents) if os.path.exists(folder))
    why = None
    try:
        os.stat(root)
    except FileNotFoundError:
        pass
    except OSError as exc:
        why = str(exc.strerror)
    if not present.is_dir():
        why = f"`{present}` is not a folder"
    elif not os.access(present, os.W_OK | os.X_OK):
        why = f"`{present}` cannot be written"
    if why is not None:
        raise InvalidSpec("the configuration of executor `local`", [f"root=`{root}`: {why}"], hint=_ROOT_HINT)


def _writable(root: Path) -> Check:
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        is_input = isinstance(exc, NotADirectoryError | FileExistsError | PermissionError)
        return Check("spools", False, f"{root}: {exc.strerror}", _ROOT_HINT, is_input=is_input)
    return Check("spools", True, str(root))
