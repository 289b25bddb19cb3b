"""The parts of preparing a run that look at the user's code: how replicas get it, and whether the entry is in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll import entry_check
from atoll.entry import Entry
from atoll.errors import ConfigError
from atoll.executors.base import Executor
from atoll.spec import Code, RunSpec, Task


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as exc:
        raise ConfigError("the working folder was deleted", hint="cd to another one, or give `workspace`") from exc


def code_for(executor: Executor, workspace: str | None) -> tuple[Code, Any]:
    """How replicas get the code: in place where they share our files, else a bundle of `workspace`, else the image."""
    if workspace is not None:
        from atoll.workspace import build

        bundle = build(Path(workspace))
        return Code.bundle(bundle.digest), bundle
    if "in_place" in executor.capabilities.code:
        return Code.in_place(_working_folder()), None
    return Code.image(), None


def task_alone(entry: str | Callable[..., Any], code: Code, spec: Mapping[str, Any]) -> Task | None:
    """The task of a run whose placement is not valid: what is wrong with its entry point can be told all the same."""
    try:
        return RunSpec.build(entry, code=code, args=spec.get("args"), argv=spec.get("argv", ())).task
    except ConfigError:
        return None


def check_entry(task: Task, workspace: str | None) -> None:
    """Raise `InvalidSpec` if the code is on this machine and the entry point does not fit it."""
    if task.code.root is not None:
        entry_check.check(task, task.code.root)
    elif workspace is not None:
        entry_check.check_sent(task, workspace)


def with_path(built: RunSpec) -> RunSpec:
    """The same, with the folder in which replicas will find the module."""
    code = built.task.code
    if code.root is None:
        return built
    code = replace(code, path=entry_check.extra_path(Entry.parse(built.task.entry), code.root))
    return replace(built, task=replace(built.task, code=code))
