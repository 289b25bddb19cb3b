"""Parts of a run, as a user writes them and as they are recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import atoll
from atoll.context import RunContext
from atoll.errors import BackendError, BackendUnavailable, ConfigError, InvalidSpec, StopFailed, SubmitError
from atoll.executors.base import Capabilities, Plan
from atoll.executors.several.executor import SeveralExecutor
from atoll.handle import RunHandle
from atoll.runs import resume
from atoll.runs.config import load
from atoll.runs.cost import cost_of
from atoll.runs.parts import backend_names, chosen_parts
from atoll.runs.prepare import prepare
from atoll.spec import Part, Placement
from atoll.status import ReplicaState, ReplicaStatus, RunStatus

ENTRY = "atoll.testing.contract_jobs:echo"


class Fake:
    """An executor without a service: it remembers what it started and what it stopped."""

    capabilities = Capabilities(code=frozenset({"bundle", "image"}))

    def __init__(self, name: str, *, price: float | None = None, refuses: Exception | None = None) -> None:
        self.name, self._price, self.refuses = name, price, refuses  # type: ignore[misc]
        self.started: list[str] = []
        self.stopped: list[tuple[str, Sequence[int] | None]] = []

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        request = {"name": context.native_name(), "first": context.first_rank, "gpu": str(placement.gpu)}
        request["variables"] = context.environment(placement.replicas)  # type: ignore[assignment]
        return Plan(self.name, context.run_id, placement.replicas, request, ("costs money",))

    def handle(self, plan: Plan) -> RunHandle:
        return RunHandle(self.name, "here", plan.request["name"], plan.replicas, plan.request["first"])

    def start(self, plan: Plan) -> RunHandle:
        if self.refuses is not None:
            raise self.refuses
        self.started.append(plan.request["name"])
        return self.handle(plan)

    def submit(self, plan: Plan) -> RunHandle:
        return self.start(plan)

    def status(self, handle: RunHandle) -> RunStatus:
        rows = (ReplicaStatus(rank, ReplicaState.RUNNING, started_at=0.0) for rank in range(handle.replicas))
        return RunStatus(tuple(rows))

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        self.stopped.append((handle.native_id, ranks))
        if isinstance(self.refuses, StopFailed):
            raise self.refuses

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Any:
        return iter([f"{self.name} {handle.first_rank} {rank}"])

    def hourly_usd(self, plan: Plan, placement: Placement) -> float | None:
        return self._price


def several(*fakes: Fake) -> SeveralExecutor:
    return SeveralExecutor(executors=fakes)


def placement(*parts: Part, **more: Any) -> Placement:
    return Placement(replicas=sum(part.replicas for part in parts), parts=parts, **more)


def test_the_forms_of_parts() -> None:
    fake = Fake("x")
    assert chosen_parts("modal") is None
    assert chosen_parts(fake) is None
    assert chosen_parts(["modal"]) is None
    assert chosen_parts("modal:2") == [("modal", 2)]
    assert chosen_parts([("eks", 1), "hf-jobs:2", (fake, 3)]) == [("eks", 1), ("hf-jobs", 2), (fake, 3)]
    assert backend_names(("eks:1", "hf-jobs:2", "eks:3")) == ["kubernetes", "hf_jobs"]


@pytest.mark.parametrize(
    "on", [[], [("local", 0)], [("local", 1), "modal"], [("local", True)], [("local", 1), 5], "hf-jobs:x", ["local:x"]]
)
def test_a_wrong_part_is_refused(on: Any) -> None:
    with pytest.raises(InvalidSpec) as caught:
        prepare(ENTRY, on=on)
    assert set(caught.value.fields) == {"on"}


def test_a_run_on_parts_has_the_ranks_in_their_order(tmp_path: Path) -> None:
    one, two = Fake("one"), Fake("two")
    settings = {"two.gpu": "H100:2", "two.env.PLACE": "cloud"}
    draft = prepare(ENTRY, on=[(one, 2), (two, 3)], store=tmp_path, settings=settings, env={"A": "1"}, run_id="exp")
    parts = draft.plan.request["parts"]
    assert [part["request"]["gpu"] for part in parts] == ["None", "H100:2"]
    assert [part["request"]["first"] for part in parts] == [0, 2]
    assert {part["request"]["variables"]["WORLD_SIZE"] for part in parts} == {"5"}
    assert draft.plan.notes == ("one, ranks 0-1: costs money", "two, ranks 2-4: costs money")
    assert draft.spec.placement.of_parts()[1][1].env == {"A": "1", "PLACE": "cloud"}
    assert Placement.from_json(json.loads(json.dumps(draft.spec.placement.to_json()))) == draft.spec.placement
    run = draft.submit()
    status = run.status(progress=False)
    assert [replica.backend for replica in status.replicas] == ["one", "one", "two", "two", "two"]
    assert list(run.logs(3)) == ["two 2 1"]
    run.cancel([1, 3, 4])
    assert [ranks for _, ranks in one.stopped] == [[1]]
    assert [ranks for _, ranks in two.stopped] == [[1, 2]]


def test_one_backend_with_a_number_of_replicas_is_no_run_on_several(tmp_path: Path) -> None:
    draft = prepare(ENTRY, on="local:3", store=tmp_path)
    assert (draft.executor.name, draft.spec.placement.replicas, draft.spec.placement.parts) == ("local", 3, ())
    assert prepare(ENTRY, on="local", store=tmp_path, settings={"local.env": {"A": "1"}}).spec.placement.env == {
        "A": "1"
    }


def test_another_number_of_replicas_is_refused(tmp_path: Path) -> None:
    fakes = [(Fake("one"), 2), (Fake("two"), 1)]
    assert prepare(ENTRY, on=fakes, replicas=3, store=tmp_path).plan.replicas == 3
    with pytest.raises(InvalidSpec) as caught:
        prepare(ENTRY, on=fakes, replicas=4, store=tmp_path)
    assert caught.value.fields == ("replicas",)
    with pytest.raises(InvalidSpec) as caught:
        atoll.launch(ENTRY, on=fakes, replicas=2, store=tmp_path)
    assert caught.value.fields == ("replicas",)


def test_all_problems_of_all_parts_are_told_at_once(tmp_path: Path) -> None:
    settings = {"region": "x", "sagemaker.spott": True, "local.cpus": 2, "modal.gpu": "H1000"}
    with pytest.raises(InvalidSpec) as caught:
        prepare(ENTRY, on=["local:1", "sagemaker:1", "modal:1"], store=tmp_path, settings=settings)
    assert {"region", "spott", "modal.gpu", "code"} <= set(caught.value.fields)
    with pytest.raises(InvalidSpec) as caught:
        prepare(
            ENTRY, on=["local:1", "sagemaker:1"], store=tmp_path, settings={"local.cpus": 2}, workspace=str(tmp_path)
        )
    assert {"cpus", "role_arn", "store"} <= set(caught.value.fields)


def test_parts_that_get_code_in_different_ways_need_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec) as caught:
        prepare(ENTRY, on=[("local", 1), (Fake("image"), 1)], store=tmp_path)
    assert caught.value.fields == ("code",)
    assert "--workspace" in str(caught.value.hint)


def test_a_part_that_is_refused_stops_the_others(tmp_path: Path) -> None:
    one, two = Fake("one"), Fake("two", refuses=BackendError("no quota"))
    with pytest.raises(SubmitError) as caught:
        prepare(ENTRY, on=[(one, 2), (two, 1)], store=tmp_path, run_id="half").submit()
    assert caught.value.left_running == ()
    assert [name for name, _ in one.stopped] == one.started
    assert len(two.stopped) == 1, "a part whose start was refused is stopped by name, too"


def test_a_part_that_cannot_be_stopped_is_named(tmp_path: Path) -> None:
    one = Fake("one", refuses=None)
    two = Fake("two", refuses=BackendUnavailable("no answer"))
    one.cancel = lambda *_: (_ for _ in ()).throw(StopFailed("x", {"job-1": "refused"}))  # type: ignore[method-assign]
    with pytest.raises(SubmitError) as caught:
        prepare(ENTRY, on=[(one, 2), (two, 1)], store=tmp_path, run_id="half").submit()
    assert caught.value.left_running == ("job-1",)


def test_the_first_part_that_is_refused_creates_nothing(tmp_path: Path) -> None:
    one, two = Fake("one", refuses=BackendError("no quota")), Fake("two")
    with pytest.raises(BackendError) as caught:
        prepare(ENTRY, on=[(one, 2), (two, 1)], store=tmp_path, run_id="none").submit()
    assert not isinstance(caught.value, SubmitError)
    assert (two.started, one.stopped) == ([], [])


def test_the_handle_of_parts_survives_text() -> None:
    executor = several(Fake("one"), Fake("two"))
    plan = executor.plan(RunContext("exp", "s3://b"), placement(Part("one", 2), Part("two", 1)))
    handle = executor.handle(plan)
    again = RunHandle.parse(str(handle))
    assert again == handle
    assert [part.ranks for part in executor.parts_of(again)] == [range(2), range(2, 3)]
    with pytest.raises(ConfigError):
        executor.parts_of(RunHandle("several", "x", handle.native_id, 9))


def test_a_backend_that_stops_all_together_refuses_one_rank_of_its_part() -> None:
    one, two = Fake("one"), Fake("two")
    two.capabilities = Capabilities(cancels_together=True)
    executor = several(one, two)
    handle = executor.handle(executor.plan(RunContext("exp", "s3://b"), placement(Part("one", 2), Part("two", 2))))
    with pytest.raises(ConfigError) as caught:
        executor.cancel(handle, [0, 2])
    assert (caught.value.reason, one.stopped) == ("cancels_together", [])
    executor.cancel(handle, [0, 2, 3])
    assert ([ranks for _, ranks in one.stopped], [ranks for _, ranks in two.stopped]) == ([[0]], [None])


def test_each_part_has_its_own_price(tmp_path: Path) -> None:
    fakes = [(Fake("free"), 1), (Fake("one", price=2.0), 2), (Fake("two", price=8.0), 1)]
    draft = prepare(ENTRY, on=fakes, store=tmp_path)
    assert draft.prices() == {"hourly_usd": 3.0, "part_usd": [None, 2.0, 8.0]}
    run = draft.submit()
    cost = run.cost(run.executor.status(run.handle))
    assert cost is not None
    assert cost.at_most_usd == 12.0 * 24
    assert cost.to_json()["unpriced"] == ["free"]
    rows = tuple(ReplicaStatus(r, ReplicaState.SUCCEEDED, started_at=0.0, ended_at=3600.0) for r in range(4))
    spent = cost_of(
        RunStatus(rows), 3.0, timeout_s=10, now=9e9, parts=draft.spec.placement.parts, part_usd=[None, 2.0, 8.0]
    )
    assert spent.so_far_usd == spent.expected_usd == 12.0
    with pytest.raises(InvalidSpec) as caught:
        draft.limited_to(5.0)
    assert caught.value.fields == ("max_cost",)
    limited = prepare(ENTRY, on=fakes[1:], store=tmp_path, max_cost=12.0)
    assert limited.spec.placement.timeout_s == 3600.0


def test_a_part_on_several_or_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(atoll.AtollError):
        SeveralExecutor().plan(RunContext("exp", "s3://b"), placement(Part("several", 1)))
    with pytest.raises(InvalidSpec):
        placement(Part("local", 1, {"timeout_s": 5}))
    with pytest.raises(InvalidSpec):
        Placement(replicas=2, parts=(Part("local", 1),))


def test_the_configuration_of_each_part(tmp_path: Path) -> None:
    (tmp_path / "atoll.toml").write_text(
        'on = ["local:1", "modal:2"]\n[executors.local]\nroot = "spools"\n'
        '[executors.modal]\ngpu = "H100"\nregion = "eu"\n'
    )
    found = load(tmp_path, environ={})
    assert found.get("on") == ("local:1", "modal:2")
    assert found.launch_options()["settings"] == {"local.root": "spools", "modal.gpu": "H100", "modal.region": "eu"}
    assert found.executor_settings("several") == {"settings": {"local": {"root": "spools"}, "modal": {"region": "eu"}}}
    alone = load(tmp_path, environ={"ATOLL_ON": "modal"}).launch_options()
    assert (alone["gpu"], alone["settings"]) == ("H100", {"region": "eu"})
    assert load(tmp_path, environ={"ATOLL_ON": "local:1,local:2"}).get("on") == ("local:1", "local:2")
    assert isinstance(prepare(ENTRY, on=["local:1", "local:1"], store=tmp_path).executor, SeveralExecutor)


def test_variables_of_one_backend_are_added_to_those_of_the_run(tmp_path: Path) -> None:
    settings = {"local.env.B": "2", "local.secrets.KEY": "env:KEY"}
    given: dict[str, Any] = {"env": {"A": "1"}, "secrets": {"TOKEN": "env:TOKEN"}, "settings": settings}
    found = prepare(ENTRY, on="local", store=tmp_path, **given).spec.placement
    assert found.env == {"A": "1", "B": "2"}
    assert found.secrets == {"TOKEN": "env:TOKEN", "KEY": "env:KEY"}


def test_variables_of_a_backend_in_the_file_are_added_to_those_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "atoll.toml").write_text('[env]\nA = "1"\n[executors.local]\nenv = {B = "2"}\n')
    assert load(tmp_path, environ={}).launch_options()["env"] == {"A": "1", "B": "2"}


@pytest.mark.parametrize("on", [None, "local", "local:2"])
def test_a_resume_with_one_variable_of_the_backend_keeps_the_others(tmp_path: Path, on: str | None) -> None:
    draft = prepare(ENTRY, on="local", replicas=2, store=tmp_path, env={"A": "1", "B": "2"})
    run: Any = SimpleNamespace(id="exp", executor=draft.executor)
    changes = resume._backend(run, draft.spec, on, {"local.env.B": "3", "local.env.C": "4"}, {})[1]
    assert changes["env"] == {"A": "1", "B": "3", "C": "4"}


def test_a_resume_with_one_variable_of_a_part_keeps_the_others(tmp_path: Path) -> None:
    parts = [("local", 1), ("local", 1)]
    draft = prepare(ENTRY, on=parts, store=tmp_path, env={"A": "1"}, settings={"local.env.B": "2"})
    run: Any = SimpleNamespace(id="exp", executor=draft.executor)
    changes = resume._backend(run, draft.spec, None, {"local.env.C": "3"}, {})[1]
    assert [part.overrides["env"] for part in changes["parts"]] == [{"B": "2", "C": "3"}] * 2
    assert "env" not in changes
