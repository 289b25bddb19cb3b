"""The uploader: a process that copies what replicas write to the spool into the store, so it outlives the machine.

It uploads logs in chunks (bounded in size and age), progress as heartbeats, and outcomes and results once. The
supervisor forks it and sends it one line for each attempt that starts or ends (`UploaderLink`); it replies when an
ended attempt is stored (`Uploader`), or when the store asks to stop a rank (`stops.py`). Uploading can start again
after a crash: `AttemptUpload` asks the store first how much of a log it has. If the supervisor dies, the uploader ends
the run's remaining processes and stores what they left.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from atoll.disk import folder_of, full_text, is_full
from atoll.errors import StoreError
from atoll.registry import open_store
from atoll.replica import processes
from atoll.replica.attempt_upload import AttemptUpload
from atoll.replica.rank_process import StopReason
from atoll.replica.spool import Spool
from atoll.replica.stops import StopLooks
from atoll.stores.base import Store

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_MAX_STARTS = 5
_LOOK_S = 1.0
_TICK_S, _RETRY_S, _RETRY_LIMIT_S = 0.25, 0.5, 60.0

log = logging.getLogger("atoll.replica")


class UploaderLink:
    """The supervisor's side: starts the uploader, sends it lines and reads replies. Never blocks."""

    def __init__(self, spool: Spool, plan: dict[str, Any]) -> None:
        self._spool, self._plan = spool, plan
        self.pid: int | None = None
        self._starts = 0
        self._to_uploader = self._from_uploader = -1
        self._partial = b""
        self.stops: list[tuple[StopReason, int]] = []
        """Ranks that must stop, as the uploader found in the store, until the supervisor takes them."""
        self.problem = ""
        """Why the uploader cannot upload at the moment, if a disk is full."""
        self._waiting: dict[int, float] = {}
        """Ranks that ended and are not stored yet, each with the time at which the supervisor stops waiting."""

    def start(self, in_child: Callable[[], None]) -> bool:
        """Fork the uploader. False if it has died too often: then the supervisor waits for nothing more."""
        self.close()
        self.pid, self.problem = None, ""
        if self._starts >= _MAX_STARTS:
            self._waiting = dict.fromkeys(self._waiting, 0.0)
            return False
        self._starts += 1
        commands, to_uploader = os.pipe()
        from_uploader, replies = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(to_uploader)
            os.close(from_uploader)
            _run_uploader(Uploader(self._spool, self._plan, commands, replies), in_child)
        os.close(commands)
        os.close(replies)
        os.set_blocking(from_uploader, False)
        os.set_blocking(to_uploader, False)
        self.pid, self._to_uploader, self._from_uploader = pid, to_uploader, from_uploader
        log.debug("the uploader is process %d", pid)
        return True

    def send(self, command: str, rank: int, attempt: int, *, timeout_s: float | None = None) -> None:
        """Send one line. With `timeout_s`, expect a reply within that time."""
        if timeout_s is not None:
            # Without an uploader (it has died too often) there is no reply to wait for.
            self._waiting[rank] = 0.0 if self.pid is None else time.monotonic() + timeout_s
        if self._to_uploader >= 0:
            try:
                os.write(self._to_uploader, f"{command} {rank} {attempt}\n".encode())
            except (BrokenPipeError, BlockingIOError):
                pass  # SIGCHLD reports its end, and the supervisor sends everything again to the next one

    def stored_ranks(self) -> Iterator[tuple[int, str]]:
        """Ranks that need no more waiting, each with the problem that kept it from being stored, if any."""
        for line in self._lines():
            word, _, rest = line.partition(" ")
            if word == "problem":
                self.problem = rest
                continue
            if word in (StopReason.CANCEL, StopReason.REPLACED):
                self.stops.append((StopReason(word), int(rest)))
                continue
            rank, _, problem = rest.partition(" ")
            if self._waiting.pop(int(rank), None) is not None:
                yield int(rank), problem
        now = time.monotonic()
        for late in [rank for rank, until in self._waiting.items() if now >= until]:
            del self._waiting[late]
            yield late, "its outcome and the end of its log are not in the store: the store did not answer"

    @property
    def timeout_at(self) -> float:
        return min(self._waiting.values(), default=float("inf"))

    def descriptors(self) -> list[int]:
        return [self._from_uploader] if self._from_uploader >= 0 else []

    def finish(self) -> None:
        """Send the last line and wait until the uploader has exited."""
        if self.pid is None:
            return
        self.send("done", 0, 0)
        pid, self.pid = self.pid, None
        deadline = time.monotonic() + 5.0
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        self.close()

    def close(self) -> None:
        for descriptor in (self._to_uploader, self._from_uploader):
            if descriptor >= 0:
                os.close(descriptor)
        self._to_uploader = self._from_uploader = -1
        self._partial = b""

    def _lines(self) -> list[str]:
        data = self._partial
        try:
            while self._from_uploader >= 0 and (more := os.read(self._from_uploader, 65536)):
                data += more
        except BlockingIOError:
            pass
        *lines, self._partial = data.split(b"\n")
        return [line.decode() for line in lines]


def _run_uploader(uploader: Uploader, in_child: Callable[[], None]) -> NoReturn:
    """In the forked child: run the uploader and exit."""
    code = 70
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the uploader exits after the supervisor, not before
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        in_child()
        uploader.run()
        code = 0
    except BaseException:  # the supervisor starts another uploader
        log.exception("the uploader failed")
    finally:
        os._exit(code)


class Uploader:
    """The uploader process itself. It is forked before the supervisor has opened the store."""

    def __init__(self, spool: Spool, plan: dict[str, Any], commands: int, replies: int) -> None:
        self._spool, self._plan = spool, plan
        self._commands, self._replies = commands, replies
        self._uploads: dict[tuple[int, int], AttemptUpload] = {}
        self._ended: dict[tuple[int, int], float] = {}
        """Attempts that have ended, each with the time until which the uploader retries."""
        self._partial = b""
        self._error = ""
        self._disk, self._look_at = spool.disk_watch(), 0.0
        self._full_stores: dict[tuple[int, int], str] = {}
        """Attempts whose last upload found the store's disk full, each with the text for `status`."""
        self._problem = ""
        self._stops = StopLooks(plan) if plan.get("store_stops") else None

    def run(self) -> None:
        """Upload until the supervisor sends `done`, or dies."""
        while True:
            ready, _, _ = select.select([self._commands], [], [], _RETRY_S if self._error else _TICK_S)
            data = os.read(self._commands, 65536) if ready else None
            if data == b"":
                self._finish_without_supervisor()
                return
            if data and self._read_commands(data):
                return
            self._upload_all()

    def _read_commands(self, data: bytes) -> bool:
        """True when the supervisor has sent `done`."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            command, rank, number = line.decode().split(" ")
            if command == "done":
                return True
            attempt = (int(rank), int(number))
            if attempt not in self._uploads:
                self._uploads[attempt] = AttemptUpload(self._spool, self._plan, *attempt)
            if self._stops is not None:
                self._stops.note(*attempt)
            if command == "ended":
                self._ended[attempt] = time.monotonic() + _RETRY_LIMIT_S
        return False

    def _upload_all(self) -> None:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            self._disk.look()
            self._disk.is_full = self._disk.is_full or self._spool.lacks_reserve
        self._look_for_stops()
        attempts = list(self._uploads)
        if len(attempts) > 4 and not self._plan["store"].startswith("file:"):
            list(self._pool.map(self._upload, attempts))  # a remote store: many at once
        else:
            for attempt in attempts:
                self._upload(attempt)
        problem = self._disk.problem or next(iter(self._full_stores.values()), "")
        if problem != self._problem:
            self._problem = problem
            self._send(f"problem {problem}")

    def _look_for_stops(self) -> None:
        """Report which ranks must stop. Comes before uploads: a replaced attempt sends no more heartbeats."""
        if self._stops is None or not self._stops.are_due:
            return
        try:
            found = self._stops.look(self._store)
        except (StoreError, OSError) as exc:
            log.debug("cannot look for requests to stop: %s", exc)
            return
        for rank, reason in found.items():
            log.info("rank %d: the store asks to stop it (%s)", rank, reason)
            self._send(f"{reason} {rank}")
            if reason is StopReason.REPLACED:
                for attempt in (attempt for attempt in self._uploads if attempt[0] == rank):
                    self._uploads[attempt].is_replaced = True

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(16, "uploader")

    @cached_property
    def _store(self) -> Store:
        return open_store(self._plan["store"])

    def _upload(self, attempt: tuple[int, int]) -> None:
        is_final = attempt in self._ended
        try:
            self._uploads[attempt].upload(self._store, final=is_final, problem=self._disk.problem)
            self._error = ""
            self._full_stores.pop(attempt, None)
        except (StoreError, OSError) as exc:
            if is_full(exc):
                self._full_stores[attempt] = full_text(folder_of(self._plan["store"]) or self._plan["store"])
            if str(exc) != self._error:  # logged once, not at each retry
                self._error = str(exc)
                log.warning("rank %d: upload failed: %s", attempt[0], exc)
            if is_final and (time.monotonic() > self._ended[attempt] or not getattr(exc, "retryable", False)):
                text = " ".join(str(exc).split())
                self._reply(attempt, f"{self._left_out(attempt, exc)} not in the store: {text}"[:400])
            return
        if is_final:
            self._reply(attempt, "")

    def _left_out(self, attempt: tuple[int, int], error: BaseException) -> str:
        """What the store lacks after the last try. A full disk has often no room for the end of the log, but for the
        outcome."""
        if not is_full(error):
            return "its outcome is"
        try:
            warning = "the end of the log is not in the store, whose disk was full"
            self._uploads[attempt].upload_outcome(self._store, warning)
        except (StoreError, OSError):
            return "its outcome is"
        return "the end of its log is"

    def _reply(self, attempt: tuple[int, int], problem: str) -> None:
        self._uploads.pop(attempt, None)
        self._ended.pop(attempt, None)
        self._full_stores.pop(attempt, None)
        log.debug("rank %d: attempt %d is %s", *attempt, "not stored" if problem else "stored")
        self._send(f"stored {attempt[0]} {problem}".rstrip())

    def _send(self, line: str) -> None:
        with suppress(BrokenPipeError):  # the supervisor died; `run` reads that
            os.write(self._replies, line.encode("utf-8", "replace") + b"\n")

    def _finish_without_supervisor(self) -> None:
        """The supervisor died, and the kernel killed its replicas: end what is left, and upload what they wrote."""
        log.warning("the supervisor died")
        processes.kill_all(self._plan["label"])
        for attempt in self._uploads:
            self._ended.setdefault(attempt, time.monotonic() + _RETRY_LIMIT_S)
        deadline = time.monotonic() + _RETRY_LIMIT_S
        while self._ended and time.monotonic() < deadline:
            self._upload_all()
            if self._ended:
                time.sleep(_RETRY_S)
