"""`python -m atoll`: the command line, for whoever has not got its folder on the path."""

from __future__ import annotations

import sys

from atoll.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
