"""`python -m atoll.serverless.replica_entrypoint`: another name of `python -m atoll.replica`, with the same flags.

Programs of the replica protocol name a module like this one as the command of a container. The supervisor forks from
this process, so this module imports no facade.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from atoll.replica import __main__ as replica


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one replica, which the environment and the flags describe, and exit with its code."""
    replica.main(sys.argv[1:] if argv is None else list(argv))


if __name__ == "__main__":
    main()
