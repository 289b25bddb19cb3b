"""The shepherd: starts replicas as process groups, and is there when they end.

One shepherd looks after all ranks of a local run, or after the single rank of a container. It outlives whoever
started it, has one thread, never touches the store (that is the scribe's work, in a process of its own), and so may
fork at any time: replicas are forked from it, already warm, before any of the user's code is loaded.

    start ──> running ──> ended ──> stored by the scribe ──> settled
                ^                          │
                └──── restart (attempt+1) ─┘

`run` returns None in the shepherd when every rank is settled, and an `Attempt` in each forked replica, so that user
code runs at the bottom of the stack.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from atoll.context import ATTEMPT, SPOOL
from atoll.replica import processes
from atoll.replica.pipes import KillPipe, OutputPipe
from atoll.replica.rank_process import ExitVerdict, RankProcess, StopReason, fate_of
from atoll.replica.spool import Attempt, Spool, read_json, read_record, write_at_any_price
from atoll.replica.uploader import ScribeLink
from atoll.status import Reason, ReplicaState

_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_STORE_PATIENCE_S = 120.0
_BALLAST_BYTES = 256 << 10


class Supervisor:
    """Runs the plan found in a spool."""

    def __init__(self, spool: Spool, *, stop_means: StopReason = StopReason.CANCEL) -> None:
        self._spool = spool
        self._stop_means = stop_means
        self._plan: dict[str, Any] = read_json(spool.plan)
        self._host = os.uname().nodename
        limits = {name: self._plan[name] for name in ("max_restarts", "timeout_s", "grace_s")}
        first = self._plan.get("first_attempt", 0)
        self._charges = [RankProcess(rank, **limits, attempt=first) for rank in self._plan["ranks"]]
        self._leash = KillPipe()
        self._wake_read, self._wake_write = os.pipe()
        self._scribe = ScribeLink(spool, self._plan)
        self._outlets: dict[int, OutputPipe] = {}
        self._stop_asked = False
        self._ooms = processes.oom_kills()

    def run(self, *, on_ready: Any = None) -> Attempt | None:
        """Look after every rank until it is settled."""
        self._listen()
        processes.adopt_orphans()  # before the first replica: one that ends at once may leave a child behind
        with suppress(OSError):
            self._spool.ballast.write_bytes(b"\0" * _BALLAST_BYTES)
        self._write_status()  # from here on the run has begun, and nobody begins it again
        if self._spool.cancel.exists():
            self._stop_all()
        try:
            for charge in self._charges:
                if not charge.is_settled and (attempt := self._start(charge)):
                    return attempt
        except OSError as exc:
            self._abort(exc)
        if on_ready is not None:
            on_ready()
        self._scribe.start(self._close_inherited)
        for charge in self._charges:
            self._scribe.tell("started", charge.rank, charge.attempt)
        while not all(charge.is_settled for charge in self._charges):
            self._write_status()
            self._sleep()
            if attempt := self._act():
                return attempt
        self._leave()
        return None

    def exit_code(self) -> int:
        """For a container: the exit code of its single replica, or 1 if any of several did not succeed."""
        codes = [charge.exit_code for charge in self._charges]
        if len(codes) == 1 and codes[0] is not None:
            return codes[0]
        return 0 if all(charge.state is ReplicaState.SUCCEEDED for charge in self._charges) else 1

    def _act(self) -> Attempt | None:
        self._heed_signals()
        self._reap()
        self._hear_scribe()
        now = time.monotonic()
        for charge in self._charges:
            if charge.kill_at is not None and now >= charge.kill_at:
                self._signal(charge, signal.SIGKILL)
                charge.kill_at = now + 5.0
            elif charge.pid is not None and charge.asked is StopReason.NOTHING and now >= (charge.limit_at or now):
                self._stop(charge, StopReason.TIMEOUT)
            elif charge.start_at is not None and now >= charge.start_at and (attempt := self._restart(charge)):
                return attempt
        return None

    # ── starting ────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, charge: RankProcess) -> Attempt | None:
        """Fork the replica. Returns its attempt in the child, None in the shepherd."""
        attempt = self._spool.attempt(charge.rank, charge.attempt)
        attempt.root.mkdir(parents=True, exist_ok=True)
        outlet = OutputPipe(attempt.log)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError:
            outlet.close_in_shepherd()
            outlet.close()
            raise
        if pid == 0:
            try:
                self._become_replica(charge, attempt, outlet)
            except BaseException as exc:  # noqa: BLE001  the child must not go on as a second shepherd
                print(f"cannot become rank {charge.rank}: {exc!r}", file=sys.stderr, flush=True)
                os._exit(70)
            return attempt
        outlet.close_in_shepherd()
        self._outlets[charge.rank] = outlet
        _set_group(pid)
        charge.started(pid, time.monotonic(), time.time())
        if charge.attempt > 0:
            self._scribe.tell("started", charge.rank, charge.attempt)
        return None

    def _restart(self, charge: RankProcess) -> Attempt | None:
        try:
            return self._start(charge)
        except OSError as exc:
            message = f"attempt {charge.attempt} could not be started: {exc}"
            charge.settle(ExitVerdict(ReplicaState.FAILED, Reason.BACKEND, message, None))
            return None

    def _become_replica(self, charge: RankProcess, attempt: Attempt, outlet: OutputPipe) -> None:
        _set_group(0)
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._leash.attach()
        self._close_inherited(leash=False)
        self._scribe.close()
        outlet.become_output()
        os.environ.update(self._plan["rank_environment"][str(charge.rank)])
        os.environ[ATTEMPT] = str(charge.attempt)
        os.environ[SPOOL] = str(attempt.root)

    def _abort(self, exc: OSError) -> NoReturn:
        """Not every replica could be started, so none is: as if this had never begun."""
        for charge in self._charges:
            if charge.pid is not None:
                self._signal(charge, signal.SIGKILL)
                os.waitpid(charge.pid, 0)
        self._spool.status.unlink(missing_ok=True)
        raise SystemExit(f"cannot start {len(self._charges)} replicas here: {exc}")

    def _close_inherited(self, leash: bool = True) -> None:
        """In a child: let go of what only the shepherd may hold."""
        if leash:
            self._leash.drop()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for outlet in self._outlets.values():
            outlet.close()

    # ── stopping ────────────────────────────────────────────────────────────────────────────────────────────────

    def _stop(self, charge: RankProcess, asked: StopReason) -> None:
        charge.asked = asked
        charge.kill_at = time.monotonic() + charge.grace_s
        self._signal(charge, signal.SIGTERM)

    def _stop_all(self) -> None:
        asked = StopReason.CANCEL if self._spool.cancel.exists() else self._stop_means
        for charge in self._charges:
            if charge.asked is not StopReason.NOTHING:
                continue  # already told; its grace must not begin anew
            if charge.pid is not None:
                self._stop(charge, asked)
            elif charge.fate is not None:
                charge.asked = asked  # already over: only keeps it from being restarted
            elif not charge.is_settled:
                charge.settle(
                    ExitVerdict(ReplicaState.CANCELLED, Reason.CANCELLED, "cancelled before it started", None)
                )

    def _signal(self, charge: RankProcess, number: signal.Signals) -> None:
        assert charge.pid is not None
        for send in (os.killpg, os.kill):
            try:
                send(charge.pid, number)
                return
            except ProcessLookupError:
                continue

    def _reap(self) -> None:
        """Look at each process that ended; clear its group before its pid can be used again."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            charge = next((c for c in self._charges if c.pid == found.si_pid), None)
            if charge is not None:
                self._signal(charge, signal.SIGKILL)
            _, wait_status = os.waitpid(found.si_pid, 0)
            if charge is not None:
                self._end(charge, wait_status)
            elif found.si_pid == self._scribe.pid:
                self._restart_scribe()

    def _end(self, charge: RankProcess, wait_status: int) -> None:
        outlet = self._outlets.pop(charge.rank)
        outlet.pour()
        outlet.close()
        attempt = self._spool.attempt(charge.rank, charge.attempt)
        outcome = read_record(attempt.outcome)  # user code can reach it: it may hold anything
        ooms = processes.oom_kills()
        fate = fate_of(wait_status, charge.asked, outcome, limit_s=charge.timeout_s, oom=ooms > self._ooms)
        self._ooms = ooms
        self._write(attempt.outcome, self._outcome(charge, fate, outcome))
        charge.ended(fate, time.time())
        self._scribe.tell("ended", charge.rank, charge.attempt, patience_s=_STORE_PATIENCE_S)

    def _outcome(self, charge: RankProcess, fate: ExitVerdict, outcome: dict[str, Any]) -> dict[str, Any]:
        """The replica's own record under our verdict; made up by us if it left none."""
        known = outcome or {"error": None, "started_at": charge.started_at, "ended_at": time.time()}
        return {
            **known,
            "rank": charge.rank,
            "attempt": charge.attempt,
            "state": fate.state,
            "reason": fate.reason,
            "message": fate.message,
            "exit_code": fate.exit_code,
            "host": self._host,
        }

    # ── listening ───────────────────────────────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, _frame: Any) -> None:
        if number not in (signal.SIGCHLD, signal.SIGHUP):
            self._stop_asked = True

    def _heed_signals(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass
        if self._stop_asked:
            self._stop_asked = False
            self._stop_all()

    def _hear_scribe(self) -> None:
        for rank, trouble in self._scribe.heard():
            charge = next(c for c in self._charges if c.rank == rank)
            if charge.fate is not None:
                charge.stored(time.monotonic(), trouble)

    def _restart_scribe(self) -> None:
        if not self._scribe.start(self._close_inherited):
            return
        for charge in self._charges:
            if charge.pid is not None:
                self._scribe.tell("started", charge.rank, charge.attempt)
            elif charge.fate is not None:
                self._scribe.tell("ended", charge.rank, charge.attempt, patience_s=_STORE_PATIENCE_S)

    def _sleep(self) -> None:
        """Until something is due or something is heard; then pour what replicas have written."""
        wakes_at = min(self._scribe.patience_at, *(charge.wakes_at for charge in self._charges))
        pause = max(0.0, min(60.0, wakes_at - time.monotonic()))
        outlets = {outlet.read_end: outlet for outlet in self._outlets.values() if outlet.is_open}
        poll = select.poll()
        for descriptor in (self._wake_read, *self._scribe.descriptors(), *outlets):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(math.ceil(pause * 1000)):
            if descriptor in outlets:
                outlets[descriptor].pour()

    def _write_status(self) -> None:
        self._write(self._spool.status, [charge.status(self._host) for charge in self._charges])

    def _write(self, path: Path, value: Any) -> None:
        """A full disk is no reason to take the replicas down: say so, and go on."""
        try:
            write_at_any_price(self._spool, path, value)
        except OSError as exc:
            with suppress(OSError):
                print(f"shepherd: {exc}", file=sys.stderr, flush=True)

    def _leave(self) -> None:
        """Everything is settled. The last status is written when nothing else of the run is left."""
        self._scribe.finish()
        label = self._plan["label"]
        processes.kill_children()
        if left := processes.kill_all(label, but=frozenset({os.getpid()})):
            print(f"could not end processes {left} of {label}", file=sys.stderr, flush=True)
        self._write_status()


def _set_group(pid: int) -> None:
    """Called on both sides of the fork, so that the group exists for whoever comes first."""
    try:
        os.setpgid(pid, 0)
    except (PermissionError, ProcessLookupError):
        pass
