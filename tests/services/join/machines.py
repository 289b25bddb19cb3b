"""Machines as processes: `python -m services.join.machines` forks one for each line of its input, and prints its pid.

A line has the arguments of the command `atoll` and the variables of the machine. Forked processes have all modules
loaded, so that a machine joins soon.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from atoll.cli.app import invoke
from atoll.cli.commands import join as _loaded  # noqa: F401


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes machines that have ended
    for line in sys.stdin:
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(order["environment"])
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            os._exit(invoke(order["argv"]))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
