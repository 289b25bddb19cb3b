"""The shepherd's end of the line to the scribe: lines out, acknowledgements in. Never blocks the shepherd."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from atoll.replica.spool import Spool

_MOST_STARTS = 5


class ScribeLink:
    """Starts the scribe, tells it what happened, and gives up on it after a while so that no run hangs on a store."""

    def __init__(self, spool: Spool, plan: dict[str, Any]) -> None:
        self._spool, self._plan = spool, plan
        self.pid: int | None = None
        self._starts = 0
        self._to_scribe = self._from_scribe = -1
        self._partial = b""
        self._waiting: dict[int, float] = {}
        """Ranks whose end the scribe has not acknowledged, and until when we wait."""

    def start(self, in_child: Callable[[], None]) -> bool:
        """Fork the scribe. False when it has died too often: what waits for it is then given up."""
        self.close()
        self.pid = None
        if self._starts >= _MOST_STARTS:
            self._waiting = dict.fromkeys(self._waiting, 0.0)
            return False
        self._starts += 1
        there_read, here_write = os.pipe()
        here_read, there_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become_scribe(self._spool, self._plan, there_read, there_write, (here_read, here_write), in_child)
        os.close(there_read)
        os.close(there_write)
        os.set_blocking(here_read, False)
        os.set_blocking(here_write, False)
        self.pid, self._to_scribe, self._from_scribe = pid, here_write, here_read
        return True

    def tell(self, word: str, rank: int, attempt: int, *, patience_s: float | None = None) -> None:
        """Tell the scribe. With `patience_s`, an answer is expected in that time."""
        if patience_s is not None:
            # Without a scribe there is nothing to wait for: it has died too often.
            self._waiting[rank] = 0.0 if self.pid is None else time.monotonic() + patience_s
        if self._to_scribe >= 0:
            try:
                os.write(self._to_scribe, f"{word} {rank} {attempt}\n".encode())
            except (BrokenPipeError, BlockingIOError):
                pass  # its end is noticed by SIGCHLD, and the next one is told everything again

    def heard(self) -> Iterator[tuple[int, str]]:
        """Ranks that are stored, each with what was in the way, if anything."""
        for line in self._lines():
            _, rank, trouble = (*line.split(" ", 2), "")[:3]
            if self._waiting.pop(int(rank), None) is not None:
                yield int(rank), trouble
        now = time.monotonic()
        for late in [rank for rank, until in self._waiting.items() if now >= until]:
            del self._waiting[late]
            yield late, "its outcome and the end of its log are not in the store: the store did not answer"

    @property
    def patience_at(self) -> float:
        return min(self._waiting.values(), default=float("inf"))

    def descriptors(self) -> list[int]:
        return [self._from_scribe] if self._from_scribe >= 0 else []

    def finish(self) -> None:
        """Tell the scribe that all is done, and see it leave."""
        if self.pid is None:
            return
        self.tell("done", 0, 0)
        pid, self.pid = self.pid, None
        deadline = time.monotonic() + 5.0
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        self.close()

    def close(self) -> None:
        for descriptor in (self._to_scribe, self._from_scribe):
            if descriptor >= 0:
                os.close(descriptor)
        self._to_scribe = self._from_scribe = -1
        self._partial = b""

    def _lines(self) -> list[str]:
        data = self._partial
        try:
            while self._from_scribe >= 0 and (more := os.read(self._from_scribe, 65536)):
                data += more
        except BlockingIOError:
            pass
        *lines, self._partial = data.split(b"\n")
        return [line.decode() for line in lines]


def _become_scribe(
    spool: Spool,
    plan: dict[str, Any],
    orders: int,
    answers: int,
    not_ours: tuple[int, int],
    in_child: Callable[[], None],
) -> None:
    """In the child: be the scribe, and never return."""
    code = 70
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it leaves when the shepherd does, not before
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in not_ours:
            os.close(descriptor)
        in_child()
        from atoll.replica.scribe import Scribe

        code = Scribe(spool, plan, orders, answers).run()
    except BaseException:  # noqa: BLE001  recorded in the diary; the shepherd starts another one
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
