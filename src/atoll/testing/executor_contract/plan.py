"""Clauses about planning and building: E1 E2 E3 E15 E16."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import pytest

from atoll.context import RunContext
from atoll.errors import Unsupported
from atoll.executors.base import Capabilities, Plan
from atoll.spec import Part, Placement
from atoll.status import ReplicaState
from atoll.testing.bench import Bench, assert_each_rank_once, cleared, launched, order, over, plan_of
from atoll.testing.other_process import ask

CHANGES: dict[str, Sequence[Any]] = {
    "replicas": [2, 3],
    "gpu": ["any:1", "H100:1", "H100:8", "A10G:1", "L4:1"],
    "cpus": [2.0, 7.5],
    "memory_gib": [4.0, 30.5],
    "image": ["registry.invalid/team/train:1", "registry.invalid/team/train:2"],
    "timeout_s": [3600.0, 7200.0],
    "grace_s": [20.0, 45.0],
    "max_restarts": [1, 2],
    "env": [{"CONTRACT_A": "1"}, {"CONTRACT_A": "2"}, {"CONTRACT_A": "1", "CONTRACT_B": "1"}],
    "secrets": [{"CONTRACT_TOKEN": "nowhere:one"}],
    "rank_env": ["CONTRACT_RANK", "CONTRACT_INDEX"],
    "parts": [(Part("local", 1, {"env": {"CONTRACT_A": value}}),) for value in ("1", "2")],
}
"""For each field of `Placement`, values that must give different requests. E2 fails for a field without values."""

HOSTILE = [
    "a" * 128,
    "b" * 63 + "-one",
    "b" * 63 + "-two",
    "UPPER-Case",
    "upper-case",
    "upper case",
    "upper.case",
    "upper_case",
    "-leading-dash",
    "trailing-dash-",
    "0-digit",
    "ünïcödé-跑步",
    "跑" * 40,
    "🚀🚀",
    'it\'s "quoted" & $(touch x); `y` %41 {z}',
    "--help",
]
ODD_VALUE = " spaces \"quotes\" 'single' $HOME `x` \\ ünï 🚀 %s {} = , ; \t|"


class PlanClauses:
    """Plans need no backend; a few tests launch a run to show that a name or a value reaches the replica."""

    # E1 planning is pure, deterministic, JSON and secret-free

    def test_e01_planning_is_deterministic_and_json(self, bench: Bench) -> None:
        ordered = order(bench, "echo", 3, run_id="planned", env={"CONTRACT_B": "2", "CONTRACT_A": "1"})
        first, second = plan_of(bench, ordered), plan_of(bench, ordered)
        assert first == second, "two fresh adapters made different plans of the same run"
        assert json.loads(json.dumps(first.request)) == first.request, "the request does not survive JSON"
        assert (first.run_id, first.replicas) == ("planned", 3)
        assert first.executor == bench.executor().name

    def test_e01_another_process_plans_the_same(self, bench: Bench) -> None:
        ordered = order(bench, "echo", 2, run_id="planned", env={f"CONTRACT_{i}": "x" for i in range(8)})
        there = ask(bench, "plan", order=asdict(ordered), cwd="/", environment={"PYTHONHASHSEED": "7"})
        assert there == plan_of(bench, ordered).to_json(), "another process plans this run differently"

    def test_e01_planning_leaves_nothing_behind(self, bench: Bench) -> None:
        plan = plan_of(bench, order(bench, "echo", 2, run_id="planned"))
        assert not bench.running("planned")
        assert list(bench.store.list()) == [], "planning wrote to the store"
        assert plan_of(bench, order(bench, "echo", 2, run_id="planned")) == plan, "a second plan differs from the first"

    def test_e01_planning_asks_nobody(self, bench: Bench) -> None:
        executor = bench.executor()
        before = bench.calls()
        plan_of(bench, order(bench, "echo", 2, run_id="planned"), executor)
        assert bench.calls() == before, "planning called the service"

    def test_e01_the_plan_holds_no_secret(self, bench: Bench) -> None:
        if bench.secret is None:
            pytest.skip("this bench has no secret its backend could read")
        reference, value = bench.secret
        plan = plan_of(bench, order(bench, "echo", secrets={"CONTRACT_TOKEN": reference}))
        assert value not in json.dumps(plan.to_json(), ensure_ascii=False), "the plan holds the value of a secret"

    # E2 no field is lost

    @pytest.mark.parametrize("name", [field.name for field in fields(Placement)])
    def test_e02_every_field_reaches_the_request_or_is_refused(self, bench: Bench, name: str) -> None:
        assert name in CHANGES, f"`Placement.{name}` is new: add values to CHANGES that must give different requests"
        base = _plan(bench, {})
        assert base is not None, "the bench's own placement is refused"
        requests = [base.request]
        for value in _values(bench, name):
            plan = _plan(bench, {name: value})
            if plan is not None:
                assert plan.request not in requests, f"{name}={value!r} changes nothing in the request"
                requests.append(plan.request)

    def test_e02_variables_reach_the_replica(self, bench: Bench) -> None:
        secrets = {"CONTRACT_TOKEN": bench.secret[0]} if bench.secret else {}
        names = ["CONTRACT_ODD", "CONTRACT_EMPTY", "CONTRACT_INDEX", "REPLICA_RANK", "WORLD_SIZE", *secrets]
        env = {"CONTRACT_ODD": ODD_VALUE, "CONTRACT_EMPTY": ""}
        more: dict[str, Any] = {"env": env, "secrets": secrets, "rank_env": "CONTRACT_INDEX"}
        with launched(bench, "variables", 2, args={"names": names}, **more) as run:
            over(bench, run)
            for rank, found in enumerate(run.result().raise_for_failures().values):
                given = {"CONTRACT_INDEX": str(rank), "REPLICA_RANK": str(rank), "WORLD_SIZE": "2"}
                hidden = {"CONTRACT_TOKEN": bench.secret[1]} if bench.secret else {}
                assert found == {**env, **given, **hidden}

    def test_e02_restarts_happen_or_are_refused(self, bench: Bench) -> None:
        replicas = 1 if bench.executor().capabilities.fails_together else 2  # one may end the other's first try
        ordered = order(bench, "fail_once", replicas, max_restarts=1)
        try:
            plan_of(bench, ordered)
        except Unsupported:
            return
        with launched(bench, "fail_once", replicas, run_id=ordered.run_id, max_restarts=1) as run:
            assert [r.state for r in over(bench, run).replicas] == [ReplicaState.SUCCEEDED] * replicas
            assert run.result().values == ["second try"] * replicas

    # E3 a refusal lists every reason, and nothing was started

    def test_e03_a_refusal_lists_every_reason(self, bench: Bench) -> None:
        refused = dict(_refused(bench))
        assert refused, "this backend accepts every placement, even a secret with an unknown scheme"
        with pytest.raises(Unsupported) as caught:
            plan_of(bench, order(bench, "echo", run_id="refused", **refused))
        for name in refused:
            assert any(name in problem for problem in caught.value.problems), (
                f"the error does not mention {name}: {caught.value}"
            )

    def test_e03_a_refused_secret_does_not_hide_the_next(self, bench: Bench) -> None:
        secrets = {"CONTRACT_ONE": "nowhere:1", "CONTRACT_TWO": "nowhere:2"}
        with pytest.raises(Unsupported) as caught:
            plan_of(bench, order(bench, "echo", secrets=secrets))
        for name in secrets:
            assert any(name in problem for problem in caught.value.problems), (
                f"the error does not mention {name}: {caught.value}"
            )

    def test_e03_after_a_refusal_nothing_was_started(self, bench: Bench) -> None:
        with pytest.raises(Unsupported):
            order(bench, "echo", run_id="refused", secrets={"X": "nowhere:1"}).draft(
                bench.executor(), bench.store_uri
            ).submit()
        assert not bench.running("refused")
        assert list(bench.store.list()) == [], "a refused run left something in the store"

    def test_e03_a_store_that_replicas_cannot_reach_is_refused(self, bench: Bench) -> None:
        placement = Placement(**bench.placed({"secrets": {"X": "nowhere:1"}}))
        with pytest.raises(Unsupported) as caught:
            bench.executor().plan(RunContext("refused", "memory://of-this-process"), placement)
        assert "store" in caught.value.fields, f"replicas cannot see the memory of this process: {caught.value}"

    # E15 without the SDK

    def test_e15_without_the_sdk_the_error_names_the_extra(self, bench: Bench) -> None:
        if not bench.extra:
            pytest.skip("this adapter needs no SDK")
        answer = ask(bench, "import", sdk=list(bench.sdk))
        assert answer["raised"] == "MissingExtra", f"construction raised {answer['raised']}: {answer['text']}"
        assert answer["extra"] == bench.extra
        assert bench.extra in answer["text"]

    # E16 hostile run names

    def test_e16_hostile_names_give_valid_and_distinct_native_names(self, bench: Bench) -> None:
        with cleared(bench, *HOSTILE):
            runs = [
                order(bench, "echo", run_id=name, args={"name": name}).draft(bench.executor(), bench.store_uri).submit()
                for name in HOSTILE
            ]
            natives = [run.handle.native_id for run in runs]
            assert len(set(natives)) == len(HOSTILE), f"native names are not distinct: {sorted(natives)}"
            for run in runs:
                over(bench, run)
                assert run.result().raise_for_failures().values[0]["args"] == {"name": run.id}
                assert_each_rank_once(bench, run.id, 1)

    def test_e16_one_name_in_two_stores_gives_two_native_names(self, bench: Bench) -> None:
        ordered = order(bench, "echo", run_id="same-name")
        native = []
        for here in (bench, bench.elsewhere("other")):
            with cleared(here, ordered.run_id):
                run = ordered.draft(here.executor(), here.store_uri).submit()
                native.append(run.handle.native_id)
                over(here, run)
        assert native[0] != native[1]


def _plan(bench: Bench, change: Mapping[str, Any]) -> Plan | None:
    """The plan for the bench's placement with one change; None if the backend refuses it."""
    placement = Placement(**bench.placed(change))
    try:
        return bench.executor().plan(RunContext("planned", bench.store_uri), placement)
    except Unsupported as exc:
        assert any(name in problem for problem in exc.problems for name in change), (
            f"a refusal without the field: {exc}"
        )
        return None


def _values(bench: Bench, name: str) -> list[Any]:
    """Values of one field that are not the bench's own."""
    values = [*CHANGES[name], *bench.changes.get(name, ())]
    if name == "secrets":
        schemes = sorted(bench.executor().capabilities.secret_schemes)
        values += [{"CONTRACT_TOKEN": f"{scheme}:{which}"} for scheme in schemes for which in ("one", "two")]
    own = getattr(Placement(**bench.placement), name)
    return [value for value in values if value != own and str(own) != value]


def _refused(bench: Bench) -> Iterator[tuple[str, Any]]:
    """For each field with a value that this backend refuses, that value."""
    limits: Capabilities = bench.executor().capabilities
    too_many = [] if limits.max_replicas is None else [limits.max_replicas + 1]
    for name in (name for name in CHANGES if name != "parts"):  # parts must agree with the refused `replicas`
        for value in [*_values(bench, name), *(too_many if name == "replicas" else [])]:
            if _plan(bench, {name: value}) is None:
                yield name, value
                break
