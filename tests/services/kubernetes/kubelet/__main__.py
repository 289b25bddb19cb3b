"""`python -m services.kubernetes.kubelet FOLDER`: the nodes of the control plane whose folder this is.

It writes `kubelet.json` into the folder when it is ready, and runs until it is killed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from services.kubernetes.control_plane import ControlPlane
from services.kubernetes.kubelet.control import ControlServer, Kubelet


def main() -> None:
    folder = Path(sys.argv[1])
    kubelet = Kubelet(ControlPlane.load(folder), folder / "nodes")
    for spec in json.loads((folder / "nodes.json").read_text()):
        kubelet.add_node(spec)
    server = ControlServer(kubelet)
    partial = folder / "kubelet.json.partial"
    partial.write_text(json.dumps({"control": server.url}))
    partial.replace(folder / "kubelet.json")
    server.serve_forever()


if __name__ == "__main__":
    main()
