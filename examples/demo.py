"""`make demo`: four replicas that share nothing but a folder train one GPT, and what that costs and brings.

Three ways to train the same model for the same number of steps are compared on text that none of them has seen:
DiLoCo with four replicas, synchronous data parallel on the same tokens, and one replica alone on its quarter of them.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from train_gpt import CONTEXT, GPT, batches, learning_rate, validation_loss

import atoll
from atoll.training.inner import Feed

REPLICAS, ROUNDS, INNER_STEPS, BATCH, PEAK_LR = 4, 50, 20, 8, 2e-3
STEPS = ROUNDS * INNER_STEPS
OUTPUT = Path("demo-output")
ALONE, TOGETHER, SYNCHRONOUS = "one replica alone", "DiLoCo, 4 replicas", "synchronous data parallel"
STYLES = {"running": "cyan", "succeeded": "green", "failed": "bold red", "pending": "yellow"}
console = Console(highlight=False)


# ---- the two other ways to train, each in a process of its own


def compare(ctx: atoll.ReplicaContext, *, steps: int) -> dict[str, Any]:
    """Rank 0 trains alone on a quarter of the tokens; rank 1 on all of them, with the mean gradient of four batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT()
    inner = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.1)
    shards = [Feed(batches(rank, REPLICAS, BATCH)) for rank in range(1 if ctx.rank == 0 else REPLICAS)]
    history: dict[str, list[Any]] = {"train": [], "validation": []}
    for step in range(steps):
        if step % (2 * INNER_STEPS) == 0:
            history["validation"].append([step, validation_loss(model)])
        inner.param_groups[0]["lr"] = learning_rate(step, steps, PEAK_LR)
        # Equal batches: the gradient of their mean loss is the mean of the gradients that replicas would send.
        x, y = (torch.cat(part) for part in zip(*(next(shard) for shard in shards), strict=True))
        loss = model.loss(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        inner.step()
        inner.zero_grad()
        history["train"].append(loss.item())
        ctx.log(round_no=step // INNER_STEPS, loss=loss.item())
    size = sum(parameter.numel() for parameter in model.parameters())
    return {"validation_loss": validation_loss(model), "history": history, "parameters": size}


# ---- watching


def picture(rows: list[tuple[str, atoll.ReplicaStatus]], began: float) -> Table:
    table = Table(title=f"[dim]{time.monotonic() - began:.0f} s[/dim]", title_justify="left", box=None)
    for heading in ("", "state", "round", "", "loss", "moved", "waiting"):
        table.add_column(heading, justify="right" if heading in ("round", "loss", "moved", "waiting") else "left")
    for name, replica in rows:
        metrics, done = replica.progress.metrics, replica.progress.round_no or 0
        done = ROUNDS if replica.state == "succeeded" else done
        table.add_row(
            Text(name, style="bold"),
            Text(str(replica.state), style=STYLES.get(str(replica.state), "")),
            f"{done}/{ROUNDS}",
            ProgressBar(ROUNDS, done, width=20),
            f"{metrics['loss']:.3f}" if "loss" in metrics else "",
            f"{metrics['bytes'] / 1e6:.1f} MB" if "bytes" in metrics else "",
            f"{metrics['wait_share']:.0%}" if "wait_share" in metrics else "",
        )
    return table


def watched(runs: dict[atoll.Run, list[str]]) -> list[dict[str, Any]]:
    """Show all the runs until they are over; what their replicas returned, in order."""
    began = time.monotonic()
    pause_s = 0.25 if console.is_terminal else 10.0
    live: AbstractContextManager[Live | None] = Live(console=console) if console.is_terminal else nullcontext()
    try:
        with live as view:
            is_over = False
            while not is_over:
                statuses = [run.status() for run in runs]
                is_over = all(status.is_terminal for status in statuses)
                replicas = [replica for status in statuses for replica in status.replicas]
                names = [name for listed in runs.values() for name in listed]
                table = picture(list(zip(names, replicas, strict=True)), began)
                view.update(table, refresh=True) if view is not None else console.print(table)
                time.sleep(0.0 if is_over else pause_s)
        return [dict(value) for run in runs for value in run.result().raise_for_failures().values]
    finally:
        for run in runs:
            run.cancel()


# ---- what came out


def human(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"


def plot(path: Path, curves: dict[str, list[Any]], replicas: list[list[float]], moved: dict[str, float]) -> None:
    from matplotlib.figure import Figure

    colours = {ALONE: "#8a8f98", SYNCHRONOUS: "#d9772b", TOGETHER: "#1668b8"}
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.1, 1))
    for losses in replicas:
        smooth = [sum(losses[i : i + INNER_STEPS]) / INNER_STEPS for i in range(0, STEPS, INNER_STEPS)]
        at = [i + INNER_STEPS / 2 for i in range(0, STEPS, INNER_STEPS)]
        left.plot(at, smooth, color=colours[TOGETHER], alpha=0.22, linewidth=0.8)
    left.plot([], [], color=colours[TOGETHER], alpha=0.35, linewidth=0.8, label="each replica, training loss")
    for name, points in curves.items():
        steps, losses = zip(*points, strict=True)
        left.plot(steps, losses, color=colours[name], linewidth=2, label=f"{name}: {losses[-1]:.3f}")
    ends = [points[-1][1] for points in curves.values()]
    left.set(xlabel="optimizer steps of each replica", ylabel="validation loss", xlim=(0, STEPS))
    left.set_ylim(min(ends) - 0.1, min(ends) + 1.1)
    left.set_title("Loss on text nobody trained on", loc="left", fontsize=11)
    left.legend(frameon=False, fontsize=9)
    names, most = list(moved), max(moved.values()) / 1e6
    bars = right.barh(names, [moved[name] / 1e6 for name in names], color=[colours[name] for name in names], height=0.4)
    fewer = f"   {moved[SYNCHRONOUS] / moved[TOGETHER]:.0f} times fewer"
    labels = [human(moved[name]) + (fewer if name == TOGETHER else "") for name in names]
    right.bar_label(bars, labels, padding=4, fontsize=9)
    right.set(xlabel="megabytes", xlim=(0, 1.35 * most), ylim=(-0.6, 1.6))
    right.set_yticks(range(len(names)), [name.replace(", ", ",\n").replace(" data", "\ndata") for name in names])
    right.set_title("Moved by each replica, up and down", loc="left", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y" if axes is left else "x", alpha=0.2)
    figure.savefig(path, dpi=150)


def summary(losses: dict[str, float], moved: dict[str, float]) -> Table:
    title = "\nThe same model, the same number of steps"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "tokens", "validation\nloss", "against\nsynchronous", "moved by\neach replica"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, loss in losses.items():
        tokens = STEPS * BATCH * CONTEXT * (1 if name == ALONE else REPLICAS) / 1e6
        against = f"{loss / losses[SYNCHRONOUS] - 1:+.1%}"
        sent = human(moved[name]) if name in moved else "nothing"
        table.add_row(name, f"{tokens:.1f} M", f"{loss:.3f}", against, sent, style="bold" if name == TOGETHER else "")
    return table


def main() -> None:
    began = time.monotonic()
    OUTPUT.mkdir(exist_ok=True)
    store, code = str(OUTPUT / "store"), Path(__file__).parent
    console.print("[bold]Four replicas that share nothing but a folder[/bold] learn to write Python; for comparison,")
    console.print("one replica alone, and four in step as in data parallel training.\n")
    args = {"rounds": ROUNDS, "inner_steps": INNER_STEPS, "batch_size": BATCH, "lr": PEAK_LR}
    run = atoll.launch(f"{code / 'train_gpt.py'}:train", replicas=REPLICAS, store=store, args=args)
    others = atoll.launch(f"{code / 'demo.py'}:compare", replicas=2, store=store, args={"steps": STEPS})
    names = [f"replica {rank}" for rank in range(REPLICAS)]
    *replicas, alone, synchronous = watched({run: names, others: ["alone", "synchronous"]})
    assert len({replica["digest"] for replica in replicas}) == 1, "replicas differ"

    # Data parallel sends a float32 gradient and fetches the mean of all, in every step.
    moved = {
        SYNCHRONOUS: STEPS * 2.0 * 4 * alone["parameters"],
        TOGETHER: sum(r["bytes_up"] + r["bytes_down"] for r in replicas) / REPLICAS,
    }
    found = {ALONE: alone, TOGETHER: replicas[0], SYNCHRONOUS: synchronous}
    losses = {name: one["validation_loss"] for name, one in found.items()}
    curves = {name: [*one["history"]["validation"], [STEPS, losses[name]]] for name, one in found.items()}
    fewer = moved[SYNCHRONOUS] / moved[TOGETHER]
    plot(OUTPUT / "demo.png", curves, [replica["history"]["train"] for replica in replicas], moved)
    numbers = {"validation_loss": losses, "bytes": moved, "times_fewer_bytes": fewer, "curves": curves}
    (OUTPUT / "demo.json").write_text(json.dumps(numbers, indent=1))
    console.print(summary(losses, moved))
    console.print(f"\nDiLoCo moved [bold]{fewer:.0f} times fewer bytes[/bold] than data parallel.")
    console.print(f"All four replicas hold the same weights, bit for bit: {replicas[0]['digest'][:16]}…")
    console.print(f"Plot: {OUTPUT / 'demo.png'}   Took {time.monotonic() - began:.0f} s.\n")
    console.print(f"[dim]atoll status {run.id}\natoll logs {run.id} --rank 2\natoll verify {run.id}[/dim]")


if __name__ == "__main__":
    main()
