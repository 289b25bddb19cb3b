"""The options of `run` and `plan`; `draft` merges them with the configuration into a checked draft of a run.

Also the options and value formats that several commands share.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import click

from atoll import units
from atoll.cli.output import Output, cut
from atoll.entry import Entry
from atoll.errors import ConfigError, InvalidSpec, Problems
from atoll.runs import config
from atoll.runs.config import FIELDS
from atoll.runs.parts import place_text
from atoll.runs.prepare import Draft, prepare

F = TypeVar("F", bound=Callable[..., Any])
_RANKS = re.compile(r"(\d+)(?:-(\d+))?\Z")
_MOST_CHARACTERS = 100
"""Characters that `announce` shows of an argument."""
_OBJECT_HINT = 'write names and values, such as {"lr": 0.001, "steps": 100}'


def duration(text: str) -> float:
    """Seconds, from `90`, `90s`, `15m`, `2h` or `1d`."""
    try:
        return units.parse_duration(text)
    except ValueError as exc:
        raise click.BadParameter(f"`{text}`: {exc}.") from exc


def complete_run(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The run ids of the local index that begin so."""
    from atoll.runs.index import everything

    return [known.run_id for known in everything() if known.run_id.startswith(incomplete)]


def complete_backend(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from atoll.registry import known

    return [name for name in known("executor") if name.startswith(incomplete)]


run_argument = click.argument("run", shell_complete=complete_run)

store_option = click.option(
    "--store", metavar="URI", help="The store of the run; not needed for runs started on this machine."
)


launch_option = click.option(
    "--launch", type=click.IntRange(1), metavar="N", help="The Nth launch of a resumed run.  [default: the newest]"
)


def pairs(given: Sequence[str], option: str, *, as_json: bool = False) -> dict[str, Any]:
    """`("a=1", "b=x")` as a mapping; with `as_json`, values that are valid JSON are parsed, others stay text."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} {text}: write it as `{option} NAME=VALUE`")
        if name in found:
            raise ConfigError(f"{option} {name} is given twice", hint="leave one out")
        found[name] = json_or_text(value) if as_json else value
    return found


def json_or_text(value: str) -> Any:
    """The value of `3`, `1e-3`, `true`, `[1, 2]` or `"3"`; any text that is not JSON stays as it is."""
    try:
        return json.loads(value, parse_constant=_not_a_constant)
    except ValueError:
        return value


def _not_a_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def rank_option(*, help: str, default: str | None = None) -> Callable[[Any], Any]:  # noqa: A002  click's name
    """`--rank`, which may be repeated; the command gets one text, such as `0,2`."""
    return click.option(
        "--rank", multiple=True, metavar="K", help=help, callback=lambda _c, _o, given: ",".join(given) or default
    )


def ranks(text: str, replicas: int) -> list[int]:
    """The ranks of `all`, `2` or `0-3,7`, in order, each once."""
    if text == "all":
        return list(range(replicas))
    found: set[int] = set()
    for part in text.split(","):
        match = _RANKS.match(part.strip())
        if match is None:
            raise ConfigError(f"--rank {text}: write `all`, a rank such as `2`, or several such as `0-3,7`")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= replicas:
            raise ConfigError(f"--rank {part.strip()}: this run has ranks 0 to {replicas - 1}")
        found.update(range(first, last + 1))
    return sorted(found)


setting_option = click.option(
    "--setting",
    "--set",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the backend; of one part: BACKEND.NAME=VALUE.",
)

_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("entry", required=False),
    click.option("-n", "--replicas", metavar="N", help="Number of replicas.  [default: 1]"),
    click.option(
        "--on",
        multiple=True,
        metavar="BACKEND[:N]",
        shell_complete=complete_backend,
        help="The backend, or N replicas of the run on it; may be repeated.  [default: local]",
    ),
    click.option("--store", metavar="URI", help="The store: a folder, s3://bucket/prefix, ..."),
    click.option(
        "--arg", "arg", multiple=True, metavar="NAME=VALUE", help="An argument: parsed if it is JSON, otherwise text."
    ),
    click.option("--args-json", metavar="JSON", help="Arguments as one JSON object."),
    click.option("--args-file", metavar="FILE", help="Arguments as a JSON file; - is stdin."),
    click.option("--gpu", metavar="NAME[:N]", help="GPUs for each replica, such as H100:8."),
    click.option("--cpus", metavar="N", help="CPU cores for each replica."),
    click.option("--memory-gib", metavar="GIB", help="Memory for each replica."),
    click.option("--image", metavar="IMAGE", help="The container image."),
    click.option("--timeout", metavar="TIME", help="Time limit of a replica: 90, 90s, 15m, 2h, 1d.  [default: 1d]"),
    click.option("--max-cost", type=float, metavar="USD", help="A time limit by which the run costs at most this."),
    click.option("--grace", metavar="TIME", help="Time for a replica to stop before it is killed.  [default: 10s]"),
    click.option("--max-restarts", metavar="N", help="How often a failed replica is restarted.  [default: 0]"),
    click.option(
        "--on-dead",
        metavar="fail|wait",
        help="When a round needs a dead rank: end the other replicas, or wait for it.  [default: fail]",
    ),
    click.option("--on-dead-after", metavar="TIME", help="For how long such a rank is dead.  [default: 5m]"),
    click.option("--env", multiple=True, metavar="NAME=VALUE", help="An environment variable of the replicas."),
    click.option("--secret", multiple=True, metavar="NAME=REF", help="A secret by reference, such as env:HF_TOKEN."),
    click.option("--rank-env", metavar="NAME", help="An additional variable that holds the rank."),
    click.option("--from", "from_run", metavar="RUN", help="Start from the agreed weights of another run."),
    click.option("--from-round", type=click.IntRange(0), metavar="N", help="Its weights after N rounds, not the last."),
    click.option("--run-id", metavar="ID", help="With the same id and content, an existing run is adopted."),
    click.option("--workspace", metavar="DIR", help="Send this folder as a code bundle."),
    setting_option,
    click.option("--profile", metavar="NAME", help="A [profiles.NAME] table of atoll.toml."),
]


def run_options(function: F) -> F:
    """Add the options of `run` and `plan` to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def draft(out: Output, options: Mapping[str, Any], script_args: Sequence[str]) -> Draft:
    """Check the options and plan the run; nothing is started and nothing is written. Raises all problems together."""
    problems = Problems()
    flags: dict[str, Any] = {}
    for name in FIELDS:
        if options[name] is not None and options[name] != ():
            flags[name] = problems.trying(partial(_flag_value, name, options[name]))
    tables: dict[str, Callable[[], dict[str, Any]]] = {
        "args": lambda: _arguments(options),
        "env": lambda: pairs(options["env"], "--env"),
        "secrets": lambda: pairs(options["secret"], "--secret"),
    }
    read_tables = {table: problems.trying(read) for table, read in tables.items()}
    for table, values in read_tables.items():
        flags |= {f"{table}.{name}": value for name, value in (values or {}).items()}
    own = problems.trying(lambda: pairs(options["setting"], "--setting", as_json=True))
    if own is None:  # continue with what is readable, so that no other setting is reported as missing
        readable = (text.partition("=") for text in options["setting"] if "=" in text)
        own = {name: json_or_text(value) for name, _, value in readable}
    found = problems.trying(lambda: config.load_valid(profile=options["profile"], flags=flags))
    settings, wrong = found or (None, [])
    problems.trying(lambda: _check_configuration(wrong))
    if settings is None or None in read_tables.values():  # without its arguments, the entry point cannot be checked
        problems.raise_any("this run")
    assert settings is not None
    for warning in settings.warnings:
        out.say(f"warning: {warning}")
    launch = settings.launch_options()
    launch["settings"] = {**launch.get("settings", {}), **own}
    more = {name: options[name] for name in ("run_id", "from_run", "from_round", "max_cost")}
    made = problems.trying(lambda: _prepared(launch, argv=tuple(script_args), **more))
    problems.raise_any("this run")
    assert made is not None
    return made


def _check_configuration(problems: Sequence[str]) -> None:
    if problems:
        raise InvalidSpec("configuration", problems)


def _prepared(launch: Mapping[str, Any], **more: Any) -> Draft:
    if "entry" not in launch:
        raise ConfigError("no entry point", hint="name it: `atoll run module:function`, or `entry = ...` in atoll.toml")
    return prepare(**launch, **more)


def _flag_value(name: str, text: str | Sequence[str]) -> Any:
    """The value of a flag, read as in a file."""
    try:
        return FIELDS[name].read(text)
    except ValueError as exc:
        shown = text if isinstance(text, str) else ",".join(text)
        raise InvalidSpec("the command line", [f"{config.flag_of(name)}=`{shown}`: {exc}"]) from exc


def announce(out: Output, made: Draft) -> None:
    """Print what is about to start."""
    placement = made.spec.placement
    count = f"{placement.replicas} replica{'' if placement.replicas == 1 else 's'}"
    gpu = f" with {placement.gpu}" if placement.gpu else ""
    limit = units.duration_text(placement.timeout_s)
    run_id = out.paint(made.spec.run_id, "bold", on_stderr=True)
    where = place_text(made.spec, made.executor)
    out.say(f"{run_id}  {made.spec.task.title} on {where}: {count}{gpu}, at most {limit}")
    out.say(f"  store {made.store.uri}", "dim")
    for line in _inputs(made):
        out.say(f"  {line}", "dim")
    if made.bundle is not None:
        out.say("\n".join(f"  {line}" for line in made.bundle.manifest.text().splitlines()))


def say_notes(out: Output, made: Draft, notes: Sequence[str] | None = None) -> None:
    """Print what a user should know before the launch; the price is last."""
    task = made.spec.task
    if task.code.kind == "image":
        place = task.program[0] if task.program else Entry.of_record(task.entry).place
        instead = "" if task.program else "; `--workspace .` sends this folder instead"
        owner = "the image must contain" if made.executor.capabilities.images else "each machine must have"
        out.say(f"  note: {owner} `{place}`, which is not checked{instead}")
    for note in made.notes() if notes is None else notes:
        out.say(f"  note: {note}")


def planned_notes(made: Draft, run_id: str | None) -> list[str]:
    """The notes of a draft that is only planned: without `run_id`, the run gets another id than the draft."""
    drafted = f"atoll join {shlex.quote(made.spec.run_id)} "
    return [note if run_id else note.replace(drafted, "atoll join RUN ") for note in made.notes()]


def _inputs(made: Draft) -> Iterator[str]:
    """The arguments of the replicas, and the references, never the values, of their secrets."""
    task, secrets = made.spec.task, made.spec.placement.secrets
    if task.args:
        yield "arguments " + ", ".join(f"{name}={_short(value)}" for name, value in task.args.items())
    if task.origin:
        yield f"starts from run {task.origin['run']} after {task.origin['round']} rounds"
    if task.argv:
        yield f"script arguments {' '.join(map(shlex.quote, task.argv))}"
    if secrets:
        yield "secrets " + ", ".join(f"{name} from {reference}" for name, reference in secrets.items())


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return cut(text if text.isprintable() else json.dumps(value), _MOST_CHARACTERS)


def draft_json(made: Draft, notes: Sequence[str]) -> dict[str, Any]:
    """The draft for programs."""
    bundle = asdict(made.bundle.manifest) if made.bundle is not None else None
    plan = {**made.plan.to_json(), "notes": list(notes)}
    return {"plan": plan, "spec": made.spec.to_json(), "store": made.store.uri, "bundle": bundle}


def _arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments: `--arg` overrides `--args-json`, which overrides `--args-file`."""
    found: dict[str, Any] = {}
    if (path := options["args_file"]) is not None:
        found |= _object(_read(path), f"--args-file {path}")
    if (text := options["args_json"]) is not None:
        found |= _object(text, "--args-json")
    return found | pairs(options["arg"], "--arg", as_json=True)


def _read(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.read()
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--args-file {path}: {exc}") from exc


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"{where}: not JSON: {exc}", hint=_OBJECT_HINT) from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: not a JSON object", hint=_OBJECT_HINT)
    return found
