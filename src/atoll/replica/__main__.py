"""`python -m atoll.replica`: what runs inside a container, and on this machine.

In a container it is one replica, described by environment variables or by the flags below. With `--spool FOLDER` it is
the shepherd of a local run, started by the local executor.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress
from typing import NoReturn

from atoll.replica.spool import Spool


def main(argv: list[str]) -> NoReturn:
    """Be a shepherd until every rank has settled; in each forked replica, be that replica."""
    if argv[:1] == ["--spool"]:
        _local(Spool(argv[1]), int(argv[2]))
    _container(argv)


def _local(spool: Spool, ready: int) -> NoReturn:
    """Leave the launcher's session, then look after the run. `ready` is told when the run is in safe hands."""
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    _write_diary(spool)

    def tell_launcher() -> None:
        with suppress(OSError):  # a launcher that was killed meanwhile; the run goes on without it
            os.write(ready, b"ok\n")
        os.close(ready)

    if not spool.hold() or spool.status.exists():
        tell_launcher()  # somebody else has the run in hand, or it is over: there will be no twins
        sys.exit(0)
    _shepherd(spool, tell_launcher)


def _shepherd(spool: Spool, on_ready: object = None, *, is_throwaway: bool = False, **options: object) -> NoReturn:
    # Everything a replica needs is loaded here, once: forked replicas find it in memory.
    from atoll.log_lines import log_to_stderr_of_replica
    from atoll.replica import entry_runner
    from atoll.replica.supervisor import Supervisor

    log_to_stderr_of_replica(os.environ)

    shepherd = Supervisor(spool, **options)  # type: ignore[arg-type]
    gc.freeze()  # keeps the collector of each replica from copying the pages it shares with us
    attempt = shepherd.run(on_ready=on_ready)
    if attempt is not None:
        _exit(entry_runner.run(attempt))
    if is_throwaway:
        import shutil

        shutil.rmtree(spool.root, ignore_errors=True)
    _exit(shepherd.exit_code())


def _exit(code: int) -> NoReturn:
    """End as the interpreter would, but at once: without tearing down memory that shepherd and replicas share."""
    if (threading := sys.modules.get("threading")) is not None:
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # user code may have closed or replaced it
            stream.flush()
    os._exit(code)


def _container(argv: list[str]) -> NoReturn:
    from atoll.errors import AtollError
    from atoll.replica.container import prepare
    from atoll.replica.rank_process import StopReason

    try:
        spool = prepare(argv, os.environ)
    except AtollError as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(exc.exit_code)
    _shepherd(spool, is_throwaway=True, stop_means=StopReason.PREEMPT)


def _write_diary(spool: Spool) -> None:
    diary = os.open(spool.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for descriptor in (1, 2):
        os.dup2(diary, descriptor)
    os.close(diary)


if __name__ == "__main__":
    main(sys.argv[1:])
