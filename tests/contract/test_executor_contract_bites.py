"""Each clause of the Executor contract rejects an adapter built to break it, and for the right reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import broken_executors as broken
import pytest

from atoll.errors import AtollError
from atoll.spec import Placement
from atoll.testing.bench import Bench, Fault, LocalBench
from atoll.testing.executor_contract import CLAUSES, ExecutorContract
from atoll.testing.executor_contract.plan import CHANGES
from atoll.testing.scripted.bench import ScriptedBench
from atoll.testing.scripted.wire import ServiceError

REJECTED = (AssertionError, pytest.fail.Exception, AtollError, ServiceError, StopIteration)


@dataclass(frozen=True)
class Bite:
    """A clause, the adapter it has to reject, and words of the rejection."""

    clause: str
    adapter: type
    why: str
    args: tuple[Any, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    patience_s: float = 30.0

    def __str__(self) -> str:
        return "-".join([self.clause.split("_")[1], self.adapter.__name__, *map(str, self.args)])


BITES = [
    Bite("test_e01_planning_is_deterministic_and_json", broken.NamesByChance, "different plans"),
    Bite("test_e01_planning_is_deterministic_and_json", broken.PlansWithTuples, "survive JSON"),
    Bite("test_e01_another_process_plans_the_same", broken.PlansInAnyOrder, "another process plans"),
    Bite("test_e01_planning_leaves_nothing_behind", broken.WritesWhilePlanning, "wrote to the store"),
    Bite("test_e01_planning_asks_nobody", broken.AsksWhilePlanning, "called the service"),
    Bite("test_e01_the_plan_holds_no_secret", broken.PlansWithTheSecret, "value of a secret"),
    *(
        Bite(
            "test_e02_every_field_reaches_the_request_or_is_refused",
            broken.DropsAField,
            f"{each.name}=.* changes nothing",
            (each.name,),
            {"drops": each.name},
        )
        for each in fields(Placement)
    ),
    Bite("test_e02_variables_reach_the_replica", broken.TrimsValues, "CONTRACT_ODD"),
    Bite("test_e02_restarts_happen_or_are_refused", broken.PromisesRestarts, "FAILED"),
    Bite("test_e03_a_refusal_lists_every_reason", broken.GivesOneReason, "does not mention"),
    Bite("test_e03_a_refused_secret_does_not_hide_the_next", broken.GivesOneReason, "does not mention CONTRACT_TWO"),
    Bite("test_e03_after_a_refusal_nothing_was_started", broken.WritesWhilePlanning, "left something in the store"),
    Bite("test_e03_a_store_that_replicas_cannot_reach_is_refused", broken.AcceptsAnyStore, "cannot see the memory"),
    Bite("test_e04_a_handle_is_one_line_that_reads_back", broken.CountsWrong, "1 == 2"),
    Bite("test_e04_another_process_can_use_it", broken.Remembers, "something still runs"),
    Bite(
        "test_e05_status_has_every_rank_in_order_at_any_moment",
        broken.ShowsOnlyWhatRuns,
        "status has ranks|out of order",
    ),
    Bite(
        "test_e06_return_succeeds_and_raise_exit_and_sigkill_fail_with_reason_and_code",
        broken.TakesOverForSuccess,
        "raise: .*SUCCEEDED",
    ),
    Bite(
        "test_e06_return_succeeds_and_raise_exit_and_sigkill_fail_with_reason_and_code",
        broken.LosesExitCodes,
        "sys_exit: .*exit_code=1",
    ),
    Bite("test_e06_a_replica_killed_from_outside_has_failed_alone", broken.TakesAKillForACancel, "CANCELLED"),
    Bite(
        "test_e07_cancel_before_the_start_is_quiet_and_nothing_starts",
        broken.NeedsItToRun,
        "has not started",
        patience_s=0.5,
    ),
    Bite("test_e07_cancel_while_running_returns_when_nothing_runs", broken.AsksAndLeaves, "after cancel returned"),
    Bite("test_e07_cancel_while_running_returns_when_nothing_runs", broken.CannotCancelTwice, "cannot be cancelled"),
    Bite("test_e07_a_replica_has_its_grace_to_say_farewell", broken.KillsWithoutGrace, "before its grace"),
    Bite(
        "test_e07_a_replica_that_does_not_listen_is_ended_all_the_same", broken.AsksAndLeaves, "after cancel returned"
    ),
    Bite("test_e07_cancel_after_the_end_is_quiet_and_changes_nothing", broken.CannotCancelTwice, "cannot be cancelled"),
    Bite("test_e07_two_cancels_at_once_are_quiet", broken.AsksAndLeaves, "after cancel returned"),
    Bite("test_e08_a_terminal_state_never_changes", broken.CancelsWhatIsOver, "cancelled"),
    Bite("test_e08_what_the_backend_forgot_is_lost", broken.TakesForgottenForCancelled, "CANCELLED"),
    Bite("test_e08_a_run_nobody_ever_had_is_lost", broken.TakesForgottenForCancelled, "CANCELLED"),
    Bite("test_e08_unless_the_store_knows_better", broken.TakesForgottenForCancelled, "CANCELLED"),
    Bite("test_e09_two_runs_do_not_see_each_other", broken.LabelsByFirstWord, "cancelling `pair` reached"),
    Bite("test_e09_one_name_in_two_stores_is_two_runs", broken.IgnoresTheStore, "another request"),
    Bite("test_e10_a_rank_that_cannot_start_leaves_nothing_running", broken.UndoesNothing, "something runs", (1,)),
    Bite(
        "test_e10_an_interrupted_submit_leaves_nothing_running", broken.UndoesNothing, "was interrupted after create 2"
    ),
    Bite("test_e10_what_could_not_be_stopped_is_named", broken.SwallowsRefusals, "nothing is left running"),
    Bite("test_e11_arguments_arrive_unchanged", broken.CutsLongArguments, "arrived changed: .*big"),
    Bite("test_e12_a_replica_past_its_limit_fails_with_timeout", broken.TakesATimeoutForACancel, "CANCELLED"),
    Bite("test_e12_nor_does_it_help_not_to_listen", broken.HasNoLimit, "not over after", patience_s=3.0),
    Bite("test_e13_logs_are_exactly_the_lines_of_the_rank", broken.KeepsLineEnds, r"\\n"),
    Bite("test_e13_logs_are_exactly_the_lines_of_the_rank", broken.IgnoresTheTail, "first line of 0"),
    Bite("test_e13_follow_yields_lines_while_the_replica_runs", broken.FollowsNothing, "StopIteration|three"),
    Bite("test_e13_no_line_yet_is_an_empty_log", broken.SpeaksForItself, "no output yet"),
    Bite("test_e13_an_unknown_run_or_rank_raises", broken.KnowsEveryRun, "DID NOT RAISE"),
    Bite(
        "test_e14_a_failing_create_is_a_documented_error",
        broken.LeaksVendorErrors,
        "interrupted by Denied",
    ),
    Bite("test_e14_a_failing_create_is_a_documented_error", broken.LosesTheCause, "as a cause"),
    Bite("test_e14_a_failing_look_is_a_documented_error", broken.LeaksSilence, "no answer became NoAnswer"),
    Bite("test_e14_a_failing_look_is_a_documented_error", broken.LeaksVendorErrors, "401 became Denied"),
    Bite("test_e14_a_failing_stop_is_a_documented_error", broken.SwallowsRefusals, "was quiet about 401"),
    Bite("test_e14_a_failing_log_is_a_documented_error", broken.NeverTriesAgain, "401 became BackendError"),
    Bite("test_e14_a_wait_outlasts_a_burst_of_failures", broken.NeverTriesAgain, "scripted 429", (Fault.THROTTLED,)),
    Bite(
        "test_e16_hostile_names_give_valid_and_distinct_native_names", broken.CutsNames, "not distinct|another request"
    ),
    Bite("test_e16_one_name_in_two_stores_gives_two_native_names", broken.IgnoresTheStore, "another request"),
    Bite("test_e17_the_number_of_calls_does_not_grow_with_replicas", broken.AsksOneByOne, "took 6 calls", (6,)),
    Bite("test_e18_sixteen_threads_submit_one_plan", broken.StartsAnew, "several handles"),
    Bite("test_e18_sixteen_launchers_in_four_processes", broken.StartsAnew, "ReplicaState.LOST|processes by rank"),
    Bite("test_e18_a_later_submit_adopts_what_runs_and_what_is_over", broken.StartsAnew, "native_id"),
    Bite("test_e18_another_plan_of_the_same_name_is_not_adopted", broken.AdoptsAnything, "DID NOT RAISE"),
    Bite(
        "test_e18_a_create_whose_answer_was_lost_starts_no_twin",
        broken.TriesAgainUnderAnotherName,
        "processes by rank: {0: 1, 1: 2, 2: 1}",
        (2, Fault.BROKEN),
    ),
    Bite(
        "test_e18_a_launcher_that_is_refused_leaves_the_run_of_another_alone",
        broken.StopsTheWholeName,
        "ended the run of the first",
    ),
    Bite(
        "test_e19_a_launcher_killed_at_any_of_its_steps_is_followed_by_the_next",
        broken.AdoptsTheFirstForAll,
        "killed at (http|socket|before|after)",
    ),
    Bite(
        "test_e19_a_launcher_killed_while_the_service_works_is_followed_by_the_next",
        broken.AdoptsTheFirstForAll,
        "killed (before|after) create 1",
    ),
    Bite("test_e20_cancel_by_handle_needs_no_store", broken.AsksTheStoreFirst, "Store|KeyNotFound"),
    Bite("test_e20_a_run_is_stopped_though_the_store_cannot_record_it", broken.AsksTheStoreFirst, "Store|KeyNotFound"),
    Bite(
        "test_e21_a_replica_that_a_lost_answer_may_have_created_is_stopped",
        broken.TrustsTheLastAnswer,
        "something runs, and the error says",
        (1,),
    ),
    Bite(
        "test_e21_a_replica_that_a_lost_answer_may_have_created_is_named",
        broken.NamesTheFirst,
        "run, and the error says",
    ),
    Bite("test_e21_cancel_stops_replicas_that_no_list_shows", broken.StopsWhatIsListed, "after cancel returned"),
    Bite(
        "test_e22_the_handle_follows_from_the_plan_and_cancel_needs_no_more",
        broken.NamesTheRunWhenItStarts,
        "the handle changed",
    ),
    Bite(
        "test_e22_cancel_of_a_half_launched_run_creates_nothing", broken.FinishesTheLaunchFirst, "submit .*scripted 403"
    ),
    Bite(
        "test_e23_after_an_undo_the_same_run_id_starts_every_replica",
        broken.NumbersNoLaunch,
        "another request|its replicas are",
    ),
    Bite(
        "test_e23_two_launchers_race_and_the_report_of_each_is_true",
        broken.StopsTheWholeName,
        "launcher of this run failed, and its replicas are",
    ),
    Bite(
        "test_e24_ctrl_c_at_any_step_leaves_a_handle_or_nothing_or_names",
        broken.UndoesNothing,
        "interrupted at .* run, and nothing names them",
    ),
    Bite(
        "test_e25_a_wait_keeps_its_deadline_whatever_the_service_does",
        broken.TakesSilenceForLost,
        "DID NOT RAISE",
        (Fault.THROTTLED,),
    ),
    Bite("test_e26_a_refusal_to_stop_names_every_replica", broken.NamesTheFirst, "run, and the error says"),
    Bite("test_e27_a_replica_that_one_list_lacks_is_not_lost", broken.BelievesTheList, "one list lacks rank 0"),
    Bite("test_e28_cancel_of_one_rank_stops_it_alone_or_is_refused", broken.StopsAllRanks, "the other ranks are"),
    Bite("test_e28_cancel_of_one_rank_stops_it_alone_or_is_refused", broken.StopsNoSingleRank, "rank 1 is running"),
    Bite("test_e28_cancel_of_one_rank_stops_it_alone_or_is_refused", broken.StopsOneOfAGroup, "was not refused"),
    Bite(
        "test_e28_cancel_of_a_rank_is_quiet_before_its_start_and_after_its_end",
        broken.CannotCancelTwice,
        "cannot be cancelled",
    ),
    Bite(
        "test_e28_ranks_that_the_run_does_not_have_are_refused",
        broken.LeavesOutUnknownRanks,
        r"ranks \[\] was not refused",
    ),
    Bite("test_e28_a_refusal_to_stop_names_only_these_ranks", broken.NamesEveryRank, "one job was not stopped"),
    Bite(
        "test_e28_the_others_of_a_strict_run_end_and_name_the_cancelled_rank",
        broken.StopsAllRanks,
        "ended \\['cancelled', 'cancelled', 'cancelled'\\]",
    ),
    *(
        Bite("test_e29_a_watch_shows_every_change_and_leaves_nothing", adapter, why, patience_s=patience_s)
        for adapter, why, patience_s in (
            (broken.SleepsThroughTheEnd, "goes on waiting", 5.0),
            (broken.ShowsTheFirstStatus, "still shows", 5.0),
            (broken.LeavesAThread, "the watch left", 30.0),
        )
    ),
    Bite(
        "test_e30_a_part_has_the_ranks_and_the_size_of_the_run", broken.StartsPartsAtRankZero, "replicas have the ranks"
    ),
    Bite("test_e30_a_part_has_the_ranks_and_the_size_of_the_run", broken.CountsRanksSoFar, "WORLD_SIZE=4"),
    Bite("test_e30_two_parts_on_one_backend_are_stopped_apart", broken.NumbersNoPart, "another request"),
]


@pytest.mark.process
@pytest.mark.server
@pytest.mark.parametrize("bite", BITES, ids=str)
def test_the_clause_rejects_the_adapter(bite: Bite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRACT_VAULT", "hunter2 hunter3")
    if issubclass(bite.adapter, broken.LocalExecutor):
        expect_rejection(bite, LocalBench.below(tmp_path))
        return
    with ScriptedBench.below(tmp_path) as bench:
        expect_rejection(bite, bench)


def test_a_field_that_is_not_in_the_table_fails_every_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CHANGES, "grace_s")
    with pytest.raises(AssertionError, match=r"`Placement\.grace_s`"):
        ExecutorContract().test_e02_every_field_reaches_the_request_or_is_refused(LocalBench.below(tmp_path), "grace_s")


@pytest.mark.process
@pytest.mark.server
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import atoll.testing.scripted.wire\nclass Adapter: pass", "the other process failed"),
        (
            "class Adapter:\n  def __init__(self, **_):\n    import atoll.testing.scripted.wire",
            "construction raised ModuleNotFoundError",
        ),
        ("class Adapter:\n  def __init__(self, **_): pass", "construction raised None"),
    ],
    ids=["imports it at once", "says only that it is not there", "does not miss it yet"],
)
def test_e15_without_the_sdk_the_error_names_the_extra(tmp_path: Path, source: str, why: str) -> None:
    (tmp_path / "adapter_for_e15.py").write_text(source)
    with ScriptedBench.below(tmp_path) as bench:
        bench = replace(bench, path="adapter_for_e15:Adapter", environment={"PYTHONPATH": str(tmp_path)})
        with pytest.raises(AssertionError, match=why):
            ExecutorContract().test_e15_without_the_sdk_the_error_names_the_extra(bench)


def test_every_clause_is_bitten() -> None:
    """Each method of the contract has an adapter that it rejects, so a new one needs its own."""
    methods = {name for name in dir(ExecutorContract) if name.startswith("test_")}
    assert {int(name[6:8]) for name in methods} == set(CLAUSES)
    bitten = {bite.clause for bite in BITES} | {test_e15_without_the_sdk_the_error_names_the_extra.__name__}
    assert methods == bitten


def test_every_broken_adapter_is_used() -> None:
    made = {value for name, value in vars(broken).items() if getattr(value, "__module__", "") == broken.__name__}
    adapters = {value for value in made if isinstance(value, type)} - {broken.Rebuilding, broken.Watches}
    assert adapters == {bite.adapter for bite in BITES}


def expect_rejection(bite: Bite, bench: Bench) -> None:
    bench = replace(
        bench,
        path=f"{broken.__name__}:{bite.adapter.__name__}",
        settings={**bench.settings, **bite.settings},
        environment={"PYTHONPATH": str(Path(__file__).parent)},
        patience_s=bite.patience_s,
    )
    contract = ExecutorContract()
    contract.launchers, contract.most_steps = 4, 6
    with pytest.raises(REJECTED) as caught:
        _unskipped(getattr(contract, bite.clause), bench, *bite.args)
    words = f"{caught.value!r} {caught.value}"
    assert re.search(bite.why, words, re.S), f"rejected, but for another reason: {words}"


def _unskipped(clause: Callable[..., None], *args: Any) -> None:
    try:
        clause(*args)
    except pytest.skip.Exception as exc:
        raise RuntimeError(f"a clause that is skipped bites nobody: {exc}") from exc
