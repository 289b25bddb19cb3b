"""The real command line, as processes, with real local runs of a tiny job in a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.replica import processes

JOB = '''
import os, sys, time

def ok(ctx, *, steps=2, note="", value=None):
    for step in range(steps):
        print(f"rank {ctx.rank} step {step} {note}".rstrip(), flush=True)
        ctx.log(round_no=step, loss=1 / (step + 1))
    return {"rank": ctx.rank} if value is None else value

def typed(ctx, *, lr: float = 0.1):
    return lr

def bad(ctx):
    print("about to fail", flush=True)
    if ctx.rank == 1:
        raise ValueError("no good")
    return ctx.rank

def until(ctx, *, gate, fail=False):
    """Goes on until the file `gate` is there."""
    print(f"rank {ctx.rank} waits", flush=True)
    ctx.log(round_no=7, loss=0.5)
    while not os.path.exists(gate):
        time.sleep(0.02)
    print(f"rank {ctx.rank} goes", flush=True)
    if fail and ctx.rank == 0:
        raise SystemExit(3)
    return ctx.rank

def silent(ctx, *, gate):
    while not os.path.exists(gate):
        time.sleep(0.02)

def killed_once(ctx, *, gate):
    if ctx.rank == 1 and ctx.attempt == 0:
        os.kill(os.getpid(), 9)
    until(ctx, gate=gate)

def bad_and_until(ctx, *, gate):
    if ctx.rank == 0:
        raise ValueError("no good")
    until(ctx, gate=gate)

def raw(ctx):
    sys.stdout.buffer.write(b"caf\\xc3\\xa9 \\xff\\xfe\\n\\x1b[31mred\\x1b[0m\\n")
    sys.stdout.buffer.write(b"\\x1b]0;title\\x07 10%|#\\r\\x1b[A\\x1b[32m100%|##\\n")
    sys.stdout.flush()

def bar(ctx, *, gate):
    print("begin", flush=True)
    print(" 10%|#", end="\\r 50%|##", flush=True)
    while not os.path.exists(gate):
        time.sleep(0.02)
    print("\\r100%|###", flush=True)

def many(ctx, *, lines):
    for n in range(lines):
        print("line", n)

def odd(ctx):
    return {"model": object()}

def nan(ctx):
    ctx.log(round_no=0, loss=float("nan"))
'''

SCRIPT = """
import sys
print("words", sys.argv[1:], flush=True)
"""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    def lines(self) -> list[dict[str, Any]]:
        """Every line of stdout as strict JSON."""
        return [json.loads(line, parse_constant=_refuse) for line in self.stdout.splitlines()]

    @property
    def envelope(self) -> dict[str, Any]:
        last = self.lines()[-1]
        assert set(last) == {"schema", "command", "ok", "exit_code", "data", "error"}
        assert last["schema"] == "atoll/1"
        assert last["exit_code"] == self.code
        assert last["ok"] is (self.code == 0)
        return last

    @property
    def data(self) -> Any:
        return self.envelope["data"]

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.envelope["error"]
        return found


class Cli:
    """`atoll` in a folder with the job, and a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        (folder / "job.py").write_text(JOB)
        (folder / "words.py").write_text(SCRIPT)
        (folder / ".git").mkdir()  # the configuration is not looked for above
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ATOLL_", "NO_COLOR", "FORCE_COLOR"))}
        self.env = {**inherited, "ATOLL_HOME": str(self.home), "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1"}

    @property
    def program(self) -> str:
        found = shutil.which("atoll", path=os.path.dirname(sys.executable))
        assert found, "the package is not installed beside this Python"
        return found

    def __call__(self, *args: object, stdin: str | None = None, env: dict[str, str] | None = None) -> Done:
        done = subprocess.run(
            [self.program, *map(str, args)],
            cwd=self.folder,
            env={**self.env, **(env or {})},
            input=None if stdin is None else stdin.encode(),
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            timeout=120,
            check=False,
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *args: object, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([self.program, *map(str, args)], cwd=self.folder, env=self.env, **options)

    def detached(self, *args: object) -> str:
        """Start a run and return its id."""
        done = self("run", "--detach", *args)
        assert done.code == 0, done.stderr
        return done.stdout.strip()

    def end_everything(self) -> None:
        spools = self.home / "local"
        for folder in spools.iterdir() if spools.is_dir() else ():
            processes.kill_all(str(folder))


class Inside:
    """The same commands without a process of their own: for the many small cases."""

    def __init__(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.at(cli)

    def at(self, cli: Cli) -> Inside:
        """In the folder and with the home of this one."""
        self.folder, self.home = cli.folder, cli.home
        self._monkeypatch.chdir(cli.folder)
        self._monkeypatch.setenv("ATOLL_HOME", str(cli.home))
        return self

    def __call__(self, *args: object) -> Done:
        from atoll.cli.main import main

        self._capsys.readouterr()
        code = main(list(map(str, args)))
        said = self._capsys.readouterr()
        return Done(code, said.out, said.err)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
