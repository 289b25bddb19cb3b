"""Use an adapter from other, real processes: to plan, to launch and be killed, or to pick up a handle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from atoll.testing import launcher
from atoll.testing.executor_bench import Bench
from atoll.testing.executor_order import Order

_PATIENCE_S = 120.0


class Elsewhere:
    """Another process with a fresh adapter. It gets ready, waits to be released, does one thing and answers."""

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
            [sys.executable, "-m", launcher.__name__],
            env={**os.environ, **bench.environment, **(environment or {})},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        job |= {"verb": verb, "path": bench.path, "settings": dict(bench.settings), "store": bench.store_uri}
        self._write(json.dumps(job))

    def until_ready(self) -> Elsewhere:
        """Returns when only the word to go is missing."""
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def go(self) -> Elsewhere:
        self._write("go")
        return self

    def kill(self) -> None:
        """SIGKILL: no handler, no `finally`, no flush."""
        os.kill(self._process.pid, signal.SIGKILL)

    def answer(self) -> Any:
        """What came of it; None if the process was killed."""
        out, err = self._process.communicate(timeout=_PATIENCE_S)
        if self._process.returncode == -signal.SIGKILL:
            return None
        assert self._process.returncode == 0, f"the other process failed:\n{err}"
        return json.loads(out.splitlines()[-1])

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        os.kill(self._process.pid, signal.SIGINT)

    def ended(self) -> int:
        """The exit code, however it ended."""
        self._process.communicate(timeout=_PATIENCE_S)
        return self._process.returncode

    def end(self) -> None:
        """For `finally`: leave no process and no open pipe."""
        self._process.kill()
        self._process.communicate()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died early; the answer says why


def ask(bench: Bench, verb: str, **job: Any) -> Any:
    """Start another process, let it do one thing, and return its answer."""
    other = Elsewhere(bench, verb, **job)
    try:
        return other.until_ready().go().answer()
    finally:
        other.end()


def submit_at_once(bench: Bench, order: Order, *, processes: int, threads: int) -> list[str]:
    """Many launchers of one run, released at the same moment; the handles they got."""
    others = [Elsewhere(bench, "submit", order=asdict(order), threads=threads) for _ in range(processes)]
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
    """Launch in another process, and learn each step at which it could have died."""
    return list(ask(bench, "submit", order=asdict(order), threads=1)["steps"])


def submit_killed_at(bench: Bench, order: Order, step: str) -> bool:
    """Launch in another process that dies by SIGKILL at that step. False if it never came to it."""
    return ask(bench, "submit", order=asdict(order), threads=1, kill_at=step) is None


def spread(steps: Sequence[str], most: int) -> list[str]:
    """About that many steps to try: two in three inside the adapter's own `submit`, and each after an effect there."""
    first, last = steps.index("before executor.submit #1"), steps.index("after executor.submit #1")
    inside, around = list(range(first, last + 1)), [*range(first), *range(last + 1, len(steps))]
    effects = {step for step in inside if steps[step].startswith("after ")}
    chosen = {*effects, *_even(inside, most - most // 3), *_even(around, most // 3)}
    return [steps[step] for step in sorted(chosen)]


def _even(numbers: Sequence[int], most: int) -> list[int]:
    """At most that many of the numbers, the first and the last among them, evenly spread."""
    if len(numbers) <= most:
        return list(numbers)
    return sorted({numbers[round(i * (len(numbers) - 1) / max(1, most - 1))] for i in range(most)})
