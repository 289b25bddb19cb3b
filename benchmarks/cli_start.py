"""Start-up time of the command line, side by side with an empty interpreter. `python benchmarks/cli_start.py`

Every round runs all commands once, so that a busy moment of the machine hits all of them; the medians are compared.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

ROUNDS = 40
PYTHON = sys.executable
ATOLL = os.path.join(os.path.dirname(PYTHON), "atoll")
COMMANDS = {
    "python -c pass": [PYTHON, "-c", "pass"],
    "python -c 'import atoll'": [PYTHON, "-c", "import atoll"],
    "atoll --help": [ATOLL, "--help"],
    "atoll": [ATOLL],
    "atoll --version": [ATOLL, "--version"],
    "atoll version": [ATOLL, "version"],
    "atoll ps": [ATOLL, "ps"],
}


def main() -> None:
    """Print a table: median milliseconds, and how many times the empty interpreter that is."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            taken[name].append(time.perf_counter() - began)
    empty = statistics.median(taken["python -c pass"])
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        print(f"{name:<26} {median * 1000:7.1f} ms  {median / empty:5.2f} x")


if __name__ == "__main__":
    main()
