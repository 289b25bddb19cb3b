"""`python -m services.hf_jobs` (in `tests/`): the peer, until Ctrl-C. Prints the variables that lead to it."""

from __future__ import annotations

import argparse
import signal
from threading import Event

from services.hf_jobs.server import Peer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.hf_jobs", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    ended = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    peer = Peer(port=options.port)
    try:
        for name, value in peer.environment().items():
            print(f"export {name}={value}", flush=True)
        ended.wait()
    finally:
        peer.close()


if __name__ == "__main__":
    main()
