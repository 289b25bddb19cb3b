"""Specs are checked when they are built, and every problem is said at once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import atoll
from atoll.entry import Entry
from atoll.errors import InvalidSpec
from atoll.spec import _LAUNCH_TAKES, Code, Gpu, Placement, RunSpec, Task


def module_level(ctx):
    return ctx


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine is no bug
@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), json_values, max_size=4))
def test_arguments_come_back_from_json_as_they_went_in(args):
    spec = RunSpec.build("m:f", run_id="r", args=args)
    again = RunSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.task.args == args


def test_a_spec_survives_json():
    spec = RunSpec.build(
        "script.py",
        run_id="r",
        argv=["--a", "1"],
        code=Code.bundle("ab" * 32),
        replicas=3,
        gpu="h100:8",
        cpus=2.5,
        memory_gib=1,
        image="img",
        timeout_s=5,
        grace_s=0,
        max_restarts=2,
        env={"A": "b"},
        secrets={"T": "env:X"},
        rank_env="MY_RANK",
        on_dead="wait",
        on_dead_after_s=60,
    )
    assert RunSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.placement.gpu == Gpu("H100", 8)


def test_the_record_of_a_task_with_default_settings_is_that_of_older_versions():
    record = RunSpec.build("m:f", run_id="r").to_json()["task"]
    assert set(record) == {"entry", "args", "argv", "code"}
    again = Task.from_json(record)
    assert (again.on_dead, again.on_dead_after_s) == ("fail", 300.0)
    assert RunSpec.build("m:f", run_id="r", on_dead="wait").to_json()["task"]["on_dead"] == "wait"


def test_every_problem_is_reported_at_once_with_field_value_and_rule():
    with pytest.raises(InvalidSpec) as caught:
        RunSpec.build(
            "no colon",
            run_id="a/b",
            replicas=0,
            gpu="H10O",
            cpus=-1,
            memory_gib=math.nan,
            image=" ",
            timeout_s=0,
            grace_s=-1,
            max_restarts=-1,
            env={"1A": "x", "B": 3, "REPLICA_RANK": "0"},
            secrets={"T": "value"},
            rank_env="WORLD_SIZE",
            on_dead="panic",
            on_dead_after_s=-5,
        )
    assert sorted(caught.value.fields) == sorted([
        "run_id", "entry", "replicas", "gpu", "cpus", "memory_gib", "image", "timeout_s", "grace_s", "max_restarts",
        "env.1A", "env.B", "env.REPLICA_RANK", "secrets.T", "rank_env", "on_dead", "on_dead_after_s",
    ])  # fmt: skip
    for value in ("`a/b`", "`no colon`", "`0`", "`H10O`", "`-1`", "`nan`", "` `", "`WORLD_SIZE`"):
        assert value in caught.value.message


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ((1, 2), "args.x"),
        ({1: 2}, "args.x"),
        ([{"y": float("inf")}], "args.x[0].y"),
        (object(), "args.x"),
        (b"bytes", "args.x"),
    ],
)
def test_what_json_would_change_is_refused_and_named(value, where):
    with pytest.raises(InvalidSpec) as caught:
        RunSpec.build("m:f", args={"x": value})
    assert caught.value.fields == (where,)


def test_a_secret_in_the_environment_is_refused_and_the_right_way_is_shown():
    with pytest.raises(InvalidSpec, match="env:HF_TOKEN"):
        Placement(env={"HF_TOKEN": "hf_abc"})


def test_a_value_is_never_repeated_for_a_secret():
    with pytest.raises(InvalidSpec) as caught:
        Placement(secrets={"TOKEN": "hunter2"})
    assert "hunter2" not in str(caught.value)


class Holder:
    def method(self):
        return None


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (lambda: 1, "lambda"),
        (functools.partial(module_level, 1), "partial"),
        (Holder().method, "Holder.method"),
        (Holder.method, "Holder.method"),
        ("module", "`module`"),
        ("module:", "`module:`"),
        ("mod ule:f", "`mod ule:f`"),
        ("a:b:c", "`a:b:c`"),
        ("", "``"),
    ],
)
def test_what_another_process_cannot_import_is_refused_by_name(entry, named):
    with pytest.raises(InvalidSpec, match=re.escape(named)) as caught:
        RunSpec.build(entry)
    assert caught.value.fields == ("entry",)


def test_a_local_function_is_refused_and_a_module_level_one_is_taken():
    def local(ctx):
        return ctx

    with pytest.raises(InvalidSpec, match="local") as caught:
        RunSpec.build(local)
    assert caught.value.fields == ("entry",)
    assert RunSpec.build(module_level).task.entry.endswith("test_spec:module_level")


def test_words_are_for_scripts_and_arguments_for_functions():
    assert RunSpec.build("a/b.py", argv=["x"]).task.argv == ("x",)
    with pytest.raises(InvalidSpec) as caught:
        RunSpec.build("a.b:f", argv=["x"])
    assert caught.value.fields == ("argv",)
    with pytest.raises(InvalidSpec, match="`not-a-name`") as caught:
        RunSpec.build("a.b:f", args={"not-a-name": 1})
    assert caught.value.fields == ("args",)


def test_an_unknown_field_is_refused_with_the_one_that_may_be_meant():
    with pytest.raises(InvalidSpec) as caught:
        RunSpec.build("m:f", gpus=8, stroe="./runs", colour="red", cpus=-1)
    assert caught.value.fields == ("gpus", "stroe", "colour", "cpus")
    gpus, store, colour, cpus = caught.value.problems
    assert "`gpu`" in gpus
    assert "`store`?" in store
    assert "replicas, gpu, cpus, " in colour
    assert "`-1`" in cpus


def test_what_is_offered_for_a_misspelt_keyword_is_what_launch_takes():
    takes = set(inspect.signature(atoll.launch).parameters) - {"entry", "replicas", "placement"}
    assert set(_LAUNCH_TAKES) == takes


def test_specs_are_frozen():
    spec = RunSpec.build("m:f")
    for part in (spec, spec.task, spec.placement):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.replicas = 3  # type: ignore[misc]


def test_a_task_built_by_hand_is_checked_too():
    with pytest.raises(InvalidSpec):
        Task("no where")


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_a_function_that_is_in_no_file_is_refused(monkeypatch, file):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "typed", lambda: None, raising=False)
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", file, raising=False)
    main.typed.__module__, main.typed.__qualname__ = "__main__", "typed"
    with pytest.raises(ValueError, match="put it in a file"):
        Entry.of(main.typed)


@pytest.mark.parametrize("name", ["train", "pkg.train", "pkg.train.main"])
def test_a_dotted_name_is_an_entry_of_a_record_and_no_text_of_a_user(name):
    built = RunSpec.build(Entry(dotted=name), args={"lr": 1.0})
    assert built.task.entry == name
    assert RunSpec.from_json(built.to_json()) == built
    assert Entry.of_record(name) == Entry(dotted=name)
    with pytest.raises(InvalidSpec) as caught:
        RunSpec.build(name)
    assert caught.value.fields == ("entry",)


@pytest.mark.parametrize("name", ["train.py", "pkg..fn", "a b", "pkg.mod:fn", ""])
def test_an_entry_whose_text_would_mean_something_else_is_refused(name):
    with pytest.raises(InvalidSpec) as caught:
        RunSpec.build(Entry(dotted=name))
    assert caught.value.fields == ("entry",)


def test_a_dotted_name_takes_arguments_and_no_words():
    with pytest.raises(InvalidSpec) as caught:
        RunSpec.build(Entry(dotted="pkg.train"), args={"not a name": 1}, argv=["--lr"])
    assert set(caught.value.fields) == {"args", "argv"}


def test_optional_arguments_are_in_the_record_only_if_there_are_some():
    built = RunSpec.build("train:main", args={"rank_env": "RANK"}, optional_args=["rank_env"])
    assert built.task.to_json()["optional_args"] == ["rank_env"]
    assert RunSpec.from_json(json.loads(json.dumps(built.to_json()))) == built
    assert "optional_args" not in Task("train:main").to_json()
    with pytest.raises(InvalidSpec) as caught:
        RunSpec.build("train:main", optional_args=[1])  # type: ignore[list-item]
    assert caught.value.fields == ("optional_args",)
