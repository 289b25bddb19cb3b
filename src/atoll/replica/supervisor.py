"""The supervisor starts replicas as process groups, watches them and records how they end.

One supervisor has all ranks of a local run, or the single rank of a container. It outlives the process that started
it. It has one thread and never touches the store (the uploader, another process, does), so it can fork at any time:
replicas are forked from it, with all modules loaded, before any user code runs.

    start ──> running ──> ended ──> stored by the uploader ──> settled
                ^                             │
                └──── restart (attempt+1) ────┘

`run` returns None in the supervisor when every rank is settled, and an `Attempt` in each forked replica, so that the
caller runs user code at the bottom of the stack.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from atoll.context import ATTEMPT, SPOOL, TIMED_OUT
from atoll.replica import processes
from atoll.replica.pipes import KillPipe, OutputPipe
from atoll.replica.rank_process import ExitVerdict, RankProcess, StopReason, exit_verdict
from atoll.replica.spool import Attempt, Spool, read_json, read_record, with_warning
from atoll.replica.uploader import UploaderLink
from atoll.status import Reason, ReplicaState

_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_STORE_TIMEOUT_S, _STORE_TIMEOUT_CANCELLED_S = 120.0, 30.0
"""How long an ended rank waits for its upload. A cancelled run must end soon, also while the store is down."""
_LOADING_S, _FULL_S = 0.1, 1.0
"""How often the supervisor looks whether a loading replica has called its entry point, and a full disk has room."""

log = logging.getLogger("atoll.replica")


class Supervisor:
    """Runs the plan found in a spool. `on_stop` is what a signal to stop means, unless the run was cancelled."""

    def __init__(self, spool: Spool, *, on_stop: StopReason = StopReason.CANCEL) -> None:
        self._spool = spool
        self._on_stop = on_stop
        self._plan: dict[str, Any] = read_json(spool.plan)
        self._host = os.uname().nodename
        limits = {name: self._plan[name] for name in ("max_restarts", "timeout_s", "grace_s")}
        before = {"attempt": self._plan.get("first_attempt", 0), "used_s": self._plan.get("used_s", 0.0)}
        self._ranks = [RankProcess(rank, **limits, **before) for rank in self._plan["ranks"]]
        self._kill_pipe = KillPipe()
        self._wake_read, self._wake_write = os.pipe()
        self._uploader = UploaderLink(spool, self._plan)
        self._outputs: dict[int, OutputPipe] = {}
        self._stop_requested = False
        self._has_new_marks = False
        self._oom_kills = processes.oom_kills()
        self._disk = spool.disk_watch()
        self._look_at = 0.0
        self._written: list[dict[str, Any]] = []

    def run(self, *, on_ready: Callable[[], None] | None = None) -> Attempt | None:
        """Supervise until every rank is settled. `on_ready` is called when all replicas are started."""
        self._handle_signals()
        processes.adopt_orphans()  # before the first replica, which may end at once and leave a child behind
        self._disk.failed(self._spool.write_reserve())
        self._write_status()  # from here on the run has started: no other supervisor starts it again
        if self._spool.cancel.exists():
            self._stop_all()
        self._stop_marked()
        for process in self._ranks:
            try:
                if not process.is_settled and (attempt := self._start(process)):
                    return attempt
            except OSError as exc:
                self._abort(process.rank, exc)
        self._write(self._spool.started, {str(p.rank): [p.pid, p.started_at] for p in self._ranks})
        if on_ready is not None:
            on_ready()
        self._uploader.start(self._close_inherited)
        for process in self._ranks:
            if process.pid is not None:
                self._uploader.send("started", process.rank, process.attempt)
        while not all(process.is_settled for process in self._ranks):
            self._write_status()
            self._sleep()
            if attempt := self._act():
                return attempt
        self._finish()
        return None

    def exit_code(self) -> int:
        """For a container: the exit code of its single replica, or 1 if one of several did not succeed.

        A service that restarts containers sees only this code: it is `TIMED_OUT` at the time limit, and 0 only if every
        replica succeeded.
        """
        if all(process.state is ReplicaState.SUCCEEDED for process in self._ranks):
            return 0
        if any(process.reason is Reason.TIMEOUT for process in self._ranks):
            return TIMED_OUT
        return (self._ranks[0].exit_code if len(self._ranks) == 1 else None) or 1

    def _act(self) -> Attempt | None:
        self._read_signals()
        self._reap()
        self._read_uploader()
        self._watch_disk()
        now = time.monotonic()
        for process in self._ranks:
            if process.is_loading:
                process.is_loading = not self._spool.attempt(process.rank, process.attempt).called.exists()
            is_running = process.pid is not None and process.stop_reason is StopReason.NONE
            if process.kill_at is not None and now >= process.kill_at:
                log.info("rank %d: grace is over, sending SIGKILL", process.rank)
                self._signal(process, signal.SIGKILL)
                process.kill_at = now + 5.0
            elif is_running and now >= (process.limit_at or now):
                self._stop(process, StopReason.TIMEOUT)
            elif process.start_at is not None and now >= process.start_at and (attempt := self._restart(process)):
                return attempt
        return None

    # ── starting ────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, process: RankProcess) -> Attempt | None:
        """Fork the replica. Returns its attempt in the child, None in the supervisor."""
        attempt = self._spool.attempt(process.rank, process.attempt)
        attempt.root.mkdir(parents=True, exist_ok=True)
        output = OutputPipe(attempt.log)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError:
            output.close_write_end()
            output.close()
            raise
        if pid == 0:
            try:
                self._become_replica(process, attempt, output)
            except BaseException as exc:  # noqa: BLE001  the child must not continue as a second supervisor
                print(f"cannot become rank {process.rank}: {exc!r}", file=sys.stderr, flush=True)
                os._exit(70)
            return attempt
        output.close_write_end()
        self._outputs[process.rank] = output
        _set_group(pid)
        process.started(pid, time.monotonic(), time.time())
        log.debug("rank %d: attempt %d is process %d", process.rank, process.attempt, pid)
        if process.attempt > 0:
            self._uploader.send("started", process.rank, process.attempt)
        return None

    def _restart(self, process: RankProcess) -> Attempt | None:
        log.info("rank %d: restart as attempt %d", process.rank, process.attempt)
        try:
            return self._start(process)
        except OSError as exc:
            message = f"attempt {process.attempt} could not be started: {exc}"
            process.settle(ExitVerdict(ReplicaState.FAILED, Reason.BACKEND, message, None))
            return None

    def _become_replica(self, process: RankProcess, attempt: Attempt, output: OutputPipe) -> None:
        _set_group(0)
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._kill_pipe.attach()
        self._close_inherited(kill_pipe=False)
        self._uploader.close()
        output.redirect()
        os.environ.update(self._plan["rank_environment"][str(process.rank)])
        os.environ[ATTEMPT] = str(process.attempt)
        os.environ[SPOOL] = str(attempt.root)

    def _abort(self, rank: int, exc: OSError) -> NoReturn:
        """Not every replica could be started: kill those that were, as if the run had not been started."""
        for process in self._ranks:
            if process.pid is not None:
                self._signal(process, signal.SIGKILL)
                os.waitpid(process.pid, 0)
        self._spool.status.unlink(missing_ok=True)
        raise SystemExit(f"cannot start {len(self._ranks)} replicas here: rank {rank}: {exc}")

    def _close_inherited(self, kill_pipe: bool = True) -> None:
        """In a child: close the descriptors that only the supervisor may hold."""
        if kill_pipe:
            self._kill_pipe.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for output in self._outputs.values():
            output.close()

    # ── stopping ────────────────────────────────────────────────────────────────────────────────────────────────

    def _stop(self, process: RankProcess, reason: StopReason) -> None:
        log.info("rank %d: stop (%s), %g s of grace", process.rank, reason, process.grace_s)
        process.stop_reason = reason
        process.kill_at = time.monotonic() + process.grace_s
        self._signal(process, signal.SIGTERM)

    def _stop_all(self) -> None:
        reason = StopReason.CANCEL if self._spool.cancel.exists() else self._on_stop
        for process in self._ranks:
            self._stop_for_good(process, reason)

    def _stop_marked(self) -> None:
        """Stop the ranks whose cancellation was requested one by one."""
        for process in self._ranks:
            if not process.is_settled and self._spool.cancel_rank(process.rank).exists():
                self._stop_for_good(process, StopReason.CANCEL)

    def _stop_for_good(self, process: RankProcess, reason: StopReason) -> None:
        """End the process of this rank, if it runs, and do not restart it."""
        if process.stop_reason is not StopReason.NONE:
            return  # already stopping; a second request must not extend the grace
        if process.pid is not None:
            self._stop(process, reason)
        elif process.verdict is not None:
            process.stop_reason = reason  # the process has ended; this prevents a restart
        elif not process.is_settled:
            message = "cancelled before it started"
            process.settle(ExitVerdict(ReplicaState.CANCELLED, Reason.CANCELLED, message, None))

    def _signal(self, process: RankProcess, number: signal.Signals) -> None:
        assert process.pid is not None
        for send in (os.killpg, os.kill):
            try:
                send(process.pid, number)
                return
            except ProcessLookupError:
                continue

    def _reap(self) -> None:
        """Collect each process that ended; kill the rest of its group before its pid can be reused."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            process = next((p for p in self._ranks if p.pid == found.si_pid), None)
            if process is not None:
                self._signal(process, signal.SIGKILL)
            _, wait_status = os.waitpid(found.si_pid, 0)
            if process is not None:
                self._end(process, wait_status)
            elif found.si_pid == self._uploader.pid:
                self._restart_uploader()

    def _end(self, process: RankProcess, wait_status: int) -> None:
        output = self._outputs.pop(process.rank)
        output.drain()
        output.close()
        attempt = self._spool.attempt(process.rank, process.attempt)
        outcome = read_record(attempt.outcome)  # user code can write it: it may hold anything
        oom_kills = processes.oom_kills()
        is_oom = oom_kills > self._oom_kills
        verdict = exit_verdict(wait_status, process.stop_reason, outcome, limit_s=process.timeout_s, oom=is_oom)
        self._oom_kills = oom_kills
        log.debug("rank %d: attempt %d ended %s (%s)", process.rank, process.attempt, verdict.state, verdict.reason)
        known = outcome or {"error": None, "started_at": process.started_at, "ended_at": time.time()}
        record = {
            **known,
            "rank": process.rank,
            "attempt": process.attempt,
            "state": verdict.state,
            "reason": verdict.reason,
            "message": verdict.message,
            "exit_code": verdict.exit_code,
            "host": self._host,
        }
        if output.lost_bytes:
            lost = f"{output.lost_bytes:,} bytes of output are not in the log, because the disk was full"
            record = with_warning(record, lost)
        self._write(attempt.outcome, record)
        process.ended(verdict, time.time())
        self._uploader.send("ended", process.rank, process.attempt, timeout_s=self._store_timeout_s(process))

    def _store_timeout_s(self, process: RankProcess) -> float:
        return _STORE_TIMEOUT_CANCELLED_S if self._spool.is_cancelled(process.rank) else _STORE_TIMEOUT_S

    # ── signals, the uploader and files ─────────────────────────────────────────────────────────────────────────

    def _handle_signals(self) -> None:
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, _frame: Any) -> None:
        if number == signal.SIGHUP:
            self._has_new_marks = True  # a closed terminal sends this signal, too; then there is no mark
        elif number != signal.SIGCHLD:
            self._stop_requested = True

    def _read_signals(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass
        if self._stop_requested:
            self._stop_requested = False
            self._stop_all()
        if self._has_new_marks:
            self._has_new_marks = False
            self._stop_marked()

    def _read_uploader(self) -> None:
        for rank, problem in self._uploader.stored_ranks():
            process = next(p for p in self._ranks if p.rank == rank)
            if process.verdict is not None:
                process.stored(time.monotonic(), problem)
        stops, self._uploader.stops = self._uploader.stops, []
        for reason, rank in stops:
            if reason is StopReason.CANCEL:
                with suppress(OSError):  # a full disk; the mark only shortens the wait for the upload
                    self._spool.cancel_rank(rank).touch()
            self._stop_for_good(next(p for p in self._ranks if p.rank == rank), reason)

    def _restart_uploader(self) -> None:
        log.warning("the uploader ended unexpectedly")
        if not self._uploader.start(self._close_inherited):
            return
        for process in self._ranks:
            if process.pid is not None:
                self._uploader.send("started", process.rank, process.attempt)
            elif process.verdict is not None:
                self._uploader.send("ended", process.rank, process.attempt, timeout_s=self._store_timeout_s(process))

    def _sleep(self) -> None:
        """Sleep until an action is due or a descriptor is readable; then copy the replicas' output."""
        next_action_at = min(self._uploader.timeout_at, *(process.next_action_at for process in self._ranks))
        if any(process.is_loading for process in self._ranks):
            next_action_at = min(next_action_at, time.monotonic() + _LOADING_S)
        if self._disk.is_full:
            next_action_at = min(next_action_at, self._look_at)
        pause = max(0.0, min(60.0, next_action_at - time.monotonic()))
        outputs = {output.read_end: output for output in self._outputs.values() if output.is_open}
        poll = select.poll()
        for descriptor in (self._wake_read, *self._uploader.descriptors(), *outputs):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(math.ceil(pause * 1000)):
            if descriptor in outputs:
                outputs[descriptor].drain()

    def _watch_disk(self) -> None:
        """Once the disk has room again: write the reserve, and store the replicas' output again."""
        self._disk.failed(OutputPipe.write_error)
        self._disk.is_full = self._disk.is_full or self._spool.lacks_reserve
        if not self._disk.is_full or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _FULL_S
        if self._disk.look():
            return
        self._disk.failed(self._spool.write_reserve())
        if not self._disk.is_full:
            log.warning("the disk has room again: replica output is stored from here on")
            OutputPipe.write_error = None

    def _write_status(self) -> None:
        """Write the table of ranks, if it has changed. A disk that turns out to be full is in it at once."""
        for _ in range(2):
            problem = self._disk.problem or self._uploader.problem
            rows = [process.status(self._host, problem) for process in self._ranks]
            if rows == self._written:
                return
            self._written = rows if self._write(self._spool.status, rows) else []

    def _write(self, path: Path, value: Any) -> bool:
        """Write JSON to the spool. A full disk is logged and shown by `status`; it does not end the replicas."""
        try:
            self._disk.failed(self._spool.write_json(path, value))
        except OSError as exc:
            if not self._disk.is_full:  # otherwise this was logged already
                log.warning("cannot write to the spool: %s", exc)
            self._disk.failed(exc)
            return False
        return True

    def _finish(self) -> None:
        """Every rank is settled: end what the replicas left behind, and write the last status after that."""
        self._uploader.finish()
        label = self._plan["label"]
        processes.kill_children()
        if left := processes.kill_all(label, but=frozenset({os.getpid()})):
            log.warning("could not end processes %s of %s", left, label)
        self._write_status()


def _set_group(pid: int) -> None:
    """Give the process a group of its own. Parent and child both call this, so the group exists for either."""
    try:
        os.setpgid(pid, 0)
    except (PermissionError, ProcessLookupError):
        pass
