"""`python -m atoll.executors.ssh.host VERB`, on a host: does what one request asks, with the local executor there.

The launcher starts it over ssh, writes one request to its standard input and reads the answer from its standard output;
see `connection`. The replicas of the run are started by the local executor, whose supervisor leaves the session of the
login, so they outlive the connection. A stop of a run that this host does not know leaves a mark: a start that was
sent before it, and whose connection was lost on its way here, then starts nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import atoll
from atoll import journal, registry
from atoll._time import SYSTEM_CLOCK
from atoll.context import RunContext, home
from atoll.errors import AtollError, BackendError, ConfigError, Problems, RunNotFound, StoreError
from atoll.executors.base import Plan
from atoll.executors.ssh.errors import EXECUTOR, error_record
from atoll.executors.ssh.protocol import MARK, PROTOCOL
from atoll.handle import RunHandle
from atoll.names import run_id_problem
from atoll.spec import Placement

_LOOK_S = 0.2
MARKED = "stopped"
"""The folder of marks and locks, one of each for a name."""


def main(verb: str) -> int:
    """Answer one request. The exit code is 0 if there is an answer, also if it is an error."""
    try:
        request = json.loads(sys.stdin.buffer.readline())
        if request["protocol"] != PROTOCOL:
            raise BackendError(
                f"the launcher speaks version {request['protocol']}", executor=EXECUTOR, reason="version"
            )
        done = _ACTIONS[verb](request)
    except AtollError as exc:
        _say(error=error_record(exc))
    except (ValueError, KeyError, TypeError) as exc:
        _say(error=error_record(BackendError(f"the request is damaged: {exc!r}", executor=EXECUTOR, reason="request")))
    else:
        _say(ok=done)
    return 0


def _say(**line: Any) -> None:
    """One line of the answer."""
    record = {"protocol": PROTOCOL, "atoll": atoll.__version__, **line}
    sys.stdout.buffer.write(MARK + json.dumps(record).encode() + b"\n")
    sys.stdout.buffer.flush()


@dataclass(frozen=True)
class Work:
    """One run on this host: the local executor with a folder of its own, and the run's handle for it."""

    executor: Any
    root: Path
    context: RunContext
    replicas: int

    @classmethod
    def of(cls, request: dict[str, Any]) -> Work:
        if problem := run_id_problem(request["run_id"]):
            raise ConfigError(problem)
        numbers = [int(request[name]) for name in ("launch", "first_rank", "replicas")]
        world_size = None if request.get("world_size") is None else int(request["world_size"])
        context = RunContext(str(request["run_id"]), str(request["store"]), numbers[0], numbers[1], world_size)
        return cls(local(), spools(), context, numbers[2])

    @property
    def name(self) -> str:
        return self.context.native_name()

    @property
    def handle(self) -> RunHandle:
        ranks = list(self.context.ranks(self.replicas))
        request = {"label": str(self.root / self.name), "ranks": ranks}
        found: RunHandle = self.executor.handle(Plan("local", self.context.run_id, self.replicas, request))
        return found

    def plan(self, request: dict[str, Any]) -> Plan:
        """The plan of the local executor. Its supervisor also looks for requests to stop in the store."""
        made: Plan = self.executor.plan(self.context, Placement.from_json(request["placement"]))
        return replace(made, request={**made.request, "store_stops": True})

    @property
    def is_started(self) -> bool:
        return self.executor.origin(self.handle) is not None

    @contextmanager
    def only_one(self) -> Iterator[Path]:
        """While this is open, no other request starts or stops this run here. Yields the path of its mark."""
        folder = self.root / MARKED
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{self.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder / self.name


def spools() -> Path:
    """Runs of launchers on other machines; those of this machine's own launchers are in another folder."""
    return home() / "ssh"


def local() -> Any:
    return registry.executor("local", root=str(spools()))


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Everything that a start needs and that only the host can see; raises all problems together."""
    work, problems = Work.of(request), Problems()
    plan = problems.trying(lambda: work.plan(request))
    if plan is not None:
        problems.trying(lambda: work.executor.preflight(plan))
    problems.trying(lambda: _reach_store(work.context.store_uri))
    problems.raise_any(f"run `{work.context.run_id}`")
    return {"host": os.uname().nodename}


def _reach_store(uri: str) -> None:
    """Read from the store; `ConfigError` if this host cannot."""
    try:
        next(iter(registry.open_store(uri).list("no-such-run")), None)
    except StoreError as exc:
        raise ConfigError(f"store: {exc.message}", hint=exc.hint) from exc


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start the replicas of this host, or find them started."""
    work = Work.of(request)
    plan = work.plan(request)
    with work.only_one() as mark:
        if not work.is_started and _is_later(mark):
            what = f"run `{work.context.run_id}` was stopped here before it started"
            raise BackendError(what, executor=EXECUTOR, operation="submit", reason="stopped")
        is_new = not work.is_started
        if is_new:
            _find_run(work.context)
        work.executor.start(plan)
    return {"is_new": is_new}


def _find_run(context: RunContext) -> None:
    """Refuse a start if this host sees another folder, or another bucket, than the launcher, which recorded the run."""
    try:
        journal.read_run(registry.open_store(context.store_uri), context.run_id)
    except RunNotFound as exc:
        hint = "every host needs the same store under this address; with store_is_mounted, the same mounted folder"
        raise ConfigError(f"store=`{context.store_uri}`: {exc.message}", reason="other_store", hint=hint) from exc
    except StoreError:
        pass  # a store that does not answer now; the replicas retry


def _is_later(mark: Path) -> bool:
    """Whether a stop has left its mark since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return mark.exists() and mark.stat().st_mtime >= time.time() - age_s


def status(request: dict[str, Any]) -> dict[str, Any]:
    """The status of the replicas of this host, which count from 0."""
    work = Work.of(request)
    found = work.executor.status(work.handle)
    return {"replicas": [replica.to_json() for replica in found.replicas]}


def watch(request: dict[str, Any]) -> dict[str, Any]:
    """The status of the replicas of this host each time it has changed, until all have ended."""
    work, last = Work.of(request), None
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    while True:
        found = work.executor.status(work.handle)
        rows = [replica.to_json() for replica in found.replicas]
        if rows != last:
            _say(replicas=rows)
        if found.is_terminal:
            return {}
        last = rows
        SYSTEM_CLOCK.sleep(_LOOK_S)


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """Stop replicas, or keep a run from being started; returns when none of them runs."""
    work = Work.of(request)
    ranks = request.get("ranks")
    with work.only_one() as mark:
        if ranks is None and not work.is_started:
            mark.touch()
    work.executor.cancel(work.handle, ranks)
    return {}


def logs(request: dict[str, Any]) -> dict[str, Any]:
    """The lines of a rank, each as a line of the answer, from the line number `skip` on.

    A launcher that lost the connection asks again with the number of lines it has; they count within an attempt.
    """
    work, rank = Work.of(request), int(request["rank"])
    tail, follow, skip = request.get("tail"), bool(request.get("follow")), request.get("skip")
    if not follow:
        for line in work.executor.logs(work.handle, rank, tail=tail):
            _say_line(line)
        return {}
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    attempt = work.executor.status(work.handle).replicas[rank].attempt
    if skip is None or request.get("attempt") != attempt:
        present = 0 if tail is None else sum(1 for _ in work.executor.logs(work.handle, rank))
        skip = 0 if tail is None else max(0, present - tail)
    _say(at=skip, attempt=attempt)
    for number, line in enumerate(work.executor.logs(work.handle, rank, follow=True)):
        if number >= skip:
            _say_line(line)
            sys.stdout.buffer.flush()
    return {}


def _end_with_launcher() -> None:
    """Exit when the connection is lost: its end closes the standard input."""
    sys.stdin.buffer.read()
    os._exit(0)


def _say_line(line: str) -> None:
    sys.stdout.buffer.write(MARK + json.dumps({"line": line}).encode() + b"\n")


def origin(request: dict[str, Any]) -> dict[str, Any]:
    """Whether this host knows the run."""
    return {"is_known": Work.of(request).is_started}


def strays(_: dict[str, Any]) -> dict[str, Any]:
    """What runs here for launchers on other machines."""
    found = []
    for stray in local().strays():
        context = stray.context or local().origin(stray.handle)
        about = None if context is None else [context.run_id, context.store_uri, context.launch, context.first_rank]
        found.append(
            {
                "context": about,
                "is_supervised": stray.context is not None,
                "replicas": stray.handle.replicas,
                "native_id": stray.native_id,
                "message": stray.message,
            }
        )
    return {"strays": found}


def diagnose(_: dict[str, Any]) -> dict[str, Any]:
    """The checks of the local executor here."""
    checks = [[each.name, each.ok, each.message, each.hint] for each in local().diagnose()]
    return {"atoll": atoll.__version__, "host": os.uname().nodename, "python": sys.executable, "checks": checks}


_ACTIONS = {
    "check": check,
    "start": start,
    "status": status,
    "watch": watch,
    "stop": stop,
    "logs": logs,
    "origin": origin,
    "strays": strays,
    "diagnose": diagnose,
}


if __name__ == "__main__":
    code = 70
    with suppress(BrokenPipeError):  # the launcher no longer reads
        code = main(sys.argv[1])
    sys.stdout = None  # the interpreter would flush a broken pipe at its exit
    sys.exit(code)
