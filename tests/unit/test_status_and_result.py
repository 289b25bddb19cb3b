"""States, the verdict on a process, and the two witnesses."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace

import pytest

from atoll.errors import RunFailed
from atoll.executors.local.request import local_status
from atoll.replica.rank_process import RankProcess, StopReason, exit_verdict
from atoll.result import (
    ErrorReport,
    ReplicaOutcome,
    RunResult,
    again_text,
    by_cause,
    completion_text,
    failure_hint,
    join,
    outcome_of,
)
from atoll.status import ON_REQUEST, Progress, Reason, ReplicaState, ReplicaStatus, RunStatus

S = ReplicaState


def run_status(*states: ReplicaState) -> RunStatus:
    return RunStatus(tuple(ReplicaStatus(rank, state) for rank, state in enumerate(states)))


def outcome(rank: int, state: ReplicaState, **more) -> ReplicaOutcome:
    reason = Reason.OK if state is S.SUCCEEDED else Reason.USER_ERROR
    return ReplicaOutcome(rank, more.pop("attempt", 0), state, reason, **more)


def exited(code: int) -> int:
    return code << 8


SUCCESS = {"state": "succeeded", "reason": "ok", "message": ""}
FAILURE = {"state": "failed", "reason": "user_error", "message": "ValueError: x"}


@pytest.mark.parametrize(
    ("states", "together"),
    [
        ([S.PENDING, S.PENDING], S.PENDING),
        ([S.PENDING, S.SUCCEEDED], S.RUNNING),
        ([S.RUNNING, S.FAILED], S.RUNNING),
        ([S.SUCCEEDED, S.SUCCEEDED], S.SUCCEEDED),
        ([S.SUCCEEDED, S.FAILED, S.LOST], S.FAILED),
        ([S.CANCELLED, S.LOST], S.LOST),
        ([S.CANCELLED, S.SUCCEEDED], S.CANCELLED),
    ],
)
def test_a_run_in_one_word(states, together):
    assert run_status(*states).state is together


def test_status_survives_json():
    status = ReplicaStatus(
        2, S.FAILED, Reason.OOM, "m", 137, "h", 1, "n", 1.0, 2.0, Progress(3, {"loss": 1.0}, "l", 4.0)
    )
    assert ReplicaStatus.from_json(status.to_json()) == status
    later = {**status.to_json(), "progress": {**status.to_json()["progress"], "of_a_later_version": 1}}
    assert ReplicaStatus.from_json(later) == status


@pytest.mark.parametrize(
    ("wait_status", "stop_reason", "record", "oom", "state", "reason", "code"),
    [
        (exited(0), StopReason.NONE, SUCCESS, False, S.SUCCEEDED, Reason.OK, 0),
        (exited(0), StopReason.NONE, None, False, S.FAILED, Reason.NO_OUTCOME, 0),
        (exited(1), StopReason.NONE, FAILURE, False, S.FAILED, Reason.USER_ERROR, 1),
        (exited(3), StopReason.NONE, None, False, S.FAILED, Reason.USER_ERROR, 3),
        (exited(1), StopReason.NONE, SUCCESS, False, S.FAILED, Reason.USER_ERROR, 1),
        (signal.SIGSEGV, StopReason.NONE, SUCCESS, False, S.FAILED, Reason.KILLED, 139),
        (signal.SIGKILL, StopReason.NONE, None, False, S.FAILED, Reason.KILLED, 137),
        (signal.SIGKILL, StopReason.NONE, None, True, S.FAILED, Reason.OOM, 137),
        (signal.SIGSEGV, StopReason.NONE, None, True, S.FAILED, Reason.KILLED, 139),
        (signal.SIGKILL, StopReason.TIMEOUT, None, False, S.FAILED, Reason.TIMEOUT, 137),
        (exited(143), StopReason.CANCEL, FAILURE, False, S.CANCELLED, Reason.CANCELLED, 143),
        (exited(143), StopReason.PREEMPT, FAILURE, False, S.FAILED, Reason.PREEMPTED, 143),
        (exited(0), StopReason.CANCEL, SUCCESS, False, S.SUCCEEDED, Reason.OK, 0),
    ],
)
def test_what_became_of_a_process(wait_status, stop_reason, record, oom, state, reason, code):
    verdict = exit_verdict(wait_status, stop_reason, record, limit_s=5, oom=oom)
    assert (verdict.state, verdict.reason, verdict.exit_code) == (state, reason, code)


def test_a_rank_restarts_until_it_may_not_and_its_limit_counts_from_the_first_start():
    process = RankProcess(0, max_restarts=1, timeout_s=10, grace_s=1)
    process.started(100, now=0.0, wall=0.0)
    process.ended(exit_verdict(exited(1), StopReason.NONE, None, limit_s=10, oom=False), wall=1.0)
    process.stored(now=1.0)
    assert (process.state, process.attempt, process.start_at) == (S.PENDING, 1, 1.25)
    process.started(101, now=2.0, wall=2.0)
    assert process.limit_at == 10.0
    assert re.search(r"\b0\b.*\b1\b", process.message), "which attempt ended, and its exit code"
    process.ended(exit_verdict(exited(1), StopReason.NONE, None, limit_s=10, oom=False), wall=3.0)
    process.stored(now=3.0)
    assert (process.state, process.attempt) == (S.FAILED, 1)


def test_a_timeout_is_not_restarted():
    process = RankProcess(0, max_restarts=5, timeout_s=10, grace_s=1)
    process.started(100, now=0.0, wall=0.0)
    process.stop_reason = StopReason.TIMEOUT
    process.ended(exit_verdict(signal.SIGKILL, StopReason.TIMEOUT, None, limit_s=10, oom=False), wall=11.0)
    process.stored(now=11.0)
    assert (process.state, process.reason) == (S.FAILED, Reason.TIMEOUT)


def test_without_a_supervisor_only_terminal_states_are_kept():
    rows = [ReplicaStatus(0, S.SUCCEEDED).to_json(), ReplicaStatus(1, S.RUNNING).to_json()]
    alive = local_status(2, rows, supervisor_runs=True, cancelled=())
    dead = local_status(2, rows, supervisor_runs=False, cancelled=())
    assert [r.state for r in alive.replicas] == [S.SUCCEEDED, S.RUNNING]
    assert [r.state for r in dead.replicas] == [S.SUCCEEDED, S.LOST]


def test_the_store_knows_better_only_where_the_backend_forgot():
    outcomes = {0: outcome(0, S.SUCCEEDED), 1: outcome(1, S.SUCCEEDED), 2: outcome(2, S.FAILED)}
    joined = join(run_status(S.LOST, S.CANCELLED, S.RUNNING, S.LOST), outcomes)
    assert [r.state for r in joined.replicas] == [S.SUCCEEDED, S.CANCELLED, S.RUNNING, S.LOST]


def test_a_replica_told_to_leave_by_a_cancel_was_cancelled_and_not_preempted():
    left = {0: ReplicaOutcome(0, 0, S.FAILED, Reason.PREEMPTED)}
    assert join(run_status(S.LOST), left, cancelled=ON_REQUEST).state is S.CANCELLED
    assert join(run_status(S.LOST), left).state is S.FAILED


def test_why_a_run_was_cancelled_is_known_to_who_cancelled_it():
    backend = RunStatus((ReplicaStatus(0, S.CANCELLED, Reason.CANCELLED, ON_REQUEST, 143),))
    own = {0: ReplicaOutcome(0, 0, S.CANCELLED, Reason.CANCELLED, ON_REQUEST, 143)}
    joined = join(backend, own, cancelled="cancelled because rank 1 failed").replicas[0]
    assert outcome_of(joined, own[0]).message == "cancelled because rank 1 failed"
    assert join(backend, own, cancelled=ON_REQUEST).replicas[0].message == ON_REQUEST


def test_who_had_ended_before_a_run_was_cancelled_did_not_end_because_of_it():
    stopped = RunStatus(tuple(ReplicaStatus(rank, S.CANCELLED, Reason.CANCELLED, "Stopped") for rank in (0, 1)))
    joined = join(stopped, {}, cancelled="cancelled because rank 1 cancelled", over=(1,))
    assert [r.message for r in joined.replicas] == ["cancelled because rank 1 cancelled", "Stopped"]
    left = {rank: ReplicaOutcome(rank, 0, S.FAILED, Reason.PREEMPTED) for rank in (0, 1)}
    joined = join(run_status(S.LOST, S.LOST), left, cancelled="cancelled because rank 1 failed", over=(1,))
    assert [r.reason for r in joined.replicas] == [Reason.CANCELLED, Reason.PREEMPTED]


@pytest.mark.parametrize("state", [S.LOST, S.CANCELLED, S.FAILED])
def test_the_times_that_the_backend_does_not_tell_are_those_of_the_outcome(state):
    own = outcome(0, S.FAILED, started_at=10.0, ended_at=20.0)
    times = [
        (None, None, 0),
        (5.0, None, 0),
        (5.0, 30.0, 0),
        (5.0, None, 1),  # another attempt
    ]
    rows = [ReplicaStatus(rank, state, attempt=a, started_at=b, ended_at=e) for rank, (b, e, a) in enumerate(times)]
    joined = join(RunStatus(tuple(rows)), {rank: replace(own, rank=rank) for rank in range(4)}, cancelled="too late")
    found = [(replica.started_at, replica.ended_at) for replica in joined.replicas]
    assert found == [(10.0, 20.0), (5.0, 20.0), (5.0, 30.0), (5.0, None)]
    running = join(run_status(S.RUNNING), {0: own}).replicas[0]
    assert (running.started_at, running.ended_at) == (None, None)


def test_an_outcome_of_an_earlier_attempt_does_not_count():
    status = RunStatus((ReplicaStatus(0, S.LOST, attempt=1),))
    assert join(status, {0: outcome(0, S.FAILED, attempt=0)}).state is S.LOST


def test_an_exit_code_that_the_backend_does_not_tell_comes_from_the_store():
    stored = {rank: ReplicaOutcome(rank, 0, S.FAILED, Reason.OOM, "", 137) for rank in range(3)}
    guessed, known = Reason.USER_ERROR, Reason.TIMEOUT
    ends = [(guessed, None), (known, None), (guessed, 3)]
    backend = RunStatus(tuple(ReplicaStatus(rank, S.FAILED, why, "", code) for rank, (why, code) in enumerate(ends)))
    joined = [(r.reason, r.exit_code) for r in join(backend, stored).replicas]
    assert joined == [(Reason.OOM, 137), (known, 137), (guessed, 3)]


def test_a_good_end_without_an_outcome_is_a_failure_with_that_reason():
    joined = join(run_status(S.SUCCEEDED), {})
    assert (joined.replicas[0].state, joined.replicas[0].reason) == (S.FAILED, Reason.NO_OUTCOME)


def test_an_outcome_stands_under_the_joined_verdict():
    own = outcome(0, S.SUCCEEDED, result=5)
    assert outcome_of(ReplicaStatus(0, S.CANCELLED, Reason.CANCELLED), own).state is S.CANCELLED
    assert outcome_of(ReplicaStatus(0, S.SUCCEEDED), own).result == 5
    assert outcome_of(ReplicaStatus(0, S.FAILED, Reason.KILLED, "m", 137), None).exit_code == 137


def test_outcomes_survive_json():
    whole = outcome(1, S.FAILED, error=ErrorReport("E", "m", "tb"), last_lines=("a",), metrics={"loss": 1.0})
    assert ReplicaOutcome.from_json(whole.to_json()) == whole


def test_an_outcome_of_another_version_has_no_warnings_or_unknown_fields():
    record = outcome(0, S.SUCCEEDED).to_json()
    del record["warnings"]
    assert ReplicaOutcome.from_json({**record, "of_a_later_version": 1}).warnings == ()
    row = ReplicaStatus(0, S.SUCCEEDED).to_json()
    del row["warnings"]
    assert ReplicaStatus.from_json({**row, "of_a_later_version": 1}) == ReplicaStatus(0, S.SUCCEEDED)


def test_warnings_survive_json_and_the_join_and_equal_ones_are_one_line():
    warned = [outcome(rank, S.SUCCEEDED, warnings=("result.a: no",)) for rank in range(3)]
    assert ReplicaOutcome.from_json(json.loads(json.dumps(warned[0].to_json()))) == warned[0]
    for backend in (run_status(S.SUCCEEDED, S.SUCCEEDED), run_status(S.LOST, S.LOST)):
        joined = join(backend, dict(enumerate(warned)))
        assert [r.warnings for r in joined.replicas] == [("result.a: no",)] * 2
        assert ReplicaStatus.from_json(json.loads(json.dumps(joined.replicas[0].to_json()))) == joined.replicas[0]
    other = outcome(3, S.SUCCEEDED, warnings=("result.b: no",))
    assert RunResult("r", (*warned, other)).warnings == ["ranks 0-2: result.a: no", "rank 3: result.b: no"]


def test_a_good_end_without_an_outcome_is_a_success_of_a_program():
    assert join(run_status(S.SUCCEEDED), {}, writes_outcomes=False).state is S.SUCCEEDED


def test_a_failed_run_names_ranks_reasons_last_lines_and_the_next_command():
    failed = ReplicaOutcome(1, 0, S.FAILED, Reason.KILLED, "killed by SIGKILL", 137, last_lines=("the end",))
    result = RunResult("my run", (outcome(0, S.SUCCEEDED), failed))
    with pytest.raises(RunFailed) as caught:
        result.raise_for_failures()
    head, blamed, *shown = caught.value.message.splitlines()
    assert "`my run`" in head
    assert blamed.startswith("  rank 1: failed, killed, ")
    assert "137" in blamed
    assert blamed.endswith("killed by SIGKILL")
    assert "    | the end" in shown
    assert caught.value.hint == "atoll logs 'my run' --rank 1"
    assert caught.value.result is result


def test_the_hint_leads_to_the_rank_that_began_it():
    waited = ReplicaOutcome(0, 0, S.CANCELLED, Reason.CANCELLED)
    culprit = ReplicaOutcome(1, 0, S.FAILED, Reason.KILLED, "killed by SIGKILL", 137)
    with pytest.raises(RunFailed) as caught:
        RunResult("r", (waited, culprit)).raise_for_failures()
    assert (caught.value.hint or "").startswith("atoll logs r --rank 1")


def failure_of(*outcomes: ReplicaOutcome) -> str:
    with pytest.raises(RunFailed) as caught:
        RunResult("r", outcomes).raise_for_failures()
    return caught.value.message


def raised(rank: int, traceback: str, message: str = "ValueError: no") -> ReplicaOutcome:
    error = ErrorReport("ValueError", message.removeprefix("ValueError: "), traceback)
    return ReplicaOutcome(rank, 0, S.FAILED, Reason.USER_ERROR, message, 1, error)


def test_who_failed_on_its_own_is_told_before_those_who_waited_for_it():
    waited = [raised(rank, "Traceback", "QuorumLost: no update from rank 2") for rank in (0, 1)]
    lost = ErrorReport("atoll.errors.QuorumLost", "no update from rank 2")
    waited = [replace(one, reason=Reason.TIMEOUT, error=lost, ended_at=5.0 + one.rank) for one in waited]
    culprit = ReplicaOutcome(2, 0, S.FAILED, Reason.KILLED, "killed by SIGKILL", 137, ended_at=9.0)
    stopped = ReplicaOutcome(3, 0, S.CANCELLED, Reason.CANCELLED, ended_at=1.0)
    assert [o.rank for o in by_cause([*waited, culprit, stopped])] == [2, 0, 1, 3]
    with pytest.raises(RunFailed) as caught:
        RunResult("r", (*waited, culprit, stopped)).raise_for_failures()
    told = [line.partition(":")[0] for line in caught.value.message.splitlines()[1:]]
    assert told == ["  rank 2", "  ranks 0-1", "  rank 3"]
    assert (caught.value.hint or "").startswith("atoll logs r --rank 2; ")
    assert "`--fail-fast`" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("reason", "could_restart", "is_told"),
    [(Reason.KILLED, True, True), (Reason.KILLED, False, False), (Reason.USER_ERROR, True, False)],
)
def test_that_a_killed_replica_could_be_started_again_is_told_where_it_is_so(reason, could_restart, is_told):
    with pytest.raises(RunFailed) as caught:
        RunResult("r", (ReplicaOutcome(0, 0, S.FAILED, reason, "m"),), could_restart).raise_for_failures()
    assert ("--max-restarts" in (caught.value.hint or "")) is is_told


def test_of_those_who_failed_on_their_own_the_first_one_is_told_first():
    late, early = (replace(raised(rank, f"Traceback {rank}"), ended_at=9.0 - rank) for rank in (0, 1))
    assert [o.rank for o in by_cause([late, early])] == [1, 0]


def test_of_those_who_failed_alike_the_hint_names_the_lowest_rank():
    alike = [replace(raised(rank, "Traceback"), ended_at=9.0 - rank) for rank in (0, 1)]
    with pytest.raises(RunFailed) as caught:
        RunResult("r", tuple(alike)).raise_for_failures()
    assert (caught.value.hint or "").startswith("atoll logs r --rank 0")


def test_an_error_of_the_users_own_is_not_taken_for_one_of_ours():
    own = replace(raised(1, "Traceback"), error=ErrorReport("mine.QuorumLost", "no"), ended_at=1.0)
    other = replace(raised(0, "Traceback"), ended_at=2.0)
    assert [o.rank for o in by_cause([other, own])] == [1, 0]


def test_a_vain_wait_for_others_is_a_timeout_and_may_be_started_again():
    record = {"state": "failed", "reason": "timeout", "message": "QuorumLost: x"}
    process = RankProcess(0, max_restarts=1, timeout_s=10, grace_s=1)
    process.started(100, now=0.0, wall=0.0)
    process.ended(exit_verdict(exited(5), StopReason.NONE, record, limit_s=10, oom=False), wall=1.0)
    process.stored(now=1.0)
    assert (process.state, process.attempt) == (S.PENDING, 1)


def test_training_is_complete_if_somebody_finished_it_and_nobody_was_cut_off():
    done, dead = ReplicaOutcome(0, 0, S.SUCCEEDED, Reason.OK), ReplicaOutcome(1, 0, S.FAILED, Reason.KILLED)
    complete = completion_text([done, dead], 7)
    assert "rank 0" in complete
    assert "7 rounds" in complete
    assert completion_text([done, dead], 0) == "", "no rounds, so nobody knows"
    assert completion_text([dead], 7) == ""
    assert completion_text([done, replace(dead, reason=Reason.CANCELLED)], 7) == ""
    waited = replace(dead, error=ErrorReport("atoll.errors.QuorumLost", "round 7 has no quorum"))
    assert completion_text([done, waited], 7) == "", "the one who is done left too early for the others"


def test_who_was_restarted_and_how_often():
    def tried(rank: int, attempt: int) -> ReplicaOutcome:
        return ReplicaOutcome(rank, attempt, S.SUCCEEDED, Reason.OK)

    assert again_text([tried(0, 0), tried(1, 0)]) == ""
    assert again_text([tried(0, 0), tried(1, 2)]).startswith("rank 1 ")
    assert re.fullmatch(r"rank 2 .* 3 .*, ranks 0-1 .*", again_text([tried(0, 1), tried(1, 1), tried(2, 3)]))
    failed = replace(raised(0, "Traceback"), attempt=1)
    assert failure_of(failed).splitlines()[1] == f"  {again_text([tried(0, 1)])}"


def test_an_error_that_blames_somebody_is_looked_up_there():
    blaming = [
        replace(raised(rank, "Traceback"), error=ErrorReport("atoll.errors.CorruptUpdate", "no", "Traceback", (2,)))
        for rank in range(3)
    ]
    assert failure_hint("r", blaming) == "atoll logs r --rank 2"
    again = ReplicaOutcome.from_json(json.loads(json.dumps(blaming[0].to_json())))
    assert again.error == blaming[0].error
    assert ErrorReport.from_json({"type": "T", "message": "m", "of a later version": 1}) == ErrorReport("T", "m")


def test_restarts_are_named_to_who_lost_its_store():
    lost = replace(raised(0, "Traceback"), error=ErrorReport("atoll.errors.StoreUnavailable", "no answer"))
    hint = failure_hint("r", [lost], could_restart=True)
    assert hint.startswith("atoll logs r --rank 0; ")
    assert "`--max-restarts N`" in hint
    assert failure_hint("r", [raised(0, "Traceback")], could_restart=True) == "atoll logs r --rank 0"


def test_ranks_that_failed_alike_are_told_once():
    alike = [raised(rank, "Traceback:\n  here\nValueError: no") for rank in (0, 1, 2, 4)]
    text = failure_of(*alike[:3], raised(3, "Traceback:\n  there\nValueError: no"), alike[3])
    head, many, *rest = text.splitlines()
    assert "`r`" in head
    assert re.search(r"\b5\b", head)
    assert many.startswith("  ranks 0-2,4: failed, user_error, ")
    assert rest[:3] == ["    Traceback:", "      here", "    ValueError: no"]
    assert rest[3].startswith("  rank 3: failed, user_error, ")
    assert rest[4:] == ["    Traceback:", "      there", "    ValueError: no"]


def test_that_a_replica_was_cancelled_is_said_once():
    stopped = ReplicaOutcome(0, 0, S.CANCELLED, Reason.CANCELLED, ON_REQUEST, 143)
    text = failure_of(stopped, ReplicaOutcome(1, 0, S.CANCELLED, Reason.CANCELLED, "Stopped by a policy"))
    first, second = text.splitlines()[1:]
    assert first.startswith(f"  rank 0: {ON_REQUEST}, ")
    assert second == "  rank 1: cancelled: Stopped by a policy"
    assert first.count("cancelled") == second.count("cancelled") == 1


def test_of_a_long_traceback_both_ends_are_shown():
    lines = [f"frame {number}" for number in range(100)]
    text = failure_of(raised(0, "\n".join(lines)))
    shown = [line.strip() for line in text.splitlines()[2:]]
    assert (shown[:10], shown[11:]) == (lines[:10], lines[-20:])
    assert "70" in shown[10]


def test_of_a_long_message_the_middle_is_cut_and_the_frame_that_raised_it_stays():
    frames = ["Traceback (most recent call last):", *(f"  frame {number}" for number in range(40))]
    message = [f"line {number}" for number in range(30)]
    text = "\n".join(message)
    told = failure_of(raised(0, "\n".join([*frames, f"ValueError: {text}"]), f"ValueError: {text}"))
    shown = [line.strip() for line in told.splitlines()[2:]]
    stripped = [line.strip() for line in frames]
    assert (shown[:10], shown[11:20]) == (stripped[:10], stripped[-9:])
    assert (shown[20:25], shown[26:]) == (["ValueError: line 0", *message[1:5]], message[-5:])
    assert ("22" in shown[10], "20" in shown[25]) == (True, True)


def test_notes_below_a_message_are_part_of_it():
    shown = failure_of(raised(0, "Traceback:\n  here\nValueError: no\na note", "ValueError: no")).splitlines()[2:]
    assert [line.strip() for line in shown] == ["Traceback:", "here", "ValueError: no", "a note"]


def test_nothing_is_left_out_where_saying_so_would_take_as_much_room():
    frames = [f"frame {number}" for number in range(31)]
    assert [line.strip() for line in failure_of(raised(0, "\n".join(frames))).splitlines()[2:]] == frames


def test_every_line_of_a_message_is_indented():
    text = failure_of(ReplicaOutcome(0, 0, S.FAILED, Reason.USER_ERROR, "two problems\n  one\n  another", 1))
    first, *rest = text.splitlines()[1:]
    assert first.startswith("  rank 0: failed, user_error, ")
    assert first.endswith(": two problems")
    assert rest == ["      one", "      another"]


def test_a_message_that_its_traceback_repeats_is_told_there():
    text = failure_of(raised(0, "Traceback:\nValueError: no\nreally not", "ValueError: no\nreally not"))
    assert text.count("really not") == 1
    assert text.splitlines()[-1] == "    really not"


def test_ways_to_fail_beyond_the_first_few_are_counted_by_rank():
    text = failure_of(*(raised(rank, f"Traceback {rank}") for rank in range(12)))
    assert text.splitlines()[-1].endswith("ranks 8-11")
