"""Write the wire fixture: a store with runs of every kind, and what reading and continuing them must give.

    unshare -Uru sh -c 'hostname machine && python tests/wire_v1/write.py FOLDER'

writes `FOLDER/store` and `FOLDER/expected.json`. Version 0.1 wrote `tests/wire_v1` this way, once. That store is never
written again, because its purpose is that later code reads what 0.1 wrote: a new version of the format gets a folder
of its own. `unshare` keeps the name of the machine out of the store. For the same reason launched runs use ATOLL_HOME
and a working folder in `/tmp`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wire_means import SPACES, leave_parts, mean_again
from wire_toys import CASES, Case, only, run_case, verified

import atoll

PLACE = Path("/tmp/atoll-wire-v1")
JOBS = """
import signal
import time


def stumble(ctx, *, greeting):
    print(f"{greeting}: rank {ctx.rank}, attempt {ctx.attempt}", flush=True)
    ctx.log(round_no=3, loss=0.25)
    if ctx.rank == 1 and ctx.attempt == 0:
        raise ValueError("the first attempt of rank 1 fails")
    return {"rank": ctx.rank, "attempt": ctx.attempt, "long": "y" * (66000 if ctx.rank == 0 else 1)}


def fail(ctx):
    raise ValueError("this one fails")


def hang(ctx):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends without a traceback, which would name files of this machine
    ctx.log(ready=1.0)
    print("hanging", flush=True)
    time.sleep(600)
"""


def main(folder: Path) -> None:
    """Write the store, then compute what is expected of it on copies."""
    store, found = folder / "store", {}
    folder.mkdir(parents=True)
    for case in CASES:
        finals = run_case(str(store), case.finished, case)
        run_case(str(store), case.stopped, case, stop=True, checkpoint=case.checkpoint)
        found[case.name] = {"finished": asdict(only(finals))}
    leave_parts(str(store))
    launch_runs(str(store))
    shutil.rmtree(store / ".atoll-tmp~f")
    for case in CASES:
        found[case.name] |= continued(store, case)
    means = {str(space): mean_again(copied(store), space) for space in SPACES}
    expected = {"cases": found, "means": means, "objects": objects(store)}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def continued(store: Path, case: Case) -> dict[str, Any]:
    """What `atoll verify` counts in the finished run of a case, and what its stopped run ends with."""
    at = copied(store)
    final = only(run_case(at, case.stopped, case, attempt=1, checkpoint=case.checkpoint))
    return {"verified": verified(at, case.finished), "continued": asdict(final)}


def launch_runs(store: str) -> None:
    """Three runs on the local executor: one with a restart and a bundle, one that fails, one that is cancelled."""
    shutil.rmtree(PLACE, ignore_errors=True)
    code = PLACE / "code"
    code.mkdir(parents=True)
    (code / "jobs.py").write_text(JOBS)
    os.environ["ATOLL_HOME"] = str(PLACE / "home")
    os.chdir(code)
    where = {"on": "local", "store": store, "workspace": str(code)}
    good = atoll.launch(
        "jobs:stumble", run_id="launched", replicas=2, max_restarts=1, args={"greeting": "héllo"}, **where
    )
    bad = atoll.launch("jobs:fail", run_id="failed run", replicas=1, **where)  # a space: not a plain part of a key
    hanging = atoll.launch("jobs:hang", run_id="cancelled", replicas=1, **where)
    good.wait(120)
    bad.wait(120)
    while not any(replica.progress and replica.progress.metrics for replica in hanging.status().replicas):
        pass
    hanging.cancel()
    shutil.rmtree(PLACE)


def objects(store: Path) -> dict[str, str]:
    """Every key of a store with the SHA-256 of its object, shortened."""
    opened = atoll.open_store(store)
    return {key: hashlib.sha256(opened.get(key)).hexdigest()[:16] for key in sorted(opened.list())}


def copied(store: Path) -> str:
    """A copy of the store that may be written to."""
    shutil.rmtree(PLACE, ignore_errors=True)
    return str(shutil.copytree(store, PLACE / "copy"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
