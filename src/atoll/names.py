"""Run ids, and names made from them for backends and object keys."""

from __future__ import annotations

import re

ID_RULE = "1 to 128 printable characters without `/`, and not `.` or `..`"
_WORDS = [
    "amber",
    "basalt",
    "cedar",
    "coral",
    "delta",
    "ember",
    "fjord",
    "gale",
    "harbor",
    "heron",
    "indigo",
    "isle",
    "kelp",
    "lagoon",
    "maple",
    "mesa",
    "ocean",
    "opal",
    "pearl",
    "pine",
    "quartz",
    "reef",
    "ridge",
    "sable",
    "sand",
    "shore",
    "sky",
    "slate",
    "spruce",
    "surf",
    "tern",
    "tide",
    "wave",
    "wren",
]
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


def new_run_id() -> str:
    """A new random id that is easy to read aloud, such as `coral-tide-7f3kq2`."""
    import secrets

    tail = "".join(secrets.choice(_ALPHABET) for _ in range(6))
    return f"{secrets.choice(_WORDS)}-{secrets.choice(_WORDS)}-{tail}"


def run_id_problem(run_id: object) -> str | None:
    """The rule that `run_id` breaks, or None."""
    if not isinstance(run_id, str) or not 0 < len(run_id) <= 128:
        return f"a run id is {ID_RULE}"
    if run_id in (".", "..") or "/" in run_id or "\\" in run_id or not run_id.isprintable() or run_id != run_id.strip():
        return f"a run id is {ID_RULE}, with no space at either end"
    return None


def native_name(run_id: str, scope: str, *, limit: int = 63, reserve: int = 0) -> str:
    """A name of `[a-z0-9-]` that every service accepts, and that is unique for the run id and the scope.

    `scope` is the store: equal run ids in two stores get different names. `reserve` leaves space for a suffix (a rank).
    The digest is never cut, so two long ids with the same beginning get different names. (E16)
    """
    import hashlib

    digest = hashlib.sha256(f"{scope}\0{run_id}".encode()).hexdigest()[:12]
    readable = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    if not readable[:1].isalpha():
        readable = f"run-{readable}"
    length = limit - reserve - len(digest) - 1
    return f"{readable[:length].strip('-')}-{digest}"


def key_name(run_id: str) -> str:
    """The run id as one part of an object key: unchanged if it is plain, else `~` and a native name."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
        return run_id
    return "~" + native_name(run_id, "")
