"""Uses an adapter from another, real process: to plan, to launch and be killed, or to use a handle.

The suite starts `python -m atoll.testing.other_process` through `OtherProcess`; `main` reads one job and answers in
JSON. A launch can be killed or interrupted at a step: before each system call that changes something (an audit hook
reports it), after a process was started, and before and after each call to the store and to the adapter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from threading import Thread
from typing import Any

from atoll.errors import AtollError
from atoll.testing.bench import Bench, Order

_CHANGES = ("os.", "socket.", "subprocess.", "http.client.", "fcntl.", "shutil.", "tempfile.")
_LOOKS = ("os.listdir", "os.scandir", "os.walk", "socket.gethostname", "socket.gethostbyname", "os.putenv")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_TIMEOUT_S = 120.0


class OtherProcess:
    """A process with a fresh adapter. It prepares one job, waits for `go`, does the job and answers."""

    def __init__(
        self,
        bench: Bench,
        verb: str,
        *,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        **job: Any,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, **bench.environment, **(environment or {})},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        job |= {"verb": verb, "path": bench.path, "settings": dict(bench.settings), "store": bench.store_uri}
        self._write(json.dumps(job))

    def until_ready(self) -> OtherProcess:
        """Return when the process waits for `go`."""
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def go(self) -> OtherProcess:
        self._write("go")
        return self

    def kill(self) -> None:
        """SIGKILL: no handler, no `finally`, no flush."""
        os.kill(self._process.pid, signal.SIGKILL)

    def answer(self) -> Any:
        """The answer; None if the process was killed."""
        out, err = self._process.communicate(timeout=_TIMEOUT_S)
        if self._process.returncode == -signal.SIGKILL:
            return None
        assert self._process.returncode == 0, f"the other process failed:\n{err}"
        return json.loads(out.splitlines()[-1])

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        os.kill(self._process.pid, signal.SIGINT)

    def ended(self) -> int:
        """Wait for the end, and return the exit code."""
        self._process.communicate(timeout=_TIMEOUT_S)
        return self._process.returncode

    def end(self) -> None:
        """For `finally`: end the process and close its pipes."""
        self._process.kill()
        self._process.communicate()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process died early; `answer` shows why


def ask(bench: Bench, verb: str, **job: Any) -> Any:
    """Start another process, let it do one job, and return its answer."""
    other = OtherProcess(bench, verb, **job)
    try:
        return other.until_ready().go().answer()
    finally:
        other.end()


def submit_at_once(bench: Bench, order: Order, *, processes: int, threads: int) -> list[str]:
    """Launch one run from many processes and threads at the same moment; returns all handles."""
    others = [OtherProcess(bench, "submit", order=asdict(order), threads=threads) for _ in range(processes)]
    try:
        for other in others:
            other.until_ready()
        for other in others:
            other.go()
        return [handle for other in others for handle in other.answer()["handles"]]
    finally:
        for other in others:
            other.end()


def steps_of_submit(bench: Bench, order: Order) -> list[str]:
    """Launch in another process, and return each step at which it could be killed."""
    return list(ask(bench, "submit", order=asdict(order), threads=1)["steps"])


def submit_killed_at(bench: Bench, order: Order, step: str) -> bool:
    """Launch in another process that is killed at that step. False if it did not reach the step."""
    return ask(bench, "submit", order=asdict(order), threads=1, kill_at=step) is None


@dataclass(frozen=True)
class Interrupted:
    """How a launch ended that got Ctrl-C: the class of its exception, and the replicas that the exception names."""

    raised: str | None
    left_running: Sequence[str] = ()


def submit_interrupted_at(bench: Bench, order: Order, step: str) -> Interrupted:
    """Launch in another process that gets SIGINT at that step."""
    answer = ask(bench, "submit", order=asdict(order), threads=1, interrupt_at=step)
    return Interrupted(answer.get("raised"), answer.get("left_running", ()))


def spread(steps: Sequence[str], most: int) -> list[str]:
    """About `most` of the steps: two thirds while the adapter starts replicas, and there each step after an effect."""
    verb = "start" if "before executor.start #1" in steps else "submit"
    first, last = steps.index(f"before executor.{verb} #1"), steps.index(f"after executor.{verb} #1")
    inside, around = list(range(first, last + 1)), [*range(first), *range(last + 1, len(steps))]
    effects = {step for step in inside if steps[step].startswith("after ")}
    chosen = {*effects, *_even(inside, most - most // 3), *_even(around, most // 3)}
    return [steps[step] for step in sorted(chosen)]


def _even(numbers: Sequence[int], most: int) -> list[int]:
    """At most `most` of the numbers, evenly spread, including the first and the last."""
    if len(numbers) <= most:
        return list(numbers)
    return sorted({numbers[round(i * (len(numbers) - 1) / max(1, most - 1))] for i in range(most)})


# ── in the other process ────────────────────────────────────────────────────────────────────────────────────────


class Steps:
    """Counts the steps of a launch while armed, and sends a signal to this process at one of them."""

    def __init__(self, signal_at: str | None, number: signal.Signals) -> None:
        self._signal_at, self._signal = signal_at, number
        self._is_armed = False
        self._counts: Counter[str] = Counter()
        self.seen: list[str] = []
        """Each with its number among equal steps: launches may differ by, for example, one `os.mkdir`."""

    def arm(self) -> None:
        self._is_armed = True
        sys.addaudithook(self._audit)
        self._watch_popen()

    def disarm(self) -> None:
        self._is_armed = False

    def note(self, step: str) -> None:
        if not self._is_armed:
            return
        self._counts[step] += 1
        numbered = f"{step} #{self._counts[step]}"
        if numbered == self._signal_at:
            self.disarm()  # the kill itself is a system call too
            os.kill(os.getpid(), self._signal)
        self.seen.append(numbered)

    def _watch_popen(self) -> None:
        """Make the moment after the start of a child process a step of its own."""
        start = subprocess.Popen.__init__

        def start_and_note(popen: Any, *args: Any, **options: Any) -> None:
            start(popen, *args, **options)
            self.note("after subprocess.Popen")

        subprocess.Popen.__init__ = start_and_note  # type: ignore[method-assign,assignment]

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        is_change = event.startswith(_CHANGES) and event not in _LOOKS
        if event == "open" and len(args) > 2 and isinstance(args[2], int):
            is_change = bool(args[2] & _WRITES)
        if is_change:
            self.note(event)


class Watched:
    """A wrapper that makes two steps of each method call."""

    def __init__(self, inner: Any, word: str, steps: Steps) -> None:
        self._inner, self._word, self._steps = inner, word, steps

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._steps.note(f"before {self._word}.{name}")
            value = found(*args, **options)
            self._steps.note(f"after {self._word}.{name}")
            return value

        return call


class Absent(MetaPathFinder):
    """An import hook that hides modules as if they were not installed."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: object) -> None:
        if any(name == absent or name.startswith(f"{absent}.") for absent in self._names):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main() -> int:
    """Read the job, prepare it, wait for `go`, do it, answer."""
    sys.dont_write_bytecode = True  # otherwise imports would be steps
    job = json.loads(sys.stdin.readline())
    act = {"plan": _plan, "use": _use, "submit": _submit, "import": _import}[job["verb"]](job)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(act()), flush=True)
    return 0


def _adapter(job: dict[str, Any]) -> Any:
    module, _, name = job["path"].partition(":")
    return getattr(import_module(module), name)(**job["settings"])


def _draft(job: dict[str, Any]) -> Any:
    return Order(**job["order"]).draft(_adapter(job), job["store"])


def _plan(job: dict[str, Any]) -> Callable[[], Any]:
    draft = _draft(job)
    return lambda: draft.plan.to_json()  # noqa: PLW0108  reads as a call that is made later


def _use(job: dict[str, Any]) -> Callable[[], Any]:
    """Status, logs and cancel with nothing but the text of a handle."""
    from atoll.handle import RunHandle

    executor = _adapter(job)

    def use() -> dict[str, Any]:
        handle = RunHandle.parse(job["handle"])
        before = executor.status(handle).to_json()
        log = list(executor.logs(handle, job["rank"]))
        executor.cancel(handle)
        return {"before": before, "log": log, "after": executor.status(handle).to_json()}

    return use


def _submit(job: dict[str, Any]) -> Callable[[], Any]:
    is_kill = "kill_at" in job
    steps = Steps(job.get("kill_at" if is_kill else "interrupt_at"), signal.SIGKILL if is_kill else signal.SIGINT)
    drafts = [_draft(job) for _ in range(job["threads"])]
    for draft in drafts:
        draft.store = Watched(draft.store, "store", steps)
        draft.executor = Watched(draft.executor, "executor", steps)

    def submit() -> dict[str, Any]:
        steps.arm()
        try:
            handles = list(_each_in_a_thread(drafts)) if len(drafts) > 1 else [str(drafts[0].submit().handle)]
        except (KeyboardInterrupt, AtollError) as exc:
            if "interrupt_at" not in job:
                raise
            return {"raised": type(exc).__name__, "left_running": list(getattr(exc, "left_running", ()))}
        steps.disarm()
        return {"handles": handles, "steps": steps.seen}

    return submit


def _each_in_a_thread(drafts: list[Any]) -> Iterator[str]:
    handles: list[str] = []
    threads = [Thread(target=lambda d=draft: handles.append(str(d.submit().handle))) for draft in drafts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from handles


def _import(job: dict[str, Any]) -> Callable[[], Any]:
    """Import the adapter without its SDK, then try to build it."""
    sys.meta_path.insert(0, Absent(job["sdk"]))

    def attempt() -> dict[str, Any]:
        import_module(job["path"].partition(":")[0])
        try:
            _adapter(job)
        except Exception as exc:  # noqa: BLE001  the suite checks it
            return {"raised": type(exc).__name__, "extra": getattr(exc, "extra", None), "text": str(exc)}
        return {"raised": None, "extra": None, "text": ""}

    return attempt


if __name__ == "__main__":
    sys.exit(main())
