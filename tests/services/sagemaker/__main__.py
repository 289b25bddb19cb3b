"""`python -m services.sagemaker` (in `tests/`): the peer, until Ctrl-C. Prints the variables that lead to it."""

from __future__ import annotations

import argparse
import os
import signal
from threading import Event

from services.sagemaker.server import Peer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.sagemaker", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log-lag", type=float, default=0.0, metavar="SECONDS", help="how late logs are delivered")
    options = parser.parse_args()
    ended = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    peer = Peer(port=options.port, log_lag_s=options.log_lag)
    os.environ.update(peer.environment())  # containers find S3 here too
    try:
        for name, value in peer.environment().items():
            print(f"export {name}={value}", flush=True)
        ended.wait()
    finally:
        peer.close()


if __name__ == "__main__":
    main()
