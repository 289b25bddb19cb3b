"""How long from the call until all N replicas are in user code, and until every result is back.

Atoll, torchrun, submitit and bare `subprocess.Popen`, interleaved in one run; the ratios to Popen are what counts.

    python benchmarks/launch.py [--replicas 1 8 32] [--repeat 5] [--job plain with_numpy]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
JOBS = HERE / "launch_jobs.py"
Times = tuple[float, float]
"""Seconds until the last replica was in user code, and until the last result was back."""


def popen(job: str, replicas: int, _folder: Path) -> Times:
    began = time.time()
    command = [sys.executable, str(JOBS), job]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(replicas)]
    entered = [float(process.communicate()[0]) for process in processes]
    return max(entered) - began, time.time() - began


def atoll(job: str, replicas: int, folder: Path) -> Times:
    from atoll import launch

    began = time.time()
    run = launch(f"launch_jobs:{job}", replicas=replicas, store=str(folder / "store"))
    run.wait(120)
    entered = run.result().raise_for_failures().values
    return max(entered) - began, time.time() - began


def torchrun(job: str, replicas: int, folder: Path) -> Times:
    began = time.time()
    options = ["--standalone", f"--nproc-per-node={replicas}", f"--log-dir={folder}", "--redirects=3"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(JOBS), job]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    entered = [float(path.read_text()) for path in folder.rglob("stdout.log")]
    assert len(entered) == replicas
    return max(entered) - began, time.time() - began


def submitit(job: str, replicas: int, folder: Path) -> Times:
    import launch_jobs
    from submitit import LocalExecutor

    began = time.time()
    executor = LocalExecutor(folder)
    executor.update_parameters(timeout_min=2)
    with executor.batch():
        submitted = [executor.submit(getattr(launch_jobs, job)) for _ in range(replicas)]
    entered = [one.result() for one in submitted]
    return max(entered) - began, time.time() - began


TOOLS: dict[str, tuple[Callable[[str, int, Path], Times], str | None]] = {
    "popen": (popen, None),
    "atoll": (atoll, None),
    "submitit": (submitit, "submitit"),
    "torchrun": (torchrun, "torch"),
}


def measure(job: str, replicas: int, repeat: int, tools: list[str]) -> dict[str, Times]:
    """Medians, measured in turn so that a busy moment hits everybody."""
    seen: dict[str, list[Times]] = {tool: [] for tool in tools}
    for _ in range(repeat):
        for tool in tools:
            with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
                seen[tool].append(TOOLS[tool][0](job, replicas, Path(folder)))
    return {
        tool: (statistics.median(t[0] for t in times), statistics.median(t[1] for t in times))
        for tool, times in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--job", nargs="+", default=["plain", "with_numpy"], choices=["plain", "with_numpy"])
    asked = parser.parse_args()
    tools = [tool for tool, (_, module) in TOOLS.items() if module is None or find_spec(module)]
    for tool in set(TOOLS) - set(tools):
        print(f"{tool}: not installed, left out")
    os.chdir(HERE)
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory(prefix="atoll-bench-home-") as home:
        os.environ["ATOLL_HOME"] = home
        print(f"{'job':<11} {'N':>3}  {'tool':<9} {'entered':>9} {'/popen':>7} {'collected':>10} {'/popen':>7}")
        for job in asked.job:
            for replicas in asked.replicas:
                times = measure(job, replicas, asked.repeat, tools)
                for tool, (entered, collected) in times.items():
                    ratios = [mine / bare for mine, bare in zip((entered, collected), times["popen"], strict=True)]
                    print(
                        f"{job:<11} {replicas:>3}  {tool:<9} {entered * 1e3:>6.0f} ms {ratios[0]:>7.2f}"
                        f" {collected * 1e3:>7.0f} ms {ratios[1]:>7.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
