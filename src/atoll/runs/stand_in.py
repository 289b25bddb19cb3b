"""Checks of a run whose executor or placement is not valid, so that `plan` reports all problems at once.

The stand-ins consist of the valid part of what the user gave. They are used for checks only, never to start anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from atoll import registry
from atoll.context import RunContext
from atoll.errors import ConfigError, InvalidSpec, Problems, Unsupported, closest
from atoll.executors.base import Executor
from atoll.names import run_id_problem
from atoll.spec import Placement


def likely_executor(
    name: str, given: Mapping[str, Any] | None, problems: Problems
) -> tuple[Executor | None, frozenset[str]]:
    """The executor without its invalid settings, and what was left out; None if there is no way to create it.

    For an unknown name, this is the executor with the most similar name; `problems` gets its wrong settings.
    """
    settings = (
        {key: value for key, value in given.items() if isinstance(key, str)} if isinstance(given, Mapping) else {}
    )
    if name.replace("-", "_") not in registry.known("executor"):
        close = closest(name, registry.known("executor"))
        made = None if close is None else problems.trying(lambda: registry.executor(close, **settings))
        if close is None or made is not None:
            return made, frozenset()
        name = close
    left_out: frozenset[str] = frozenset()
    while True:
        try:
            return registry.executor(name, **settings), left_out
        except InvalidSpec as exc:
            wrong = _heads(exc) & set(settings)
            if not wrong:  # a required setting is missing
                return None, left_out
            settings = {key: value for key, value in settings.items() if key not in wrong}
            left_out |= wrong
        except ConfigError:
            return None, left_out


def likely_placement(spec: Mapping[str, Any]) -> tuple[Placement, frozenset[str]]:
    """The placement with the valid fields of the user and defaults for the others; also what was left out."""
    known = {field.name for field in fields(Placement)}
    given = {name: value for name, value in spec.items() if name in known}
    try:
        return Placement(**given), frozenset()
    except InvalidSpec as exc:
        wrong = frozenset(_heads(exc))
        wrong |= frozenset() if wrong <= given.keys() else {"parts"}  # the problem of a part is named with its backend
        return Placement(**{name: value for name, value in given.items() if name not in wrong}), wrong


def check_plan(executor: Executor, store_uri: str, spec: Mapping[str, Any], left_out: frozenset[str]) -> None:
    """Plan the run with stand-ins. Raises `Unsupported` with the problems that do not name what was left out."""
    run_id = spec.get("run_id")
    named = run_id if isinstance(run_id, str) and run_id_problem(run_id) is None else "run"
    placement, more = likely_placement(spec)
    try:
        executor.plan(RunContext(named, store_uri), placement)
    except Unsupported as exc:
        ours = [
            problem
            for problem, field in zip(exc.problems, exc.fields, strict=True)
            if not any(field.partition(".")[0] == name or f"{name}=" in problem for name in left_out | more)
        ]
        if ours:
            raise Unsupported(exc.executor, named, ours, hint=exc.hint) from exc


def _heads(error: InvalidSpec) -> set[str]:
    """The fields of an error; `env` for `env.NAME`."""
    return {field.partition(".")[0] for field in error.fields}
