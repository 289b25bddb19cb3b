"""A warm process that forks replicas on request, so that a real process costs milliseconds instead of imports.

Run as a script with the modules to load. Reads one order a line on stdin and forks a child for each; writes a line on
stdout for everything that happens to a child. It has one thread and never touches a store, so its children may.
When stdin closes, or however it dies, its children are killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import traceback
from importlib import import_module
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(modules: list[str]) -> None:
    for module in modules:
        import_module(module)
    libc = ctypes.CDLL(None, use_errno=True)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    children: dict[int, int] = {}
    say({"ready": True})
    pending = b""
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if wake_read in ready:
            os.read(wake_read, 4096)
        reap(children)
        if 0 in ready:
            got = os.read(0, 1 << 16)
            if not got:
                break
            *lines, pending = (pending + got).split(b"\n")
            for line in lines:
                order = json.loads(line)
                children[fork(order, libc)] = order["number"]
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def fork(order: dict[str, Any], libc: Any) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        say({"number": order["number"], "pid": pid})
        return pid
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order["out"] + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)
        live(order)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


def live(order: dict[str, Any]) -> None:
    """Be the child: call what was ordered and leave what came of it."""
    os.environ.update(order["environment"])
    module, _, name = order["entry"].partition(":")
    try:
        came = {"value": getattr(import_module(module), name)(**order["arguments"])}
    except Exception as exc:
        traceback.print_exc()
        details = {key: getattr(exc, key) for key in ("missing", "rank", "check", "round_no") if hasattr(exc, key)}
        came = {"error": type(exc).__name__, "message": str(exc), "details": details}
    with open(order["out"] + ".new", "w") as file:
        json.dump(came, file)
    os.replace(order["out"] + ".new", order["out"])


def reap(children: dict[int, int]) -> None:
    """Say what has become of children: stopped, gone on, or over."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid == 0:
            return
        number = children[pid]
        if os.WIFSTOPPED(status):
            say({"number": number, "state": "stopped"})
        elif os.WIFCONTINUED(status):
            say({"number": number, "state": "continued"})
        else:
            del children[pid]
            say({"number": number, "code": os.waitstatus_to_exitcode(status)})


def say(fact: dict[str, Any]) -> None:
    os.write(1, json.dumps(fact).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
