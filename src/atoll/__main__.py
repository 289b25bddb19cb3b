"""`python -m atoll`: the command line, where `atoll` is not on the PATH."""

from __future__ import annotations

import sys

from atoll.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
