"""Runs a command in the workspace that `code_store` brought: `python -m atoll.torchx.unpack STORE DIGEST -- COMMAND`.

The container runs this before the command of its role. It imports nothing of TorchX, which the image need not have.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from atoll.bundle import fetch_and_unpack
from atoll.registry import open_store


def main(arguments: Sequence[str]) -> None:
    """Unpack the bundle, change to its folder, and become the command."""
    uri, digest, dashes, *command = arguments
    if dashes != "--" or not command:
        raise SystemExit("usage: python -m atoll.torchx.unpack STORE DIGEST -- COMMAND [ARGUMENT...]")
    place = Path(tempfile.gettempdir()) / f"atoll-workspace-{os.getuid()}"
    folder = str(fetch_and_unpack(open_store(uri), digest, place))
    os.chdir(folder)
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.execvpe(command[0], command, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
