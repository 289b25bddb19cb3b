"""Statements 1 to 5, 7 and 8: what runs, where it finds its store, and how a facade is built."""

from __future__ import annotations

import inspect
import json
import re
import uuid
from importlib import import_module
from typing import Any

import pytest

from atoll.serverless.protocol import ReplicaHandle, ServerlessExecutor
from atoll.testing import protocol_jobs
from atoll.testing.protocol_contract.bench import JOBS, FacadeBench
from atoll.testing.protocol_contract.gallery import NESTED, PREFIX, VARIABLES, Gallery

METHODS = ("launch_replicas", "poll", "stream_logs", "cancel", "collect")
COMMAND = ["python", "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
ARGUMENTS_FILE = ["python", "-c", "import os; print(open(os.environ['ATOLL_ARGS']).read())"]


class LaunchStatements:
    """The forms of an entry point, its variables, its store, and the identity of a run."""

    def test_p00_the_five_methods_have_the_signatures_of_the_protocol(self, bench: FacadeBench) -> None:
        assert isinstance(bench.usual(), ServerlessExecutor)
        for name in METHODS:
            wanted = inspect.signature(getattr(ServerlessExecutor, name)).parameters.values()
            found = list(inspect.signature(getattr(bench.facade_class, name)).parameters.values())
            assert [(p.name, p.kind) for p in found] == [(p.name, p.kind) for p in wanted], name
            defaults = {p.name: p.default for p in wanted if p.default is not p.empty}
            assert {p.name: p.default for p in found if p.name in defaults} == defaults, name

    def test_p00_only_local_replicas_have_a_network_between_them(self, bench: FacadeBench) -> None:
        assert bench.facade_class.supports_inter_replica_network is bench.is_local

    # ── 1. What runs ────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("form", ["colon", "store_constructor"], ids=["colon", "dot"])
    def test_p01_a_function_is_named_with_a_colon_or_a_dot(self, gallery: Gallery, form: str) -> None:
        assert gallery.result(form) == {"called": "echo", "arguments": NESTED}

    def test_p01_a_callable_runs_where_the_backend_can_run_one(self, bench: FacadeBench, gallery: Gallery) -> None:
        if bench.runs_callables:
            assert gallery.result("callable") == {"called": "echo", "arguments": NESTED}
            return
        with pytest.raises((TypeError, ValueError)):
            bench.usual().launch_replicas(1, protocol_jobs.echo, NESTED)

    @pytest.mark.parametrize(("form", "called"), [("store_variable", "main"), ("bare", "bare main")])
    def test_p01_a_name_of_a_module_calls_its_main(self, gallery: Gallery, form: str, called: str) -> None:
        assert gallery.result(form) == {"called": called, "arguments": {"x": 1}}

    def test_p01_a_dotted_name_is_a_module_if_there_is_one(self, gallery: Gallery) -> None:
        assert gallery.result("module_first") == "the main of the module"

    def test_p01_a_trainer_needs_only_its_module_and_a_store(self, gallery: Gallery) -> None:
        assert gallery.result("trainer") == {"called": "train", "arguments": {}}

    def test_p01_a_trainer_may_name_function_arguments_and_rank_variable(self, gallery: Gallery) -> None:
        results = [gallery.result("trainer_with_all", rank) for rank in (0, 1)]
        store = gallery.handle("trainer_with_all").metadata["store"]
        assert results == [dict(zip(VARIABLES, [rank, "2", store, rank], strict=True)) for rank in ("0", "1")]

    def test_p01_the_protocols_own_arguments_do_not_reach_a_function(self, gallery: Gallery) -> None:
        assert gallery.result("store_argument") == 1

    def test_p01_unless_the_function_has_such_parameters(self, gallery: Gallery, bench: FacadeBench) -> None:
        assert gallery.result("kept") == ["MY_RANK", bench.store("store")]

    def test_p01_the_replica_entry_module_exists(self) -> None:
        module = import_module("atoll.serverless.replica_entrypoint")
        assert callable(module.main)

    # ── 2. Variables ────────────────────────────────────────────────────────────────────────────────────────────

    def test_p02_rank_count_and_store_are_variables(self, gallery: Gallery) -> None:
        handles = gallery.handles["variables"]
        assert [handle.rank for handle in handles] == [0, 1]
        for rank, handle in enumerate(handles):
            found = gallery.result("variables", rank)
            assert (found["REPLICA_RANK"], found["MY_RANK"], found["WORLD_SIZE"]) == (str(rank), str(rank), "2")
            assert (
                found["RENDEZVOUS_URI"] == handle.metadata["store"] == gallery.row("variables", rank)["rendezvous_uri"]
            )

    # ── 3. The store ────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("source", ["argument", "constructor", "variable"])
    def test_p03_the_store_is_the_argument_else_the_constructors_else_the_variable(
        self, bench: FacadeBench, gallery: Gallery, source: str
    ) -> None:
        assert gallery.handle(f"store_{source}").metadata["store"] == bench.store(source)
        assert gallery.row(f"store_{source}")["rendezvous_uri"] == bench.store(source)
        assert gallery.row(f"store_{source}")["status"] == "succeeded"

    def test_p03_only_the_local_facade_has_a_default(self, bench: FacadeBench, gallery: Gallery) -> None:
        if bench.is_local:
            assert gallery.result("store_default") == {"called": "echo", "arguments": {}}
            return
        with pytest.raises(ValueError, match="store"):
            bench.facade().launch_replicas(1, f"{JOBS}:echo", {})

    # ── 4. An own command ───────────────────────────────────────────────────────────────────────────────────────

    def test_p04_scalar_arguments_are_upper_cased_variables_of_an_own_command(self, bench: FacadeBench) -> None:
        facade = _commanding(bench, COMMAND)
        handles = facade.launch_replicas(
            2, "their.own.replica_entrypoint", {"lr": 0.5, "model": "é b", "steps": 7, "rank_env": "MY_RANK"}
        )
        rows = facade.collect(handles, timeout=bench.patience_s)
        assert [(row["status"], row["exit_code"], row["result"]) for row in rows] == [("succeeded", 0, None)] * 2
        found = json.loads(facade.stream_logs(handles[1]).splitlines()[-1])
        wanted = {"LR": "0.5", "MODEL": "é b", "STEPS": "7", "REPLICA_RANK": "1", "MY_RANK": "1", "WORLD_SIZE": "2"}
        assert {name: found.get(name) for name in wanted} == wanted

    @pytest.mark.parametrize(
        ("args", "named"),
        [({"lr": 1, "LR": 2}, "LR"), ({"world_size": 3}, "world_size"), ({"not a name": 1}, "not a name")],
    )
    def test_p04_names_that_collide_are_refused(self, bench: FacadeBench, args: dict[str, Any], named: str) -> None:
        with pytest.raises(ValueError, match=re.compile(named, re.I)):
            _commanding(bench, COMMAND).launch_replicas(1, "their.own.replica_entrypoint", args)
        assert bench.running() == []

    def test_p04_other_values_are_in_a_file_or_refused(self, bench: FacadeBench) -> None:
        facade, args = _commanding(bench, ARGUMENTS_FILE), {"layers": [1, {"two": 2}], "lr": 0.5}
        if bench.mounts_arguments:
            handles = facade.launch_replicas(1, "their.own.replica_entrypoint", args)
            facade.collect(handles, timeout=bench.patience_s)
            assert json.loads(facade.stream_logs(handles[0]).splitlines()[-1]) == args
            return
        with pytest.raises((TypeError, ValueError), match="layers"):
            facade.launch_replicas(1, "their.own.replica_entrypoint", args)

    # ── 5. Every launch is a new run, unless it has a key ───────────────────────────────────────────────────────

    def test_p05_run_id_is_a_prefix_and_every_launch_is_new(self, gallery: Gallery) -> None:
        runs = [handles[0].metadata["run_id"] for _, handles in gallery.handles.items()]
        assert all(run.startswith(f"{PREFIX}-") for run in runs)
        assert len(set(runs)) == len(runs)

    def test_p05_a_key_makes_a_repeated_launch_adopt_the_first(self, bench: FacadeBench) -> None:
        key = uuid.uuid4().hex

        def launched(key: str, x: int) -> list[ReplicaHandle]:
            facade = bench.usual(idempotency_key=key, run_id=PREFIX)
            return facade.launch_replicas(1, f"{JOBS}:echo", {"x": x}, timeout=600)

        with bench.queue_held():
            (first,), (again,), (other,) = launched(key, 1), launched(key, 1), launched(f"{key}-2", 1)
            with pytest.raises(ValueError):  # another content under the same key
                launched(key, 2)
            for handle in (first, other):
                bench.usual().cancel(handle)
        for name in ("run_id", "run", "store", *bench.native_ids, *bench.run_ids):
            assert again.metadata[name] == first.metadata[name], name
        assert other.metadata["run_id"] != first.metadata["run_id"]

    # ── 7. Injected clients ─────────────────────────────────────────────────────────────────────────────────────

    def test_p07_injected_clients_need_no_sdk(self, bench: FacadeBench) -> None:
        if bench.clients is None:
            pytest.skip("this facade takes no clients")
        code = (
            "facade = Facade(**settings, **loaded(clients)(), store=store)\n"
            "handles = [facade.launch_replicas(1, entry, {'parts': [part]}, timeout=600)[0]\n"
            "    for part in ('return', 'raise')]\n"
            "rows = facade.collect(handles, timeout=limit)\n"
            "facade.cancel(handles[0])\n"
            "unknown = ReplicaHandle(0, handles[0].backend_name,\n"
            "    json.loads(json.dumps(handles[0].metadata).replace(handles[0].metadata['run_id'], 'unknown-0')))\n"
            "answer = [[row['status'] for row in rows], facade.poll(handles[1]), facade.stream_logs(handles[0]),\n"
            "    facade.poll(unknown), sorted(name for name in blocked if sys.modules[name] is not None)]\n"
        )
        values = {"clients": bench.clients, "store": bench.store("store"), "entry": f"{JOBS}:act"}
        found = bench.elsewhere(code, blocked=bench.sdk, limit=bench.patience_s, **values)
        assert found == [["succeeded", "failed"], "failed", "first line of 0\nlast line of 0\n", "lost", []]

    def test_p07_a_client_without_calls_is_refused_by_name(self, bench: FacadeBench) -> None:
        clients = bench.injected()
        for keyword, calls in bench.client_calls.items():
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                _life(bench, {**clients, keyword: object()})
            assert not isinstance(caught.value, AttributeError)
            assert any(call in str(caught.value) for call in calls), caught.value

    def test_p07_a_client_that_lacks_one_call_works_or_is_refused_by_its_name(self, bench: FacadeBench) -> None:
        clients = bench.injected()
        for keyword, call in [(keyword, call) for keyword, calls in bench.client_calls.items() for call in calls]:
            lacking = {**clients, keyword: _Lacking(clients[keyword], call)}
            try:
                _life(bench, lacking)
            except (TypeError, ValueError, RuntimeError) as exc:
                assert call in str(exc), f"without {call}: {exc}"
        assert bench.running() == []

    # ── 8. Attributes ───────────────────────────────────────────────────────────────────────────────────────────

    def test_p08_constructor_arguments_are_attributes(self, bench: FacadeBench) -> None:
        given = {**bench.settings, "store": bench.store("store"), "run_id": PREFIX, "idempotency_key": "k"}
        facade = bench.facade(**given)
        for name, parameter in inspect.signature(bench.facade_class).parameters.items():
            assert hasattr(facade, name), name
            if name in given:
                assert getattr(facade, name) == given[name], name
            elif parameter.default is not None:
                assert getattr(facade, name) == parameter.default, name


class _Lacking:
    """A client without one call."""

    def __init__(self, client: Any, call: str) -> None:
        self._client, self._call = client, call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            raise AttributeError(f"this client has no {name}")
        return getattr(self._client, name)


def _life(bench: FacadeBench, clients: dict[str, Any]) -> None:
    """Every method once, for a replica that may still wait in the queue."""
    with bench.queue_held():
        facade = bench.usual(**clients)
        handles = facade.launch_replicas(1, f"{JOBS}:echo", {}, timeout=600)
        try:
            facade.poll(handles[0])
            facade.stream_logs(handles[0])
            facade.cancel(handles[0])
        finally:
            bench.usual().cancel(handles[0])
        facade.collect(handles, timeout=bench.patience_s)


def _commanding(bench: FacadeBench, command: list[str]) -> ServerlessExecutor:
    if not bench.runs_commands:
        pytest.skip("this facade has no container whose command could be another")
    return bench.usual(command=command)
