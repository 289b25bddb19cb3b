"""What a caller of the replica protocol asks to run: `entrypoint` and `entrypoint_args`, read in one place.

Function form: `entrypoint` is a function, `entrypoint_args` are its keyword arguments. Trainer form: `entrypoint_args`
name the function, and `entrypoint` may be the name of the replica entry module. With an own container command, the
arguments become environment variables. Pure: nothing is imported, started or looked up here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

from atoll.context import RANK, RENDEZVOUS
from atoll.entry import Entry
from atoll.errors import InvalidSpec, did_you_mean
from atoll.json_values import convert
from atoll.validation import shown

_TRAINER = ("rendezvous_uri", "trainer_module", "trainer_fn", "trainer_kwargs", "rank_env")
_COMMON = ("rank_env", "rendezvous_uri")
_ENTRY_MODULE = "replica_entrypoint"
_OUR_MODULES = ("", "atoll.replica", "python -m atoll.replica")
_SCALARS = (str, int, float)
_SYSTEM = ("PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT")
"""Variables of an image that decide which program and which libraries a container starts with."""
_WHAT = "launch_replicas"
BOTH_FORMS = (
    "name a function: launch_replicas(2, 'package.module:function', {'lr': 0.1}), or a trainer: "
    "launch_replicas(2, 'atoll.serverless.replica_entrypoint', {'rendezvous_uri': 's3://bucket/exp', "
    "'trainer_module': 'package.module', 'trainer_fn': 'train', 'trainer_kwargs': {'lr': 0.1}})"
)


@dataclass(frozen=True)
class Form:
    """What `launch_replicas` was asked to run."""

    entry: str | Callable[..., Any] | Entry
    args: dict[str, Any]
    optional_args: tuple[str, ...] = ()
    """Names in `args` that the function gets only if it has such a parameter."""
    rendezvous_uri: str | None = None
    rank_env: str = RANK
    program: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    needs_named_store: bool = False
    """Whether the caller, not a default, has to name the store."""
    ignored: str = ""
    """An entry point that is not run: a container's own command, or the entry module of Atoll, replaces it."""


def read_form(
    entrypoint: Any,
    entrypoint_args: Any,
    *,
    runs_callables: bool = True,
    command: Sequence[str] = (),
    mounts_arguments: bool = False,
) -> Form:
    """The form of a launch; `InvalidSpec` with every problem, and both forms in the hint.

    With `mounts_arguments` an own command finds all arguments in a file, and those that are scalars in variables.
    """
    if entrypoint_args is not None and not isinstance(entrypoint_args, Mapping):
        problem = f"entrypoint_args={shown(entrypoint_args)}: a mapping of names to values"
        raise InvalidSpec(_WHAT, [problem])
    args, problems = _converted(entrypoint_args or {})
    common = {name: args[name] for name in _COMMON if args.get(name) not in (None, "")}
    problems += [f"{name}={shown(value)}: a text" for name, value in common.items() if not isinstance(value, str)]
    if command:
        form, more = _program_form(entrypoint, args, command, mounts_arguments=mounts_arguments)
    elif is_entry_module(entrypoint) or _names_trainer(entrypoint, args):
        form, more = _trainer_form(entrypoint, args)
    else:
        form, more = _function_form(entrypoint, args, runs_callables=runs_callables)
    if problems + more:
        raise InvalidSpec(_WHAT, problems + more, hint=BOTH_FORMS if more and not command else None)
    assert form is not None
    return form


def is_entry_module(entrypoint: object) -> bool:
    """Whether this names the program that runs trainers, ours or that of another package, or is its `main`."""
    if callable(entrypoint):
        module, name = getattr(entrypoint, "__module__", ""), getattr(entrypoint, "__name__", "")
        return name == "main" and str(module).endswith(_ENTRY_MODULE)
    if not isinstance(entrypoint, str):
        return False
    name = entrypoint.replace(":", ".").removesuffix(".main")
    return name.endswith(_ENTRY_MODULE) or entrypoint in _OUR_MODULES


def _converted(given: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments as JSON values, and those that cannot be converted."""
    args: dict[str, Any] = {}
    problems = []
    for name, value in given.items():
        if not isinstance(name, str):
            problems.append(f"entrypoint_args={shown(name)}: the name of an argument is a text")
            continue
        args[name], left = convert(value, name)
        problems += [
            f"entrypoint_args.{part.where}: {part.what} is not JSON; save it to the store, and pass its name"
            for part in left
        ]
    return args, problems


def _names_trainer(entrypoint: object, args: Mapping[str, Any]) -> bool:
    """Whether the arguments name the trainer; a function with a parameter `trainer_module` is just called."""
    if "trainer_module" not in args:
        return False
    if callable(entrypoint):
        try:
            return "trainer_module" not in signature(entrypoint).parameters
        except ValueError:
            return True
    return True


def _trainer_form(entrypoint: Any, args: Mapping[str, Any]) -> tuple[Form | None, list[str]]:
    module, function = args.get("trainer_module"), args.get("trainer_fn") or "train"
    kwargs = {} if args.get("trainer_kwargs") is None else args["trainer_kwargs"]
    problems = []
    if not module:
        problems.append("trainer_module: missing")
    for name in args:
        if name not in _TRAINER:
            meant = did_you_mean(name, _TRAINER) or "; an argument of the trainer belongs in `trainer_kwargs`"
            problems.append(f"{name}: not an argument of the trainer form{meant}")
    for name, value in (("trainer_module", module), ("trainer_fn", function)):
        if value and not isinstance(value, str):
            problems.append(f"{name}={shown(value)}: a text")
    if not isinstance(kwargs, Mapping):
        problems.append(f"trainer_kwargs={shown(kwargs)}: a mapping of names to values")
    named = _named(entrypoint)
    trainers = (f"{module}:{function}", f"{module}.{function}")
    if not problems and not is_entry_module(entrypoint) and named not in trainers:
        rule = f"the arguments name `{trainers[0]}`; give `atoll.serverless.{_ENTRY_MODULE}`, or the same function"
        problems.append(f"entrypoint=`{named}`: {rule}")
    if problems:
        return None, problems
    common = {name: args[name] for name in _COMMON if args.get(name) and name not in kwargs}
    form = _with_common(trainers[0], {**kwargs, **common}, args, optional=common, needs_named_store=True)
    is_ours = not isinstance(entrypoint, str) or entrypoint.startswith("atoll.") or not is_entry_module(entrypoint)
    return form if is_ours else replace(form, ignored=entrypoint), []


def _function_form(entrypoint: Any, args: dict[str, Any], *, runs_callables: bool) -> tuple[Form | None, list[str]]:
    if not isinstance(entrypoint, str):
        if not callable(entrypoint):
            return None, [f"entrypoint={shown(entrypoint)}: a function, or the name of one"]
        if not runs_callables:
            rule = "replicas run the code of their image; name the function as `package.module:function`"
            return None, [f"entrypoint=`{_named(entrypoint)}`: {rule}"]
        try:
            Entry.of(entrypoint)
        except ValueError as exc:
            return None, [f"entrypoint=`{_named(entrypoint)}`: {exc}"]
        return _with_common(entrypoint, args, args), []
    entry = Entry(dotted=entrypoint) if ":" not in entrypoint else entrypoint
    try:
        if Entry.of(entry).script is not None:
            raise ValueError("a script has no return value; name a function of a module")
    except ValueError as exc:
        return None, [f"entrypoint=`{entrypoint}`: {exc}"]
    return _with_common(entry, args, args), []


def _with_common(
    entry: str | Callable[..., Any] | Entry,
    args: dict[str, Any],
    given: Mapping[str, Any],
    *,
    optional: Collection[str] = _COMMON,
    needs_named_store: bool = False,
) -> Form:
    return Form(
        entry,
        args,
        optional_args=tuple(name for name in optional if name in args),
        rendezvous_uri=given.get("rendezvous_uri") or None,
        rank_env=given.get("rank_env") or RANK,
        needs_named_store=needs_named_store,
    )


def _program_form(
    entrypoint: Any, args: dict[str, Any], command: Sequence[str], *, mounts_arguments: bool
) -> tuple[Form | None, list[str]]:
    """The image's own program gets scalar arguments as variables; other arguments only if it also gets a file."""
    if entrypoint is not None and not isinstance(entrypoint, str):
        return None, [f"entrypoint=`{_named(entrypoint)}`: the containers run their own command, not a function"]
    passed = {name: value for name, value in args.items() if name not in _COMMON}
    if mounts_arguments:
        passed = {name: value for name, value in passed.items() if isinstance(value, _SCALARS)}
    problems = list(_variable_problems(passed, args.get("rank_env") or RANK))
    if problems:
        return None, problems
    form = Form(
        "",
        args,
        rendezvous_uri=args.get("rendezvous_uri") or None,
        rank_env=args.get("rank_env") or RANK,
        program=tuple(command),
        env={name.upper(): str(value) for name, value in passed.items()},
        ignored="" if entrypoint is None or is_entry_module(entrypoint) else entrypoint,
    )
    return form, []


def _variable_problems(passed: Mapping[str, Any], rank_env: str) -> Iterator[str]:
    owners: dict[str, str] = {rank_env: "rank_env", RENDEZVOUS: "rendezvous_uri"}
    for name, value in passed.items():
        if not isinstance(value, _SCALARS):
            yield f"{name}={shown(value)}: a variable of the container's own command holds a text or a number"
        variable = name.upper()
        if variable.startswith("ATOLL_"):
            yield f"{name}: variables that begin with `ATOLL_` are set by Atoll"
        if variable in _SYSTEM:
            yield f"{name}: its variable `{variable}` would replace the image's own, and its command might not start"
        if variable in owners:
            yield f"{name}: its variable `{variable}` is also that of `{owners[variable]}`"
        owners[variable] = name


def _named(entrypoint: Any) -> str:
    if isinstance(entrypoint, str) or not callable(entrypoint):
        return str(entrypoint)
    return f"{getattr(entrypoint, '__module__', '')}:{getattr(entrypoint, '__qualname__', type(entrypoint).__name__)}"


def store_of(form: Form, given: str | os.PathLike[str] | None, default: str | None) -> str | os.PathLike[str]:
    """The store: of the arguments, of the constructor, of ATOLL_STORE, or the default of the backend."""
    if form.rendezvous_uri or given:
        return form.rendezvous_uri or given or ""
    if named := os.environ.get("ATOLL_STORE"):
        return named
    if default is None or form.needs_named_store:
        rule = "missing; name the store of the replicas here, in the constructor (`store=`) or in ATOLL_STORE"
        raise InvalidSpec(_WHAT, [f"rendezvous_uri: {rule}"])
    return default
