"""The folder for this user's state on this machine. Only a cache and local spools: the truth is in the store."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`ATOLL_HOME`, else `atoll` in the XDG state folder."""
    if given := os.environ.get("ATOLL_HOME"):
        return Path(given).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "atoll"


def default_store() -> str:
    """Where runs are kept when nobody says: a folder of this user on this machine."""
    return os.environ.get("ATOLL_STORE") or str(home() / "store")
