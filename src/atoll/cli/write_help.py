"""`python -m atoll.cli.write_help`: write the file that `atoll --help` prints. A test fails if the file is stale."""

from __future__ import annotations

import sys

import click

from atoll.cli.app import root
from atoll.cli.main import HELP_FILE


def help_text() -> str:
    """The help that click renders for `atoll --help`."""
    with click.Context(root, info_name="atoll", **root.context_settings) as context:
        return root.get_help(context) + "\n"


if __name__ == "__main__":
    with open(HELP_FILE, "w", encoding="ascii") as file:
        file.write(help_text())
    sys.stdout.write(f"wrote {HELP_FILE}\n")
