"""`python -m atoll.replica`: one replica in a container, or the supervisor of a local run.

In a container, environment variables or the flags of `container.py` describe the replica. The local executor starts
the supervisor of a local run with `--spool FOLDER`, and `atoll join` that of a machine that has joined a run with
`--joined FOLDER`. All fork the replicas from one warm process.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from atoll.replica.spool import Spool


def main(argv: list[str]) -> NoReturn:
    """Supervise until every rank is settled. In each forked replica, run that replica and exit."""
    if argv[:1] == ["--spool"]:
        _run_local(Spool(argv[1]), int(argv[2]))
    if argv[:1] == ["--joined"]:
        _run_joined(Spool(argv[1]), int(argv[2]))
    _run_container(argv)


def _run_local(spool: Spool, ready: int) -> NoReturn:
    """Leave the launcher's session and supervise the run. The launcher waits for a line on the descriptor `ready`."""
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    log = os.open(spool.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)

    def notify_launcher() -> None:
        with suppress(OSError):  # the launcher was killed; the run continues without it
            os.write(ready, b"ok\n")
        os.close(ready)

    if not spool.lock() or spool.status.exists():
        notify_launcher()  # another supervisor has this run, or the run is over
        sys.exit(0)
    _supervise(spool, notify_launcher)


def _run_container(argv: list[str]) -> NoReturn:
    from atoll.errors import AtollError
    from atoll.replica.container import prepare

    try:
        spool = prepare(argv, os.environ)
    except AtollError as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(exc.exit_code)
    _supervise(spool, is_preempted=True, is_spool_ours=lambda: True)


def _run_joined(spool: Spool, parent: int) -> NoReturn:
    """Supervise one rank until it ends, or until the process that joined the run ends; that process has the spool."""
    from atoll.replica.processes import stop_with_parent

    stop_with_parent(parent)
    _supervise(spool, is_preempted=True, is_spool_ours=lambda: os.getppid() != parent)


def _supervise(
    spool: Spool,
    on_ready: Callable[[], None] | None = None,
    *,
    is_preempted: bool = False,
    is_spool_ours: Callable[[], bool] = lambda: False,
) -> NoReturn:
    """Supervise the run of a spool. `is_preempted`: a signal to stop is no cancel. Delete the spool if it is ours."""
    # The supervisor loads everything that a replica needs; forked replicas share these pages.
    from atoll.log_lines import log_to_stderr_of_replica
    from atoll.replica import entry_runner
    from atoll.replica.rank_process import StopReason
    from atoll.replica.supervisor import Supervisor

    log_to_stderr_of_replica(os.environ)
    supervisor = Supervisor(spool, on_stop=StopReason.PREEMPT if is_preempted else StopReason.CANCEL)
    gc.freeze()  # the collector of a replica would otherwise copy the shared pages
    attempt = supervisor.run(on_ready=on_ready)
    if attempt is not None:
        _exit(entry_runner.run(attempt))
    if is_spool_ours():
        import shutil

        shutil.rmtree(spool.root, ignore_errors=True)
    _exit(supervisor.exit_code())


def _exit(code: int) -> NoReturn:
    """Exit as the interpreter does, but without tearing down the memory that supervisor and replicas share."""
    if (threading := sys.modules.get("threading")) is not None:
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # user code may have closed or replaced it
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
