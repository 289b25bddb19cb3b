"""`atoll export`: write the agreed weights of a run to a `safetensors` file, or to a folder for `from_pretrained`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from atoll import registry
from atoll.cli.app import command
from atoll.cli.launch_options import run_argument, store_option
from atoll.cli.output import Output
from atoll.cli.runs import find_place, suggesting
from atoll.errors import MissingExtra
from atoll.runs.run import stored_weights

_SHOWN = 5


@command("Look", short_help="Write the agreed weights of a run to a safetensors file.")
@run_argument
@click.argument("file")
@store_option
@click.option("--round", "round_no", type=click.IntRange(0), metavar="N", help="After N rounds.  [default: the last]")
@click.option("--like", metavar="DIR", help="A folder of `from_pretrained`; FILE is then a folder like it.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def export_command(
    out: Output, run: str, file: str, store: str | None, round_no: int | None, like: str | None, force: bool
) -> None:
    """Write the agreed weights of RUN to FILE, with the names of the model's parameters. Works during the run, too.

    The weights are those that every replica has after the last finished round, or after N rounds, bit for bit. Frozen
    parameters are not in the store: `--like DIR` takes them, the configuration and the tokenizer from DIR, and FILE
    becomes a folder that `from_pretrained` loads.
    """
    run_id, opened = find_place(run, store)
    registry.require("safetensors", extra="export")
    try:
        from atoll.training.weights import check_like, check_target
    except ModuleNotFoundError as exc:
        raise MissingExtra(exc.name or "torch", extra="train") from exc
    target = Path(file)
    check_target(target, is_folder=like is not None, force=force)
    if like is not None:
        check_like(Path(like))
    with suggesting(run, store):
        weights = stored_weights(opened, run_id, round_no)
    taken = weights.save(target, like=like, force=force)
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    out.data(
        {
            "run_id": run_id,
            "round": weights.round_no,
            "file": str(target),
            "tensors": len(weights),
            "bytes": size_bytes,
            "lacks_frozen": weights.has_frozen and like is None,
            "from_like": taken,
        }
    )
    out.text(str(target))
    rounds = f"{weights.round_no} round{'' if weights.round_no == 1 else 's'}"
    out.say(f"{len(weights)} tensors of run `{run_id}` after {rounds}")
    if taken:
        more = f" and {len(taken) - _SHOWN} more" if len(taken) > _SHOWN else ""
        out.say(f"{len(taken)} more tensors are those of {like}: {', '.join(taken[:_SHOWN])}{more}")
    if weights.has_frozen and like is None:
        hint = f"`atoll export {shlex.quote(run)} DIR --like MODEL_DIR` adds them"
        out.say(f"the model also has frozen parameters, which are not in the store; {hint}", "warn")
