"""How many calls one `status` of a SageMaker run takes, and how long, over real boto3 and the tests' peer.

python benchmarks/sagemaker_status.py [--replicas 1,10,100,250,1000]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from atoll.context import RunContext
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.handle import RunHandle
from atoll.spec import Placement
from services.sagemaker.bench import HASTE, SETTINGS
from services.sagemaker.server import Peer

STATES = {
    "all running": ("InProgress", "Training"),
    "all succeeded": ("Completed", "Completed"),
    "all cancelled": ("Stopped", "Stopped"),
    "all failed": ("Failed", "Failed"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", default="1,10,100,250,1000")
    sizes = [int(size) for size in parser.parse_args().replicas.split(",")]
    peer = Peer()
    os.environ.update(peer.environment())
    try:
        print(f"{'replicas':>8}  {'state':<14} {'first round':>12} {'later rounds':>13} {'ms':>7}")
        for size in sizes:
            for name, state in STATES.items():
                print(f"{size:>8}  {name:<14} {measured(peer, size, state)}", flush=True)
    finally:
        peer.close()


def measured(peer: Peer, replicas: int, state: tuple[str, str]) -> str:
    """Calls of the first status and of one after it, and how long that took."""
    peer.reset()
    executor = SageMakerTrainingExecutor(**SETTINGS, **HASTE)
    plan = executor.plan(RunContext("bench", "s3://bucket/exp"), Placement(replicas=replicas))
    for body in plan.request["jobs"]:
        peer.engine.seed(body, *state, failure="AlgorithmError: , exit code: 1" if state[0] == "Failed" else None)
    handle = RunHandle(executor.name, plan.request["region"], plan.request["label"], replicas)
    rounds = []
    for _ in range(2):
        peer.calls.clear()
        began = time.perf_counter()
        executor.status(handle)
        rounds.append((sum(peer.calls.values()), (time.perf_counter() - began) * 1000))
    return f"{rounds[0][0]:>12} {rounds[1][0]:>13} {rounds[1][1]:>7.1f}"


if __name__ == "__main__":
    main()
