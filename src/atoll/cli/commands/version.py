"""`atoll version`: the versions of Atoll, Python and the operating system."""

from __future__ import annotations

import platform
import sys

from atoll import __version__
from atoll.cli.app import command
from atoll.cli.output import Output


@command("Set up", short_help="Show the versions of Atoll and Python.")
def version_command(out: Output) -> None:
    """Show the versions of Atoll, Python and the operating system."""
    versions = {"atoll": __version__, "python": platform.python_version(), "platform": sys.platform}
    out.data(versions)
    out.text(f"atoll {versions['atoll']}, Python {versions['python']} on {versions['platform']}")
