"""`python -m services.kubernetes` (in `tests/`): a cluster until Ctrl-C. Prints the variable that leads to it."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import tempfile
from pathlib import Path

from services.kubernetes import build
from services.kubernetes.cluster import started
from services.kubernetes.control_plane import CONTROLLERS as CONTROL_PLANE_CONTROLLERS
from services.kubernetes.controllers.processes import CONTROLLERS, server_for
from services.kubernetes.controllers.processes import started as controllers
from services.kubernetes.controllers.queues import make_flavor

HINTS = """\
# Nodes run pods as processes of this machine. Images: atoll-test (this Python, with Atoll), python:3.11, busybox.
# Try in another terminal, after the line above:
#   kubectl get nodes
#   kubectl create job hello --image=busybox -- echo hello
#   atoll doctor kubernetes
#   atoll run script.py:function -n 2 --on kubernetes --workspace . --store /tmp/atoll \\
#     --setting image=atoll-test --setting store_is_mounted=true
# Logs of the programs are in {folder}. Ctrl-C ends everything."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.kubernetes", description=__doc__)
    parser.add_argument("--binary", type=Path, help="the control plane's programs; built if not given")
    parser.add_argument("--folder", type=Path, help="where files and logs are; a temporary folder if not given")
    parser.add_argument("--owner", type=int, help="a process; the cluster ends with it")
    parser.add_argument(
        "--controller",
        action="append",
        default=[],
        choices=CONTROLLERS,
        help="a controller that runs beside the control plane; may be repeated",
    )
    parser.add_argument("--api-flag", action="append", default=[], help="a flag of kube-apiserver; may be repeated")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        binary = options.binary or build.control_plane(_say)
        built = {name: build.built(CONTROLLERS[name].program, _say) for name in options.controller}
    except build.CannotFetch as exc:
        sys.exit(f"error: {exc}")
    with tempfile.TemporaryDirectory(prefix="atoll-cluster-") as temporary:
        folder = options.folder or Path(temporary)
        own = (*CONTROL_PLANE_CONTROLLERS, *(["clusterrole-aggregation-controller"] if built else []))
        owner = None if options.owner is None else os.pidfd_open(options.owner)
        with (
            started(binary, folder, api_flags=options.api_flag, controllers=own) as cluster,
            controllers(cluster.plane, built) as found,
        ):
            server = server_for(found)
            if "kueue" in built:
                make_flavor(cluster.api)
            if built:
                (folder / "controllers.json").write_text(
                    json.dumps({"control": f"http://127.0.0.1:{server.server_port}"})
                )
            print(f"export KUBECONFIG={cluster.kubeconfig}\n{HINTS.format(folder=folder)}", flush=True)
            (folder / "ready").touch()
            watched = [server.fileno()] if owner is None else [server.fileno(), owner]
            while owner not in select.select(watched, [], [])[0]:
                server.handle_request()


def _say(line: str) -> None:
    print(f"# {line}", flush=True)


if __name__ == "__main__":
    main()
