"""What the launch benchmark starts: a function that says when it was entered, alone or after a real import."""

from __future__ import annotations

import sys
import time


def plain(ctx: object = None) -> float:
    return time.time()


def with_numpy(ctx: object = None) -> float:
    import numpy  # noqa: F401, ICN001

    return time.time()


if __name__ == "__main__":
    print(globals()[sys.argv[1]](), flush=True)
