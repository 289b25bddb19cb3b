"""The status of one run while a process waits for it: one connection to each host, which reports changes.

Without it, each reading would be a login and a new interpreter on every host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from subprocess import Popen
from threading import Event, Lock, Thread
from types import TracebackType

from atoll.errors import AtollError
from atoll.executors.ssh.connection import Hosts
from atoll.executors.ssh.request import Block, rows_of
from atoll.status import ReplicaStatus, RunStatus

_LEAST_PAUSE_S = 0.1
"""Between two statuses, also while one change follows the other."""
_END_S = 10.0

Ask = Callable[[Mapping[Block, list[ReplicaStatus]]], tuple[RunStatus, list[Block]]]


class HostsWatch:
    """Rows of the hosts whose connection is open, as they reported them last; the other hosts are asked.

    `ask` gets the known rows, and returns the status and the blocks of the hosts that answered it.
    """

    def __init__(self, hosts: Hosts, blocks: Sequence[Block], ask: Ask) -> None:
        self._hosts, self._ask = hosts, ask
        self._changed, self._lock = Event(), Lock()
        self._reports = {block: _Report(hosts, block, self._changed) for block in blocks}
        self._is_closed = False

    def __enter__(self) -> HostsWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:  # a status that was not awaited may still be read in another thread
            self._is_closed = True
        for report in self._reports.values():
            report.close()

    def status(self) -> RunStatus:
        self._changed.clear()  # before reading: a later change ends the next pause
        known = {block: rows for block, report in self._reports.items() if (rows := report.rows) is not None}
        status, answered = self._ask(known)
        with self._lock:
            for block in answered if not self._is_closed else ():
                self._reports[block].open()
        return status

    def wait(self, seconds: float) -> None:
        least_s = min(seconds, _LEAST_PAUSE_S)
        self._hosts.clock.sleep(least_s)
        self._changed.wait(min(seconds - least_s, 1e6))


class _Report:
    """The connection to one host. `rows` is None while it is not open."""

    def __init__(self, hosts: Hosts, block: Block, changed: Event) -> None:
        self._hosts, self._block, self._changed = hosts, block, changed
        self._lock = Lock()
        self._thread: Thread | None = None
        self._process: Popen[bytes] | None = None
        self._is_closed = False
        self.rows: list[ReplicaStatus] | None = None

    def open(self) -> None:
        """Connect in a thread, unless there is one."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._read, daemon=True, name="atoll-ssh-watch")
            self._thread.start()

    def close(self) -> None:
        """End the connection and its thread."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _opened(self, process: Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._is_closed:
                process.kill()

    def _read(self) -> None:
        block, rows = self._block, None
        lines = self._hosts.stream(
            block.host, "watch", block.context.run_id, block.body(), silence_s=None, on_open=self._opened
        )
        try:
            for line in lines:
                if "replicas" in line:
                    self.rows = rows = rows_of(block, line["replicas"])
                    self._changed.set()
        except AtollError:
            rows = None
        if rows is None or not all(row.state.is_terminal for row in rows):
            self.rows = None  # the connection is lost; an end of all replicas does not change any more
        self._changed.set()
