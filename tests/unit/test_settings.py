"""Settings of executors: whatever is registered refuses values of a wrong kind, by name and all together."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest

import atoll
from atoll import registry
from atoll.context import RunContext
from atoll.errors import InvalidSpec, Unsupported
from atoll.executors.local.executor import LocalExecutor
from atoll.registry import EXECUTORS
from atoll.spec import Placement
from atoll.testing.scripted.executor import ScriptedExecutor
from atoll.validation import COUNT, annotated_kinds, check_settings, checks_settings

WRONG: list[Any] = [None, "", " ", "\0", "x y", 5, -1, 0, 1.5, math.nan, math.inf, 10**400, True, [], ["x"], [5], {},
                    {"x": "y"}, {"x": [5]}, {5: "x"}, b"x", object(), "x" * 5000, "\udcff"]  # fmt: skip


class LikeAnything:
    """Neither a plain value nor an object of ours."""


def owners(adapter: Any) -> list[Any]:
    own = getattr(adapter, "settings_class", None)
    return [adapter] if own is None else [adapter, own]


def settings_of(adapter: Any) -> dict[str, inspect.Parameter]:
    parameters = {p.name: p for owner in owners(adapter) for p in inspect.signature(owner).parameters.values()}
    return {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}


EVERY = [(name, setting) for name in EXECUTORS for setting in settings_of(registry.load("executor", name))]


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_setting_of_a_registered_executor_has_a_rule(name: str) -> None:
    adapter = registry.load("executor", name)
    kinds = {setting for owner in owners(adapter) for setting in annotated_kinds(owner)}
    assert set(settings_of(adapter)) <= kinds, "annotate it with a plain type, or with Annotated[…, Kind(…)]"
    last = inspect.signature(owners(adapter)[-1]).parameters.values()
    assert not any(p.kind is p.VAR_KEYWORD for p in last), "name the class of its **settings as `settings_class`"


@pytest.mark.parametrize(("name", "setting"), EVERY, ids=[f"{name}-{setting}" for name, setting in EVERY])
def test_a_value_of_any_kind_is_accepted_or_refused_by_name(name: str, setting: str) -> None:
    """No value may end in another error than `InvalidSpec`, with the registry or without it, nor break a plan."""
    adapter, refusals = registry.load("executor", name), []
    for value in WRONG:
        for make in (adapter, lambda **settings: registry.executor(name, **settings)):
            try:
                made = make(**{setting: value})
            except InvalidSpec as exc:
                refusals.append(exc)
                continue
            with suppress(Unsupported):
                assert made.plan(RunContext("r", "s3://bucket/x"), Placement()).replicas == 1
    assert len(refusals) >= len(WRONG), "it takes most values"
    assert {(refusal.fields, refusal.exit_code) for refusal in refusals} == {((setting,), 2)}


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_wrong_setting_is_told_at_once(name: str) -> None:
    adapter = registry.load("executor", name)
    given = {setting: [object()] for setting in settings_of(adapter)}
    with pytest.raises(InvalidSpec) as caught:
        registry.executor(name, **given, no_such_setting=1)
    assert sorted(caught.value.fields) == sorted([*given, "no_such_setting"])
    assert f"[executors.{name}]" in str(caught.value.hint)


class Theirs:
    """An executor of another package, which knows nothing of our decorator."""

    name: ClassVar[str] = "theirs"

    def __init__(
        self,
        *,
        partition: str,
        nodes: int = 1,
        price: float | None = None,
        mode: Literal["fast", "slow"] = "fast",
        hosts: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        folder: Path | str = "x",
        size: Annotated[int, COUNT] = 1,
        anything: LikeAnything | None = None,
        unannotated=None,
    ) -> None:
        self.given = (partition, nodes, price, mode, hosts, limits, folder, size, anything, unannotated)


def test_the_rules_come_from_plain_annotations() -> None:
    valid = {"partition": "p", "nodes": 2, "price": 1, "mode": "slow", "hosts": ["a"], "limits": {"a": 1},
             "folder": Path("y"), "size": 3, "anything": LikeAnything(), "unannotated": object()}  # fmt: skip
    assert check_settings("theirs", valid, Theirs) == valid
    wrong = {"partition": 1, "nodes": 1.5, "price": "1", "mode": "medium", "hosts": "ab", "limits": {"a": "1"},
             "folder": 5, "size": 0}  # fmt: skip
    with pytest.raises(InvalidSpec) as caught:
        check_settings("theirs", {**wrong, "anything": 5}, Theirs)
    assert caught.value.fields == tuple(wrong)
    with pytest.raises(InvalidSpec) as caught:
        check_settings("theirs", {"price": None, "limits": None}, Theirs)
    assert caught.value.problems == ("partition: missing",)


def test_the_registry_checks_executors_that_do_not_check_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.EXECUTORS, "theirs", registry.Row(f"{__name__}:Theirs"))
    assert registry.executor("theirs", partition="p", nodes=np.int64(2)).given[:2] == ("p", 2)  # type: ignore[attr-defined]
    with pytest.raises(InvalidSpec) as caught:
        registry.executor("theirs", partition="p", nodes="2")
    assert caught.value.fields == ("nodes",)


def test_numbers_of_numpy_become_those_of_python() -> None:
    class Made:
        name = "made"

        @checks_settings
        def __init__(self, *, size: int = 1, rate: float = 1.0) -> None:
            self.size, self.rate = size, rate

    made = Made(size=np.int32(3), rate=np.float32(0.5))  # type: ignore[arg-type]
    assert json.dumps([made.size, made.rate]) == "[3, 0.5]"
    assert list(inspect.signature(Made).parameters) == ["size", "rate"], "the signature stays readable"


def test_an_executor_that_is_derived_from_a_checked_one_may_take_more() -> None:
    class More(ScriptedExecutor):
        def __init__(self, *, more: int, **settings: Any) -> None:
            self.more = more
            super().__init__(**settings)

    assert More(more=1, endpoint="http://127.0.0.1:1").more == 1
    with pytest.raises(InvalidSpec) as caught:
        More(more=1, endpoint="", timeout_s=0)
    assert caught.value.fields == ("endpoint", "timeout_s")


def test_the_folder_of_local_runs_may_be_a_path(tmp_path: Path) -> None:
    for root in (tmp_path, str(tmp_path), None):
        assert LocalExecutor(root=root).name == "local"


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"on": "local", "settings": {"root": 5}}, ("root",)),
        ({"on": "local", "settings": "root=5"}, ("settings",)),
        ({"on": "local", "settings": {5: "x"}}, ("settings",)),
        ({"on": LocalExecutor(), "settings": {"root": "x"}}, ("settings",)),
        ({"on": 5}, ("on",)),
        ({"on": "local", "settings": {"root": 5}, "image": "i", "replicas": 0}, ("root", "replicas", "image")),
    ],
)
def test_launch_refuses_settings_that_are_wrong_or_would_be_ignored(
    jobs: Path, tmp_path: Path, given: dict[str, Any], fields: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        atoll.launch("jobs:echo", store=tmp_path / "store", run_id="r", **given)
    assert caught.value.fields == fields
    assert os.listdir(tmp_path) == ["code"], "the run id is taken"
