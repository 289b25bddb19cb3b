"""Stopping always works: what may run on SageMaker is stopped, or the caller gets its name.

The tests use what users use: `launch`, `Run`, `attach`, the command line and the replica protocol. Most of them hold
every job in its queue, so that no container starts.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from atoll import attach, launch
from atoll.errors import BackendError, ConfigError, Conflict, StopFailed, StoreError, SubmitError, WaitTimeout
from atoll.executors.sagemaker.executor import SageMakerTrainingExecutor
from atoll.executors.sagemaker.request import job_name
from atoll.handle import RunHandle
from atoll.journal import read_handle
from atoll.runs.prepare import Draft
from atoll.runs.run import Run
from atoll.serverless import SageMakerExecutor
from atoll.status import ReplicaState
from atoll.testing.bench import JOBS, Bench, Call, Fault, entered, launched, let_go, order, until
from atoll.testing.fakes import FaultyStore
from atoll.testing.other_process import OtherProcess
from services.sagemaker.engine import Listing
from services.sagemaker.faults import REFUSALS, Refusal
from services.sagemaker.server import Peer

N = 4
NEVER = 10_000
LIMIT_S = 60.0
LATE = {"ListTrainingJobs": NEVER}
LATER = {"ListTrainingJobs": NEVER, "DescribeTrainingJob": NEVER}


@pytest.fixture
def held(peer: Peer) -> Peer:
    """Jobs wait for machines that do not come."""
    peer.engine.admits.clear()
    return peer


@pytest.fixture
def start(bench: Bench) -> Callable[..., Run]:
    """`atoll.launch` of four replicas; always the same run id and content."""

    def start(**settings: Any) -> Run:
        own = {**bench.settings, **settings}
        return launch(f"{JOBS}:hold", replicas=N, on="sagemaker", store=bench.store_uri, run_id="exp", settings=own)

    return start


def draft_of(bench: Bench, run_id: str = "exp") -> Draft:
    return order(bench, "hold", N, run_id=run_id).draft(bench.executor(), bench.store_uri)


def going(peer: Peer) -> list[str]:
    """The jobs that bill: all that are not over."""
    return sorted(name for name, job in peer.engine.jobs.items() if not job.is_over)


def stopped(peer: Peer, bench: Bench) -> bool:
    """Whether every job ends; one whose stop was requested needs a moment."""
    until(bench, "no job is between two states", lambda: all(j.status != "Stopping" for j in peer.engine.jobs.values()))
    return going(peer) == []


def creates(peer: Peer) -> int:
    return peer.calls["sagemaker", "CreateTrainingJob"]


def names_of(run: Run) -> list[str]:
    return [job_name(run.handle.native_id, rank) for rank in range(N)]


def assert_accounted(peer: Peer, bench: Bench, error: BaseException | None, run_id: str = "exp") -> None:
    """Four replicas and a handle, or none, or the error names what runs."""
    until(bench, "no job is between two states", lambda: all(j.status != "Stopping" for j in peer.engine.jobs.values()))
    running, handle = going(peer), read_handle(bench.store, run_id)
    if handle is not None and running == [job_name(handle.native_id, rank) for rank in range(N)]:
        return
    assert set(running) <= set(getattr(error, "left_running", ())), f"bill, and nobody is told: {running}"


# F1 E21 a create took effect, its answer was lost, and the retry is refused


@pytest.mark.parametrize("why", sorted(REFUSALS))
def test_a_job_that_a_lost_answer_may_have_created_is_stopped(held, bench, start, why):
    held.faults.lose_answer_then_refuse(Call.CREATE, why, name="-00002")
    with pytest.raises(SubmitError) as caught:
        start()
    assert (caught.value.left_running, stopped(held, bench)) == ((), True)
    assert len(held.engine.jobs) == 3


def test_if_it_cannot_be_stopped_it_is_named(held, bench, start):
    held.faults.lose_answer_then_refuse(Call.CREATE, "quota", name="-00002")
    held.faults.refuse(Call.STOP, *REFUSALS["denied"], name="-00002")
    with pytest.raises(SubmitError) as caught:
        start()
    until(bench, "the others are stopped", lambda: len(going(held)) == 1)
    assert list(caught.value.left_running) == going(held)


def test_after_a_lost_answer_nothing_can_be_asked_and_all_that_may_run_is_named(held, start):
    """The credentials expire at the third create: neither a stop nor a look is possible."""
    held.faults.lose_answer_then_refuse(Call.CREATE, "expired", name="-00002")
    for call in (Call.STOP, Call.DESCRIBE):
        held.faults.refuse(call, *REFUSALS["expired"])
    with pytest.raises(SubmitError) as caught:
        start()
    assert set(going(held)) <= set(caught.value.left_running)
    assert len(going(held)) == 3


# F2 E21 created, and not listed or described yet


@pytest.mark.parametrize("unseen", [LATE, LATER], ids=["not listed", "not described either"])
def test_an_undo_stops_jobs_that_nobody_sees_yet(held, bench, start, unseen):
    held.engine.unseen_looks = unseen
    held.engine.quota = 3
    with pytest.raises(SubmitError) as caught:
        start()
    assert stopped(held, bench)
    assert caught.value.left_running == ()


@pytest.mark.parametrize("unseen", [LATE, LATER], ids=["not listed", "not described either"])
def test_cancel_stops_a_job_that_nobody_sees_yet(held, bench, start, unseen):
    run = start()
    held.engine.hide("-00002", **unseen)
    run.cancel()
    assert stopped(held, bench)


def test_a_stop_that_the_lists_show_late_is_waited_for(held, bench, start):
    run = start()
    held.engine.stale_lists = 5
    run.cancel()
    assert going(held) == []


# F3 F6 E23 an undone launch leaves a clean name


@pytest.mark.parametrize("unseen", [{}, LATE, LATER], ids=["listed", "not listed", "not described either"])
def test_launching_again_after_an_undo_starts_every_replica(held, bench, start, unseen):
    held.engine.unseen_looks = unseen
    held.engine.quota = 3
    with pytest.raises(SubmitError):
        start()
    held.engine.quota, held.engine.unseen_looks = None, {}
    run = start()
    assert going(held) == names_of(run)
    assert {replica.state for replica in run.status().replicas} == {ReplicaState.PENDING}


@pytest.mark.parametrize("nth", [1, 3, 4])
@pytest.mark.parametrize("after_effect", [False, True])
def test_launching_again_after_ctrl_c_starts_every_replica(held, bench, start, nth, after_effect):
    held.faults.interrupt(Call.CREATE, nth=nth, after_effect=after_effect)
    with pytest.raises((KeyboardInterrupt, SubmitError)) as caught:
        start()
    assert_accounted(held, bench, caught.value)
    run = start()
    assert going(held) == names_of(run)


def test_a_run_that_was_cancelled_is_not_launched_again(held, bench, start):
    start().cancel()
    with pytest.raises(Conflict) as caught:
        start()
    assert caught.value.reason == "cancelled"
    assert going(held) == []


def test_a_launch_after_a_cancel_that_failed_names_what_still_runs(held, bench, start):
    run = start()
    held.faults.refuse(Call.STOP, *REFUSALS["denied"], name="-00002")
    with pytest.raises(StopFailed):
        run.cancel()
    with pytest.raises(Conflict) as caught:
        start()
    assert caught.value.reason == "cancelled"
    assert going(held) == [names_of(run)[2]]
    assert names_of(run)[2] in caught.value.message
    assert names_of(run)[1] not in caught.value.message


# F4 E25 deadlines


@pytest.fixture
def trouble(request: pytest.FixtureRequest, peer: Peer) -> Callable[[], None]:
    """Makes the service throttle, hang, or list without an end."""

    def begin() -> None:
        if isinstance(request.param, Listing):
            peer.engine.listing = request.param
        else:
            peer.faults.fail(Call.DESCRIBE, request.param)

    return begin


TROUBLES = [Fault.THROTTLED, Fault.SILENT, Listing.REPEATS, Listing.ENDLESS]


@pytest.mark.parametrize("trouble", TROUBLES[:3], ids=str, indirect=True)
def test_collect_returns_the_rows_at_its_deadline(peer, bench, trouble):
    facade = SageMakerExecutor.over(patient(bench))
    parts = {"parts": ["return", "raise", "hold"]}
    asked = {"rendezvous_uri": bench.store_uri, "trainer_module": JOBS, "trainer_fn": "act", "trainer_kwargs": parts}
    handles = facade.launch_replicas(3, "", asked)
    until(bench, "two are over", lambda: sorted(map(facade.poll, handles)) == ["failed", "running", "succeeded"])
    trouble()
    rows = facade.collect(handles, timeout=1)
    peer.faults.heal()
    peer.engine.listing = Listing.USUAL
    assert [row["rank"] for row in rows] == [0, 1, 2]
    assert (rows[0]["status"], rows[0]["result"], rows[0]["error"]) == ("succeeded", "return", None)
    assert rows[1]["status"] == "failed"
    assert "as it was told to" in rows[1]["error"]
    assert rows[2]["status"] in ("pending", "running")
    assert rows[2]["error"]
    facade.cancel(handles[2])
    assert going(peer) == []


@pytest.mark.parametrize("trouble", TROUBLES, ids=str, indirect=True)
def test_wait_ends_at_its_deadline_with_the_last_status(held, bench, start, trouble):
    run = Run(start().spec, patient(bench), bench.store, read_handle(bench.store, "exp"))
    trouble()
    with pytest.raises(WaitTimeout) as caught:
        run.wait(0.2)
    assert caught.value.status is None
    held.faults.heal()
    held.engine.listing = Listing.USUAL
    with pytest.raises(WaitTimeout) as caught:
        run.wait(1, on_change=lambda _: trouble())
    assert caught.value.status is not None
    assert {replica.state for replica in caught.value.status.replicas} == {ReplicaState.PENDING}


def test_collect_returns_when_the_store_hangs(held, bench, monkeypatch):
    facade = SageMakerExecutor.over(patient(bench))
    asked = {"rendezvous_uri": bench.store_uri, "trainer_module": JOBS, "trainer_fn": "hold"}
    handles = facade.launch_replicas(2, "", asked)
    gate = Event()
    store = FaultyStore(bench.store)
    store.before = lambda *_: (gate.wait(LIMIT_S), None)[1]
    monkeypatch.setattr("atoll.serverless.facade.open_store", lambda _: store)
    rows = facade.collect(handles, timeout=0.5)
    gate.set()
    assert [(row["rank"], row["status"], row["result"]) for row in rows] == [(0, "pending", None), (1, "pending", None)]
    assert all(row["error"] for row in rows)


def patient(bench: Bench) -> SageMakerTrainingExecutor:
    """An executor that retries for as long as the default one."""
    return SageMakerTrainingExecutor(**{**bench.settings, "patience_s": LIMIT_S})


# F5 E22 cancel never creates


@pytest.fixture
def half_launched(held: Peer, bench: Bench) -> Run:
    """A run whose launcher was killed after the second of four creates."""
    other = OtherProcess(bench, "submit", order=asdict(order(bench, "hold", N, run_id="exp")), threads=1)
    try:
        other.until_ready()
        held.faults.on(Call.CREATE, other.kill, nth=2, after_effect=True)
        assert other.go().answer() is None
    finally:
        other.end()
    assert len(going(held)) == 2
    return attach("exp", store=bench.store_uri, settings=bench.settings)


@pytest.mark.parametrize("quota", [None, 2])
def test_cancel_of_a_half_launched_run_creates_nothing(held, bench, half_launched, quota):
    held.engine.quota = quota
    before = creates(held)
    half_launched.cancel()
    assert (creates(held), going(held)) == (before, [])


def test_cancel_of_a_half_launched_run_stops_what_is_not_listed(held, bench, half_launched):
    held.engine.hide("", **LATER)
    before = creates(held)
    half_launched.cancel()
    assert stopped(held, bench)
    assert creates(held) == before


# F7 E24 interrupts


@pytest.mark.parametrize(
    ("verb", "after_effect"),
    [*itertools.product(["create", "put", "get", "list"], [False]), *itertools.product(["create", "put"], [True])],
)
def test_ctrl_c_at_any_request_to_the_store_leaves_nothing_unnamed(held, bench, verb, after_effect):
    """While `handle.json` is written, and at every other request of a launch."""
    for nth in range(1, 10):
        run_id = f"exp-{nth}"
        draft = draft_of(bench, run_id)
        store = FaultyStore(draft.store)
        store.fail(verb, nth=nth, after_effect=after_effect, error=lambda _: KeyboardInterrupt())  # type: ignore[arg-type,return-value]
        draft.store = store
        try:
            draft.submit()
        except (KeyboardInterrupt, SubmitError) as exc:
            assert_accounted(held, bench, exc, run_id)
        held.engine.close()
        held.engine.admits.clear()
        if store.traffic.requests[verb] < nth:
            return
    raise AssertionError("a launch makes fewer requests of one kind")


# F8 E23 two launchers race, and one of them fails


def outcome_of(launcher: Callable[[], Run]) -> Run | SubmitError:
    try:
        return launcher()
    except SubmitError as exc:
        return exc


def assert_true(outcome: Run | SubmitError, peer: Peer) -> None:
    """A run has its replicas; an error names what runs, or nothing runs."""
    if isinstance(outcome, SubmitError):
        assert set(going(peer)) <= set(outcome.left_running)
    else:
        assert going(peer) == names_of(outcome)
        assert {replica.state for replica in outcome.status().replicas} == {ReplicaState.PENDING}


def test_two_launchers_and_the_first_is_refused_after_the_second_is_done(held, bench):
    outcomes: list[Run | SubmitError] = []

    def refuse_after_the_second() -> None:
        outcomes.append(outcome_of(draft_of(bench).submit))
        raise Refusal(*REFUSALS["quota"])

    held.faults.on(Call.CREATE, refuse_after_the_second, name="-00002")
    outcomes.append(outcome_of(draft_of(bench).submit))
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert_true(outcome, held)


def test_two_launchers_and_the_first_is_refused_while_the_second_starts(held, bench):
    go_on, is_refused, is_at_two = Event(), Event(), Event()

    def refuse_late() -> None:
        is_at_two.set()
        go_on.wait(LIMIT_S)
        raise Refusal(*REFUSALS["quota"])

    def let_the_first_fail() -> None:
        go_on.set()
        is_refused.wait(LIMIT_S)

    def first() -> Run | SubmitError:
        try:
            return outcome_of(draft_of(bench).submit)
        finally:
            is_refused.set()

    held.faults.on(Call.CREATE, refuse_late, name="-00002")
    held.faults.on(Call.CREATE, let_the_first_fail, name="-00003")
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(first)
        is_at_two.wait(LIMIT_S)
        outcomes = [outcome_of(draft_of(bench).submit), refused.result(LIMIT_S)]
    for outcome in outcomes:
        assert_true(outcome, held)


# F9 E26 complete refusals


def test_a_refusal_names_every_job_that_could_not_be_stopped(held, start):
    run = start()
    held.faults.refuse(Call.STOP, *REFUSALS["denied"])
    with pytest.raises(StopFailed) as caught:
        run.cancel()
    assert list(caught.value.left_running) == going(held) == names_of(run)


def test_the_command_line_names_every_job_that_could_not_be_stopped(held, start, command):
    run = start()
    held.faults.refuse(Call.STOP, *REFUSALS["denied"])
    code, text, _ = command("cancel", "exp")
    assert code == 3
    assert all(name in text for name in names_of(run))
    code, _, data = command("cancel", "exp", "--json")
    assert code == 3
    assert data["error"]["left_running"] == names_of(run)


@pytest.fixture
def command(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command line in this process, in a folder whose configuration has the settings of the bench."""
    from atoll.cli.main import main

    lines = [f"{name} = {json.dumps(value)}" for name, value in bench.settings.items()]
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / ".git").mkdir()
    (folder / "atoll.toml").write_text("\n".join(["[executors.sagemaker]", *lines]))
    monkeypatch.chdir(folder)

    def command(*args: str) -> tuple[int, str, Any]:
        capsys.readouterr()
        code = main(list(args))
        said = capsys.readouterr()
        data = json.loads(said.out.splitlines()[-1]) if "--json" in args else None
        return code, said.err, data

    return command


# F10 F11 settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"cpu_instance_type": "ml.m5.xlrage"},
        {"volume_size_gb": "big"},
        {"volume_size_gb": -1},
        {"image_uri": ""},
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_before_the_first_call_and_the_corrected_launch_works(held, bench, start, wrong):
    with pytest.raises(ConfigError) as caught:
        start(**wrong)
    assert caught.value.exit_code == 2
    assert sum(held.calls.values()) == 0
    run = start()
    assert going(held) == names_of(run)


def test_a_first_create_that_is_refused_leaves_the_run_id_free(held, bench, start):
    held.faults.refuse(Call.CREATE, "ValidationException", "1 validation error detected: Value 'ml.x' at 'x'")
    with pytest.raises(BackendError):
        start(cpu_instance_type="ml.m5.2xlarge")
    held.faults.heal()
    run = start()
    assert going(held) == names_of(run)


# F12 a list that does not end


@pytest.mark.parametrize("listing", [Listing.REPEATS, Listing.ENDLESS])
def test_a_list_that_does_not_end_is_an_error(held, bench, start, listing):
    run = start()
    held.engine.listing = listing
    with pytest.raises(BackendError) as caught:
        run.status()
    assert caught.value.reason == "endless"


@pytest.mark.parametrize("listing", [Listing.REPEATS, Listing.ENDLESS])
def test_cancel_needs_no_list(held, bench, start, listing):
    run = start()
    held.engine.listing = listing
    run.cancel()
    assert going(held) == []


# E20 stop first, record afterwards


def deleted(bench: Bench) -> None:
    shutil.rmtree(bench.store_uri.removeprefix("file://"))


def replaced_by_a_file(bench: Bench) -> None:
    deleted(bench)
    Path(bench.store_uri.removeprefix("file://")).touch()


LOSSES = pytest.mark.parametrize("lose", [deleted, replaced_by_a_file])


@LOSSES
@pytest.mark.parametrize("by", ["run", "handle", "id"])
def test_cancel_stops_the_replicas_of_a_run_whose_store_is_gone(held, bench, start, lose, by):
    run = start()
    lose(bench)
    if by != "run":
        run = attach(str(run.handle) if by == "handle" else "exp", settings=bench.settings)
    stopped = run.cancel()
    assert going(held) == []
    assert stopped.record_error is not None


def test_cancel_stops_the_replicas_before_it_records_that(held, bench, start):
    run = start()
    store = FaultyStore(run.store)
    store.fail("*", times=None)
    stopped = Run(run.spec, run.executor, store, run.handle).cancel()
    assert going(held) == []
    assert isinstance(stopped.record_error, StoreError)
    assert stopped.warning


@LOSSES
@pytest.mark.parametrize("by", ["handle", "id"])
def test_the_command_line_stops_a_run_whose_store_is_gone_and_says_what_is_not_recorded(
    held, bench, start, command, lose, by
):
    run = start()
    name = str(run.handle) if by == "handle" else run.id
    lose(bench)
    code, text, _ = command("cancel", name)
    assert (code, going(held)) == (0, [])
    assert "record" in text
    code, _, data = command("cancel", name, "--json")
    assert (code, data["data"]["runs"][0]["was_over"]) == (0, True)


def test_the_replica_protocol_stops_a_run_whose_store_is_gone(held, bench):
    facade = SageMakerExecutor.over(SageMakerTrainingExecutor(**bench.settings))
    asked = {"rendezvous_uri": bench.store_uri, "trainer_module": JOBS, "trainer_fn": "hold"}
    handles = facade.launch_replicas(N, "", asked)
    deleted(bench)
    facade.cancel(handles[0])
    assert len(going(held)) == N - 1
    for handle in handles[1:]:
        facade.cancel(handle)
    assert going(held) == []


def test_a_second_launch_has_its_own_job_names_in_the_replica_protocol(held, bench):
    facade = SageMakerExecutor.over(SageMakerTrainingExecutor(**bench.settings), idempotency_key="exp")
    asked = {"rendezvous_uri": bench.store_uri, "trainer_module": JOBS, "trainer_fn": "hold"}
    held.engine.quota = 3
    with pytest.raises(SubmitError):
        facade.launch_replicas(N, "", asked)
    held.engine.quota = None
    handles = facade.launch_replicas(N, "", asked)
    assert [handle.metadata["training_job_name"] for handle in handles] == going(held)
    assert {handle.metadata["launch"] for handle in handles} == {2}


# E27 one missing reading ends nothing


def test_a_job_that_is_absent_from_one_list_does_not_end_the_run(peer, bench):
    with launched(bench, "hold", 2) as run:
        entered(bench, run)
        states: list[set[ReplicaState]] = []

        def hide_again(status: Any) -> None:
            states.append({replica.state for replica in status.replicas})
            peer.engine.hide("-00001", ListTrainingJobs=1)

        peer.engine.hide("-00001", ListTrainingJobs=1)
        with pytest.raises(WaitTimeout):
            run.wait(0.3, fail_fast=True, on_change=hide_again)
        assert states
        assert all(seen == {ReplicaState.RUNNING} for seen in states)
        assert let_go(bench, run).state is ReplicaState.SUCCEEDED


def test_a_forgotten_job_is_lost_only_in_its_own_rank(held, start):
    run = start()
    held.engine.forget(names_of(run)[1])
    states = [replica.state for replica in run.executor.status(run.handle).replicas]
    assert states == [ReplicaState.PENDING, ReplicaState.LOST, ReplicaState.PENDING, ReplicaState.PENDING]


def test_a_relaunch_first_stops_what_an_undo_could_not_stop(held, start):
    held.engine.quota = 2
    held.faults.fail(Call.STOP, Fault.FORBIDDEN)
    with pytest.raises(SubmitError) as caught:
        start()
    assert list(caught.value.left_running) == going(held)
    assert len(going(held)) == 2
    held.engine.quota = None
    with pytest.raises(StopFailed) as refused:
        start()
    assert list(refused.value.left_running) == going(held) == list(caught.value.left_running)
    held.faults.heal()
    run = start()
    assert run.launch == 2
    assert going(held) == [f"{run.handle.native_id}-{rank:05d}" for rank in range(N)]


def test_cancel_also_stops_what_an_earlier_launch_left(held, start):
    held.engine.quota = 2
    with pytest.raises(SubmitError):
        start()
    held.engine.quota = None
    run = start()
    name = next(name for name in held.engine.jobs if "-launch2-" not in name)
    held.engine.answer("CreateTrainingJob", held.engine.jobs.pop(name).request)  # as if it had become visible late
    assert name in going(held)
    run.cancel()
    assert going(held) == []


def test_an_interrupt_while_a_failure_is_handled_names_the_run(held, start, monkeypatch):
    def interrupted(_why: BaseException) -> bool:
        raise KeyboardInterrupt

    held.engine.quota = 2
    monkeypatch.setattr("atoll.runs.start.has_created_nothing", interrupted)
    with pytest.raises(SubmitError) as caught:
        start()
    (handle,) = caught.value.left_running
    assert [name for name in going(held) if not name.startswith(RunHandle.parse(handle).native_id)] == []


def test_a_run_whose_jobs_are_being_stopped_is_not_returned(held, start):
    run = start()
    held.engine.jobs[f"{run.handle.native_id}-00001"].status = "Stopping"
    with pytest.raises(Conflict) as caught:
        start()
    assert caught.value.reason == "cancelled"
