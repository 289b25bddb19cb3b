"""Which backends a run is on: one, or several parts with a number of replicas each, as a user writes them.

`prepare` and `resume` call this. A part is written `("modal", 2)`, `"modal:2"` or `(executor, 2)`. Settings and fields
of the placement that only one part has are named with its backend: `modal.gpu`. A name that is a setting of the backend
is a setting; otherwise it is a field of the placement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atoll import registry
from atoll.errors import ConfigError, InvalidSpec, Problems, did_you_mean
from atoll.executors.base import Executor
from atoll.runs.stand_in import likely_executor
from atoll.spec import PART_FIELDS, Part, RunSpec
from atoll.validation import setting_names, shown

RULE = 'a backend with its number of replicas, such as `modal:2` or `("modal", 2)`'
On = str | Executor | Sequence[Any]
"""A backend, or the parts of a run."""
TABLES = ("env", "secrets")
"""Fields of the placement that have an item for each name."""
_COUNTED = re.compile(r"([^:]+):(\d+)\Z")


class Chosen(NamedTuple):
    """One part as the user wrote it."""

    on: str | Executor
    replicas: int

    @property
    def name(self) -> str:
        return registry.plain_name(self.on) if isinstance(self.on, str) else self.on.name


class Split(NamedTuple):
    """What only one part has: settings of its backend, and fields of its placement."""

    settings: dict[str, Any]
    overrides: dict[str, Any]


def chosen_parts(on: On) -> list[Chosen] | None:
    """The parts of a run; None if `on` is one backend without a number of replicas."""
    if isinstance(on, str):
        found = _COUNTED.match(on.strip())
        return None if found is None and _is_backend(on) else [_part(on)]
    if isinstance(on, Executor) or not isinstance(on, list | tuple):
        return None
    if not on:
        raise InvalidSpec("this run", [f"on={shown(on)}: {RULE}"])
    if len(on) == 1 and isinstance(on[0], str) and _COUNTED.match(on[0].strip()) is None and _is_backend(on[0]):
        return None
    problems = Problems()
    parts = [problems.trying(lambda e=each: _part(e)) for each in on]  # type: ignore[misc]
    problems.raise_any("this run")
    return [part for part in parts if part is not None]


def _is_backend(text: str) -> bool:
    """Whether this is not meant as a backend with a number of replicas, such as `local:two`."""
    head, colon, _ = text.partition(":")
    return not colon or registry.plain_name(head.strip()) not in registry.known("executor")


def one_backend(on: On) -> Any:
    """`on`, or the only item of a list."""
    return on[0] if isinstance(on, list | tuple) and len(on) == 1 else on


def _part(given: Any) -> Chosen:
    if isinstance(given, str) and (found := _COUNTED.match(given.strip())):
        given = (found[1].strip(), int(found[2]))
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    if not is_pair or not isinstance(given[0], str | Executor) or type(given[1]) is not int or given[1] < 1:
        raise InvalidSpec("this run", [f"on={shown(given)}: each part is {RULE}"])
    return Chosen(*given)


def replicas_of(parts: Sequence[Chosen], replicas: int | None) -> int:
    """The number of replicas of the parts together. Raises if the user gave another number."""
    count = sum(part.replicas for part in parts)
    if replicas is not None and replicas != count:
        rule = f"the parts have {count} together: leave it out"
        raise InvalidSpec("this run", [f"replicas={shown(replicas)}: {rule}"])
    return count


def split_settings(parts: Sequence[Chosen], settings: Mapping[str, Any] | None) -> tuple[dict[str, Split], list[str]]:
    """What each part has of its own, by the name of its backend; and what is wrong with the names of the settings."""
    names = list(dict.fromkeys(part.name for part in parts))
    problems: list[str] = []
    found = {name: Split({}, {}) for name in names}
    for key, value in (settings or {}).items():
        head, dot, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
        name = registry.plain_name(head)
        if name not in found:
            listed = ", ".join(f"`{each}.{key if not dot else rest}`" for each in names)
            problems.append(f"{key}: it names no part of the run{did_you_mean(name, names)}; there can be {listed}")
        elif not dot and isinstance(value, Mapping):
            for each, of in value.items():
                _add(found[name], name, str(each), of)
        elif dot and rest:
            _add(found[name], name, rest, value)
        else:
            problems.append(f"{key}={shown(value)}: a table of settings of this part, or `{head}.NAME`")
    for part in parts:
        if not isinstance(part.on, str) and found[part.name].settings:
            names_given = ", ".join(found[part.name].settings)
            problems.append(f"settings: {names_given}: `on` has an executor; give them to its constructor")
    return found, problems


def check_named(problems: Sequence[str]) -> None:
    """Raise the problems of `split_settings`."""
    if problems:
        hint = "give a part its own setting with `--set PART.NAME=VALUE`, such as `--set modal.app=mine`"
        raise InvalidSpec("this run", problems, hint=hint)


def _add(split: Split, backend: str, name: str, value: Any) -> None:
    head, _, rest = name.partition(".")
    if name in setting_names_of(backend) or head not in PART_FIELDS:
        split.settings[name] = value
    elif rest:  # `kubernetes.env.NAME`
        split.overrides.setdefault(head, {})[rest] = value if isinstance(value, str) else json.dumps(value)
    else:
        split.overrides[head] = value


def split_table(backend: str, table: Mapping[str, Any]) -> Split:
    """The settings of a backend in a table, and the fields of the placement in it."""
    found = Split({}, {})
    for name, value in table.items():
        _add(found, backend, name, value)
    return found


def added(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a placement: those that are given, and those that a backend has of its own. Variables and secrets of
    both are kept."""
    tables = {
        name: {**own[name], **given[name]}
        for name in TABLES
        if isinstance(own.get(name), Mapping) and isinstance(given.get(name), Mapping)
    }
    return {**own, **given, **tables}


def backend_names(on: On) -> list[str]:
    """The names of the backends of a run, each once; for a list with mistakes, those that can be read."""
    texts = [on] if isinstance(on, str) else on if isinstance(on, list | tuple) else []
    named = [each[0] if isinstance(each, list | tuple) and each else each for each in texts]
    return list(dict.fromkeys(registry.plain_name(each.partition(":")[0]) for each in named if isinstance(each, str)))


def setting_names_of(backend: str) -> set[str]:
    try:
        return setting_names(registry.load("executor", backend))
    except ConfigError:
        return set()


def parts_of(
    parts: Sequence[Chosen], splits: Mapping[str, Split], executors: Sequence[Executor | None]
) -> tuple[Part, ...]:
    """The parts as the placement records them. An executor may stand in for one with a wrong name."""
    names = [part.name if made is None else made.name for part, made in zip(parts, executors, strict=True)]
    return tuple(
        Part(name, part.replicas, splits[part.name].overrides) for name, part in zip(names, parts, strict=True)
    )


def place_text(spec: RunSpec, executor: Executor) -> str:
    """Where a run is, such as `modal`, or `kubernetes:2 + modal:2`."""
    return " + ".join(f"{part.on}:{part.replicas}" for part in spec.placement.parts) or executor.name


class Backend(NamedTuple):
    """Where a run is to be: on one executor, or on several as one."""

    executor: Executor | None
    """None if there are problems."""
    checked: Executor | None
    """The same, or a stand-in with which the rest of the run can be checked; None if there is none."""
    left_out: frozenset[str]
    """Settings that the stand-in does not have, because they are wrong."""
    spec: dict[str, Any]
    """The arguments of the spec, with the number of replicas and the parts."""


def executor_for(on: str | Executor, settings: Mapping[str, Any] | None) -> Executor:
    """The executor of a launch. Settings of an executor that exists already would be ignored, so they are an error."""
    if settings is not None and not (isinstance(settings, Mapping) and all(isinstance(name, str) for name in settings)):
        raise InvalidSpec("this run", [f"settings={shown(settings)}: a table of names and values"])
    if isinstance(on, str):
        return registry.executor(on, **(settings or {}))
    if not isinstance(on, Executor):
        raise InvalidSpec("this run", [f"on={shown(on)}: the name of an executor, an executor, or a list of parts"])
    if settings:
        names = ", ".join(settings)
        raise InvalidSpec("this run", [f"settings: {names}: `on` is an executor; give them to its constructor"])
    return on


def backend_for(on: On, settings: Mapping[str, Any] | None, spec: Mapping[str, Any], problems: Problems) -> Backend:
    """The executor of a run from `on` and the settings; `problems` gets everything that is wrong with them."""
    parts = problems.trying(lambda: chosen_parts(on) or [])
    if parts is None:
        return Backend(None, None, frozenset(), dict(spec))
    if len(parts) > 1:
        return _several(parts, settings, spec, problems)
    own = dict(spec)
    if parts:
        problems.trying(lambda: replicas_of(parts, spec.get("replicas")))
        own["replicas"] = parts[0].replicas
    return _single(parts[0].on if parts else one_backend(on), settings, own, problems)


def _single(on: Any, settings: Mapping[str, Any] | None, spec: dict[str, Any], problems: Problems) -> Backend:
    if isinstance(on, str) and isinstance(settings, Mapping):
        settings, spec = _without_prefix(on, settings, spec)
    executor = problems.trying(lambda: executor_for(on, settings))
    if executor is None and isinstance(on, str):
        return Backend(None, *likely_executor(on, settings, problems), spec)
    return Backend(executor, executor, frozenset(), spec)


def _without_prefix(
    on: str, settings: Mapping[str, Any], spec: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the spec of a run on one backend, whose settings may be named as those of a part."""
    start = f"{registry.plain_name(on)}."
    named = {name: value for name, value in settings.items() if isinstance(name, str) and name.startswith(start)}
    if not named:
        return dict(settings), spec
    split = split_settings([Chosen(on, 1)], named)[0][registry.plain_name(on)]
    return {**split.settings, **{n: v for n, v in settings.items() if n not in named}}, added(split.overrides, spec)


def _several(
    parts: Sequence[Chosen], settings: Mapping[str, Any] | None, spec: Mapping[str, Any], problems: Problems
) -> Backend:
    problems.trying(lambda: replicas_of(parts, spec.get("replicas")))
    splits, wrong_names = split_settings(parts, settings if isinstance(settings, Mapping) else None)
    problems.trying(lambda: check_named(wrong_names))
    found: list[Executor | None] = []
    checked: list[Executor | None] = []
    left_out: frozenset[str] = frozenset()
    for part in parts:
        own = splits[part.name].settings if isinstance(part.on, str) else None
        made = problems.trying(lambda p=part, s=own: executor_for(p.on, s))  # type: ignore[misc]
        found.append(made)
        stand_in = made
        if made is None and isinstance(part.on, str):
            stand_in, wrong = likely_executor(part.on, own, problems)
            left_out |= wrong
        checked.append(stand_in)
    count = sum(part.replicas for part in parts)
    whole = {**spec, "replicas": count, "parts": parts_of(parts, splits, checked)}
    return Backend(_joined(found), _joined(checked), left_out, whole)


def _joined(executors: Sequence[Executor | None]) -> Executor | None:
    if None in executors:
        return None
    return registry.executor("several", executors=tuple(executors))
