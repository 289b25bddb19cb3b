"""The journal of a launch: each record once, whoever writes it."""

from __future__ import annotations

import re

import pytest

from atoll import journal
from atoll.errors import Conflict, RunNotFound
from atoll.handle import RunHandle
from atoll.journal import Cancel, RankCancel
from atoll.keys import RunKeys
from atoll.registry import open_store
from atoll.rounds.keys import RoundKeys
from atoll.spec import RunSpec
from atoll.status import ON_REQUEST


@pytest.fixture
def memory(request):
    return open_store(f"memory://{request.node.name}")


def spec(**changes):
    return RunSpec.build("m:f", run_id=changes.pop("run_id", "r"), **changes)


def test_the_second_of_two_equal_runs_is_the_first(memory):
    assert journal.record_run(memory, spec(), executor="local") is True
    assert journal.record_run(memory, spec(), executor="local") is False


def values(difference: str) -> tuple[str, ...]:
    """The name of the field that differs, and the values that are shown for it."""
    return (difference.partition(":")[0], *re.findall("`(.*?)`", difference))


def test_other_content_is_a_conflict_that_shows_the_difference(memory):
    journal.record_run(memory, spec(args={"a": {"b": 1}}), executor="local")
    with pytest.raises(Conflict) as caught:
        journal.record_run(memory, spec(args={"a": {"b": 2}}, replicas=3), executor="kubernetes")
    assert [values(line) for line in caught.value.differences] == [
        ("executor", '"local"', '"kubernetes"'),
        ("placement.replicas", "1", "3"),
        ("task.args.a.b", "1", "2"),
    ]


def test_an_argument_that_only_one_side_has_is_said_to_be_absent(memory):
    journal.record_run(memory, spec(args={"seed": 1, "name": None}), executor="local")
    with pytest.raises(Conflict) as caught:
        journal.record_run(memory, spec(args={"lr": {"first": 1}, "seed": None}), executor="local")
    assert [values(line) for line in caught.value.differences] == [
        ("task.args.lr", '{"first": 1}'),
        ("task.args.name", "null"),
        ("task.args.seed", "1", "null"),
    ]


def test_the_first_handle_counts(memory):
    first, second = RunHandle("local", "h", "a", 1), RunHandle("local", "h", "b", 1)
    assert journal.read_handle(memory, "r") is None
    assert journal.record_handle(memory, "r", first).handle == first
    assert journal.record_handle(memory, "r", second).handle == first


def test_runs_are_listed_whatever_they_are_called(memory):
    names = ["plain", "Ünï 'x'", "a.b", "%41", "跑" * 128, "😀" * 30]
    for name in names:
        journal.record_run(memory, spec(run_id=name), executor="local")
    assert sorted(journal.run_ids(memory)) == sorted(names)


def test_a_run_that_is_not_there_says_where_it_looked(memory):
    with pytest.raises(RunNotFound, match=r"`nope`.*memory://"):
        journal.read_run(memory, "nope")


def test_of_two_who_cancel_a_run_the_first_says_why_and_who_had_ended_before(memory):
    assert journal.read_cancel(memory, "r") is None
    said = Cancel("cancelled because rank 1 failed", (1,))
    journal.record_cancel(memory, "r", said)
    journal.record_cancel(memory, "r", Cancel(ON_REQUEST))
    assert journal.read_cancel(memory, "r") == said


def test_a_request_to_stop_that_says_no_more_was_somebodys_wish(memory):
    memory.put(RunKeys("r").cancelled(), b'{"at": 1.0}')
    assert journal.read_cancel(memory, "r") == Cancel(ON_REQUEST)


def test_ranks_are_cancelled_one_by_one_and_the_first_record_of_each_counts(memory):
    assert journal.read_rank_cancels(memory, "r") == {}
    journal.record_rank_cancel(memory, "r", 2, RankCancel("a reason", True))
    journal.record_rank_cancel(memory, "r", 2, RankCancel())
    journal.record_rank_cancel(memory, "r", 10, RankCancel())
    journal.record_rank_cancel(memory, "r", 0, RankCancel(), launch=2)
    assert journal.read_rank_cancels(memory, "r") == {2: RankCancel("a reason", True), 10: RankCancel(ON_REQUEST)}
    assert journal.read_rank_cancels(memory, "r", launch=2) == {0: RankCancel()}
    assert not journal.is_cancelled(memory, "r")
    assert [journal.is_rank_cancelled(memory, "r", rank) for rank in (0, 2)] == [False, True]
    memory.put(RunKeys("r").cancelled_rank(3), b'{"at": 1.0}')
    assert journal.read_rank_cancels(memory, "r")[3] == RankCancel(ON_REQUEST, False)


def test_the_first_decision_of_a_launch_counts(memory):
    handle = RunHandle("local", "h", "a", 1)
    assert journal.record_undone(memory, "r", "no quota").undone == "no quota"
    assert journal.record_handle(memory, "r", handle) == journal.Launch(1, None, "no quota")
    assert journal.newest_launch(memory, "r") == journal.Launch(1, None, "no quota")
    journal.record_intent(memory, "r", {"a": 1}, handle, launch=2)
    assert journal.newest_launch(memory, "r") == journal.Launch(2)
    assert journal.record_handle(memory, "r", handle, launch=2) == journal.Launch(2, handle)
    assert journal.record_undone(memory, "r", "late", launch=2).handle == handle
    assert journal.newest_launch(memory, "r") == journal.Launch(2, handle)
    assert journal.launch_of(memory, "r", handle).number == 2


def test_records_of_a_second_launch_have_keys_of_their_own():
    first, second = RunKeys("r"), RunKeys("r", 2)
    assert first.run() == second.run()
    assert second.intent() == "runs/r/launch/2/intent.json"
    assert second.handle() == "runs/r/launch/2/handle.json"
    assert second.outcome(0, 0) == "runs/r/launch/2/outcome/00000.000.json"
    assert RoundKeys("r", 2).agreement() == "runs/r/launch/2/sync/agreement.json"


def test_a_withdrawn_run_leaves_nothing_unless_another_launcher_began(memory):
    spec = RunSpec.build("job:ok", run_id="r")
    handle = RunHandle("local", "h", "a", 1)
    for others in (False, True):
        assert journal.record_run(memory, spec, executor="local")
        assert journal.record_intent(memory, "r", {"a": 1}, handle)
        if others:
            assert not journal.record_intent(memory, "r", {"a": 1}, handle)
        journal.record_undone(memory, "r", "refused")
        journal.withdraw_run(memory, spec, executor="local")
        left = set(memory.list(""))
        assert (RunKeys("r").run() in left) is others
        assert (left == set()) is not others
