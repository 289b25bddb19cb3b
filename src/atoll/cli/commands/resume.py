"""`atoll resume`: continue a run that is over from its last agreed state, on the same or on another backend."""

from __future__ import annotations

import shlex
from typing import Any

import click

from atoll.cli.app import command
from atoll.cli.commands.run import check_watching, start_and_watch, watching_options
from atoll.cli.launch_options import complete_backend, pairs, run_argument, setting_option, store_option
from atoll.cli.output import Output
from atoll.cli.runs import find_run
from atoll.errors import InvalidSpec
from atoll.runs import config
from atoll.runs.config import FIELDS
from atoll.runs.parts import place_text
from atoll.runs.run import Run

_PLACEMENT = ("replicas", "gpu", "cpus", "memory_gib", "image", "timeout", "grace", "max_restarts")
_REMOVABLE = ("gpu", "cpus", "memory_gib", "image")


@command("Start", short_help="Continue a run that is over, from its last agreed state.")
@run_argument
@store_option
@click.option(
    "--on",
    multiple=True,
    metavar="BACKEND[:N]",
    shell_complete=complete_backend,
    help="Another backend, or N replicas on it; may be repeated.  [default: the same]",
)
@setting_option
@click.option("--arg", multiple=True, metavar="NAME=VALUE", help="Another value of an argument, such as rounds=60.")
@click.option("--workspace", metavar="DIR", help="Send this folder as a code bundle.")
@click.option("--accept-changes", is_flag=True, help="Resume although the code has changed.")
@click.option("-n", "--replicas", metavar="N", help="Must be the number that the run has.")
@click.option("--gpu", metavar="NAME[:N]", help="GPUs for each replica; an empty text for none.")
@click.option("--cpus", metavar="N", help="CPU cores for each replica.")
@click.option("--memory-gib", metavar="GIB", help="Memory for each replica.")
@click.option("--image", metavar="IMAGE", help="The container image; an empty text for none.")
@click.option("--timeout", metavar="TIME", help="Time limit of a replica.")
@click.option("--grace", metavar="TIME", help="Time for a replica to stop before it is killed.")
@click.option("--max-restarts", metavar="N", help="How often a failed replica is restarted.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Another value of an environment variable.")
@click.option("--secret", multiple=True, metavar="NAME=REF", help="Another reference of a secret.")
@watching_options
def resume_command(
    out: Output, run: str, store: str | None, detach: bool, wait: bool, fail_fast: bool, **options: Any
) -> None:
    """Continue RUN, which is over, from its last agreed state, under the same id, as its next launch.

    The launch has logs and attempts of its own; `--launch N` of `status`, `logs` and `result` shows an earlier one.
    What is not given stays as it was. The number of replicas cannot change: `atoll run --from RUN` starts a new run
    from the weights. If the code has changed, the differences are listed, and `--accept-changes` resumes with them.
    """
    check_watching(detach, wait, fail_fast)
    found = find_run(run, store)
    changes = _changes(found, options)
    changes |= _backend(found, options)
    again = f"`atoll resume {shlex.quote(run)}` with the same options continues the launch"

    def submit() -> Run:
        resumed = found.resume(**changes)
        out.say(f"run `{resumed.id}`: launch {resumed.launch} on {place_text(resumed.spec, resumed.executor)}")
        return resumed

    start_and_watch(out, submit, again, detach=detach, wait=wait, fail_fast=fail_fast)


def _backend(run: Run, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Run.resume` about the backend; empty if it stays as it was."""
    own = pairs(options["setting"], "--setting", as_json=True)
    if not options["on"] and not own:
        return {}
    parts = [f"{part.on}:{part.replicas}" for part in run.spec.placement.parts]
    on = FIELDS["on"].read(options["on"] or parts or run.executor.name)
    changed = {"on": on} if options["on"] or not parts else {}
    return {**changed, "settings": {**config.load().launch_settings(on), **own}}


def _changes(run: Run, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Run.resume`; raises every problem together."""
    problems: list[str] = []
    found: dict[str, Any] = {"args": pairs(options["arg"], "--arg", as_json=True)}
    for name in _PLACEMENT:
        text, field = options[name], FIELDS[name]
        if text is None:
            continue
        if text == "" and name in _REMOVABLE:
            found[field.option] = None
            continue
        try:
            found[field.option] = field.read(text)
        except ValueError as exc:
            problems.append(f"--{name.replace('_', '-')}=`{text}`: {exc}")
    if problems:
        raise InvalidSpec("the command line", problems)
    placement = run.spec.placement
    if options["env"]:
        found["env"] = {**placement.env, **pairs(options["env"], "--env")}
    if options["secret"]:
        found["secrets"] = {**placement.secrets, **pairs(options["secret"], "--secret")}
    if options["workspace"] is not None:
        found["workspace"] = options["workspace"]
    if options["accept_changes"]:
        found["accept_changes"] = True
    return found
