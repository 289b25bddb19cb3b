"""The `atoll` command. It prints the help from a text file; every other command loads the modules that it needs.

Only `sys` and `os` may be imported at the top, because every command waits for this module.
"""

from __future__ import annotations

import os
import sys

HELP_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "help.txt")
COMPLETE = "_ATOLL_COMPLETE"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if COMPLETE not in os.environ:
            if argv in ([], ["--help"], ["-h"]):
                return _help()
            if argv == ["--version"]:
                return _version()
        from atoll.cli.app import invoke

        return invoke(argv)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        _discard_output()
        return 0


def _discard_output() -> None:
    """Discard the remaining output, after a reader such as `| head` has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help() -> int:
    with open(HELP_FILE, encoding="ascii") as file:
        sys.stdout.write(file.read())
    sys.stdout.flush()
    return 0


def _version() -> int:
    from atoll import __version__

    sys.stdout.write(f"atoll {__version__}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
