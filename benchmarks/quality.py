"""What the bytes that DiLoCo saves cost in loss, and how much of the exchange streaming hides.

N real replicas (processes that share nothing but a folder) train a small GPT with `atoll.DiLoCo`, once for each way to
exchange updates and each seed; data parallel training takes the same inner steps with the mean gradient of the same
batches. Ratios in one run are what counts: validation loss over that of data parallel, and bytes uploaded by each
replica, counted at the store with all records, against one float32 gradient for each step.

    python benchmarks/quality.py [--text stdlib] [--seeds 3] [--steps 1000] [--arms int8 int4 streaming] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from quality_runs import Arm, Replica, Setting, data_parallel, replica

TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "tinyshakespeare.txt"
INT4 = {"codec": "int4", "error_feedback": True}
PROBES, PROBE_ROUNDS = 4, 10


@dataclass(frozen=True)
class Must:
    """What a way to exchange updates has to reach; None is not asked for."""

    loss_ratio: float
    times_fewer: float | None = None
    hidden_share: float | None = None


MUST = {"int8": Must(1.025, 75.0), "int4": Must(1.025, 150.0), "streaming": Must(1.03, None, 0.8)}


@dataclass(frozen=True)
class Row:
    """One way to exchange updates, over all seeds."""

    name: str
    losses: list[float]
    loss_ratio: float
    """The mean over seeds of the loss over that of data parallel with the same seed."""
    loss_ratios: list[float]
    times_fewer: float
    """Uploads of data parallel over uploads of the rounds, all records included."""
    times_fewer_all: float
    """The same with initial weights, snapshots and timings."""
    bytes_up: float
    """Of the rounds, by each replica, in each round."""
    bytes_down: float
    wait_share: float
    hidden_share: float
    """Of streaming: behind the narrow link; so is its `wait_share`."""
    seconds: float


class Lab:
    """Processes that are started once and train one run after the other."""

    def __init__(self, pool: ProcessPoolExecutor, folder: Path) -> None:
        self._pool, self._folder, self._runs = pool, folder, 0

    def baselines(self, settings: Sequence[Setting], shards: int) -> list[float]:
        return list(self._pool.map(data_parallel, settings, [shards] * len(settings)))

    def diloco(self, setting: Setting, arm: Arm) -> list[Replica]:
        self._runs += 1
        place = (self._folder / "store").as_uri(), f"{arm.name}-{setting.seed}-{self._runs}"
        futures = [self._pool.submit(replica, setting, arm, rank, *place) for rank in range(setting.replicas)]
        found = [future.result() for future in futures]
        assert len({one.digest for one in found}) == 1, "replicas differ"
        return found


def summed(name: str, settings: Sequence[Setting], runs: Sequence[Sequence[Replica]], base: list[float]) -> Row:
    """What the runs of one arm, one for each seed, come to."""
    everyone = [one for run in runs for one in run]
    setting = settings[0]
    losses = [statistics.mean(one.loss for one in run) for run in runs]
    ratios = [loss / other for loss, other in zip(losses, base, strict=True)]
    data_parallel_up = 4.0 * everyone[0].parameters * setting.steps
    up = statistics.mean(one.bytes_up["rounds"] for one in everyone)
    return Row(
        name=name,
        losses=losses,
        loss_ratio=statistics.mean(ratios),
        loss_ratios=ratios,
        times_fewer=data_parallel_up / up,
        times_fewer_all=data_parallel_up / statistics.mean(sum(one.bytes_up.values()) for one in everyone),
        bytes_up=up / setting.rounds,
        bytes_down=statistics.mean(one.bytes_down["rounds"] for one in everyone) / setting.rounds,
        wait_share=statistics.mean(one.wait_share for one in everyone),
        hidden_share=statistics.mean(one.hidden_share for one in everyone),
        seconds=statistics.mean(max(one.seconds for one in run) for run in runs),
    )


def behind_a_link(lab: Lab, setting: Setting, blocking: Arm, streaming: Arm) -> dict[str, float]:
    """How much streaming hides at the bandwidth at which a loop that waits for its exchange waits half of its time.

    Short runs with steps of fixed length: how busy the machine is must not decide. One without a link tells what is
    sent, more with it at which bandwidth half of the time goes, and one tells what streaming makes of that.
    """
    short = replace(setting, steps=PROBE_ROUNDS * setting.inner_steps)
    free = lab.diloco(short, blocking)
    moved = statistics.mean(one.bytes_up["rounds"] + one.bytes_down["rounds"] for one in free) / PROBE_ROUNDS
    bytes_s, waited = moved / (setting.inner_steps * blocking.step_s), 0.5
    for _ in range(PROBES):
        bytes_s *= waited / (1 - waited)
        held = lab.diloco(short, replace(blocking, bytes_s=bytes_s))
        waited = statistics.mean(one.wait_share for one in held)
        say(f"blocking int4 waits {waited:.0%} of its time at {bytes_s / 1e6:.3f} MB/s")
        if abs(waited - 0.5) <= 0.05:
            break
    found = lab.diloco(short, replace(streaming, bytes_s=bytes_s, step_s=blocking.step_s))
    return {
        "bytes_s": bytes_s,
        "step_s": blocking.step_s,
        "blocking_wait_share": waited,
        "wait_share": statistics.mean(one.wait_share for one in found),
        "hidden_share": statistics.mean(one.hidden_share for one in found),
    }


def arms(wanted: Sequence[str], stream: dict[str, Any]) -> dict[str, Arm]:
    known: dict[str, dict[str, Any]] = {
        "fp32": {"codec": "fp32"},
        "bf16": {"codec": "bf16"},
        "int8": {"codec": "int8"},
        "int4": INT4,
        "streaming": {**INT4, **stream},
    }
    return {name: Arm(name, known[name]) for name in wanted}


class Report:
    """What was found so far, in a file if there is one; a run that was interrupted is taken up where it was."""

    def __init__(self, path: Path | None, settings: Sequence[Setting]) -> None:
        self._path = path
        asked = [asdict(setting) for setting in settings]
        old = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.found: dict[str, Any] = old if old.get("settings") == asked else {"settings": asked, "rows": {}}

    def add(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.write()

    def write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.found, indent=1))


def measure(lab: Lab, settings: Sequence[Setting], wanted: dict[str, Arm], report: Report, step_s: float) -> None:
    found = report.found
    for name, shards in (("data_parallel", settings[0].replicas), ("alone", 1)):
        if name not in found:
            report.add(name, lab.baselines(settings, shards))
        say(f"{name}: {shown(found[name])}")
    for name, arm in wanted.items():
        if name in found["rows"]:
            continue
        if name == "streaming" and "link" not in found:
            report.add("link", behind_a_link(lab, settings[0], Arm("blocking", INT4, step_s=step_s), arm))
            say(f"streaming hides {found['link']['hidden_share']:.0%}, waits {found['link']['wait_share']:.0%}")
        runs = [lab.diloco(setting, arm) for setting in settings]
        row = summed(name, settings, runs, found["data_parallel"])
        if name == "streaming":
            row = replace(row, hidden_share=found["link"]["hidden_share"], wait_share=found["link"]["wait_share"])
        say(f"{name}: {shown(row.losses)}, {row.loss_ratio:.4f} of data parallel, {row.seconds:.0f} s for each run")
        report.add("rows", {**found["rows"], name: asdict(row)})


def verdicts(rows: dict[str, dict[str, Any]]) -> list[tuple[str, bool]]:
    """Every must that was measured, in words, and whether it is met."""
    found = []
    for name, must in MUST.items():
        if name not in rows:
            continue
        row = rows[name]
        found.append(
            (f"{name}: loss {row['loss_ratio']:.4f} <= {must.loss_ratio}", row["loss_ratio"] <= must.loss_ratio)
        )
        if must.times_fewer is not None:
            text = f"{name}: {row['times_fewer']:.1f} times fewer bytes >= {must.times_fewer:g}"
            found.append((text, row["times_fewer"] >= must.times_fewer))
        if must.hidden_share is not None:
            text = f"{name}: {row['hidden_share']:.1%} of the exchange hidden >= {must.hidden_share:.0%}"
            found.append((text, row["hidden_share"] >= must.hidden_share))
    return found


def print_table(result: dict[str, Any]) -> None:
    base = statistics.mean(result["data_parallel"])
    print(f"\n{'':14}{'val loss':>9}{'ratio':>8}{'worst':>8}{'x fewer up':>12}{'with state':>12}"
          f"{'up kB':>8}{'down kB':>9}{'waiting':>9}{'hidden':>8}")  # fmt: skip
    print(f"{'data parallel':14}{base:9.4f}{1:8.4f}")
    alone = statistics.mean(result["alone"])
    print(f"{'alone':14}{alone:9.4f}{alone / base:8.4f}")
    for name, row in result["rows"].items():
        print(f"{name:14}{statistics.mean(row['losses']):9.4f}{row['loss_ratio']:8.4f}{max(row['loss_ratios']):8.4f}"
              f"{row['times_fewer']:12.1f}{row['times_fewer_all']:12.1f}{row['bytes_up'] / 1e3:8.1f}"
              f"{row['bytes_down'] / 1e3:9.1f}{row['wait_share']:9.1%}{row['hidden_share']:8.1%}")  # fmt: skip
    for text, is_met in verdicts(result["rows"]):
        print(f"{'ok  ' if is_met else 'MISS'} {text}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def shown(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.4f}" for loss in losses)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = str(TEXT) if TEXT.exists() else "stdlib"
    parser.add_argument("--text", default=text, help="a file, or `stdlib` for Python's own sources")
    parser.add_argument("--arms", nargs="+", default=["fp32", "int8", "int4", "streaming"],
                        choices=["fp32", "bf16", "int8", "int4", "streaming"])  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--delay", type=int, default=None, help="steps; by default inner steps / fragments")
    parser.add_argument(
        "--alpha", type=float, default=None, help="mix live and agreed weights, instead of eager updates"
    )
    parser.add_argument("--step-s", type=float, default=0.2, help="seconds of a step where the exchange is timed")
    parser.add_argument("--json", type=Path, default=None, help="write everything there; what is there already is kept")
    return parser.parse_args(words)


def main() -> int:
    args = parsed()
    settings = [
        Setting(args.text, args.replicas, args.steps, args.inner_steps, args.batch_size, args.lr, seed)
        for seed in range(args.seeds)
    ]
    delay = args.inner_steps // args.fragments if args.delay is None else args.delay
    merge = {"eager": True} if args.alpha is None else {"alpha": args.alpha}
    wanted = arms(args.arms, {"fragments": args.fragments, "delay": delay, **merge})
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.replicas, mp_context=get_context("spawn")) as pool,
    ):
        report = Report(args.json, settings)
        measure(Lab(pool, Path(folder)), settings, wanted, report, args.step_s)
    print_table(report.found)
    return 0 if all(is_met for _, is_met in verdicts(report.found["rows"])) else 1


if __name__ == "__main__":
    sys.exit(main())
