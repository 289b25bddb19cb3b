"""`python -m atoll.testing.launcher`: the other process of the executor contract. Reads one job, answers in JSON.

It can be told to die at a step: before any system call of a launch that changes something (seen by an audit hook),
after a process was started, and before and after every request to the store and to the adapter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.abc import MetaPathFinder
from threading import Thread
from typing import Any

_CHANGES = ("os.", "socket.", "subprocess.", "http.client.", "fcntl.", "shutil.", "tempfile.")
_LOOKS = ("os.listdir", "os.scandir", "os.walk", "socket.gethostname", "socket.gethostbyname", "os.putenv")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Steps:
    """Counts the steps of a launch while it is armed, and ends the process before the one it was told to."""

    def __init__(self, kill_at: str | None) -> None:
        self._kill_at = kill_at
        self._is_armed = False
        self._counts: Counter[str] = Counter()
        self.seen: list[str] = []
        """Each with its number among its like: a launch may take one `os.mkdir` more or less than the last."""

    def arm(self) -> None:
        self._is_armed = True
        sys.addaudithook(self._hear)
        self._watch_popen()

    def disarm(self) -> None:
        self._is_armed = False

    def note(self, step: str) -> None:
        if not self._is_armed:
            return
        self._counts[step] += 1
        numbered = f"{step} #{self._counts[step]}"
        if numbered == self._kill_at:
            self.disarm()  # the kill is a system call as well
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(numbered)

    def _watch_popen(self) -> None:
        """The moment after a process was started is a step as well: its child is alive, and nobody knows."""
        start = subprocess.Popen.__init__

        def start_and_note(popen: Any, *args: Any, **options: Any) -> None:
            start(popen, *args, **options)
            self.note("after subprocess.Popen")

        subprocess.Popen.__init__ = start_and_note  # type: ignore[method-assign,assignment]

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        is_change = event.startswith(_CHANGES) and event not in _LOOKS
        if event == "open" and len(args) > 2 and isinstance(args[2], int):
            is_change = bool(args[2] & _WRITES)
        if is_change:
            self.note(event)


class Watched:
    """Anything with methods; each call is two steps."""

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
    """Makes modules look as if they were not installed."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: object) -> None:
        if any(name == absent or name.startswith(f"{absent}.") for absent in self._names):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main() -> int:
    """Read the job, get ready, wait for the word, do it, answer."""
    sys.dont_write_bytecode = True  # else imports would be steps
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
    from atoll.testing.executor_order import Order

    return Order(**job["order"]).draft(_adapter(job), job["store"])


def _plan(job: dict[str, Any]) -> Callable[[], Any]:
    draft = _draft(job)
    return lambda: draft.plan.to_json()  # noqa: PLW0108  reads as a call that is made later


def _use(job: dict[str, Any]) -> Callable[[], Any]:
    """All that a handle is for, with nothing but its text."""
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
    steps = Steps(job.get("kill_at"))
    drafts = [_draft(job) for _ in range(job["threads"])]
    for draft in drafts:
        draft.store = Watched(draft.store, "store", steps)
        draft.executor = Watched(draft.executor, "executor", steps)

    def submit() -> dict[str, Any]:
        steps.arm()
        handles = list(_each_in_a_thread(drafts)) if len(drafts) > 1 else [str(drafts[0].submit().handle)]
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
        except Exception as exc:  # noqa: BLE001  the suite judges it
            return {"raised": type(exc).__name__, "extra": getattr(exc, "extra", None), "text": str(exc)}
        return {"raised": None, "extra": None, "text": ""}

    return attempt


if __name__ == "__main__":
    sys.exit(main())
