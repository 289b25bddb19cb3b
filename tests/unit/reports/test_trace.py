"""Records of rounds as a trace: the format, the tracks, the alignment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.reports.trace import TRACKS, chrome_trace, events_of, last_rounds
from atoll.rounds.timeline import PhaseTime, RoundRecord
from trace_format import check_trace


def phase(*spans: tuple[float, float]) -> PhaseTime:
    lasted = sum(length for _, length in spans)
    return PhaseTime(lasted, lasted, len(spans), spans)


def record(rank: int, round_no: int, time: float, exchange_s: float = 4.0, **phases: PhaseTime) -> RoundRecord:
    return RoundRecord(
        rank, 0, round_no, 0, time, exchange_s, exchange_s, True, True, phases, 1000, 2000, {"get": 3, "put": 2}
    )


def named(drawn, name):
    return [event for event in drawn if event["name"] == name]


def test_each_rank_is_a_process_and_each_phase_a_track():
    records = [
        record(r, 0, 100.0 + r, compute=phase((-10, 10)), put=phase((0, 1), (2, 1)), apply=phase((4, 0.5)))
        for r in range(2)
    ]
    trace = chrome_trace("run", records)
    drawn = check_trace(trace)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    tracks = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 0]
    assert tracks == list(TRACKS.values())
    first = named(drawn, "compute")[0]
    assert (first["pid"], first["ts"], first["dur"]) == (0, 0, 10_000_000)
    assert [(e["pid"], e["ts"], e["dur"]) for e in named(drawn, "put")] == [
        (0, 10_000_000, 1_000_000), (1, 11_000_000, 1_000_000), (0, 12_000_000, 1_000_000), (1, 13_000_000, 1_000_000),
    ]  # fmt: skip
    assert trace["otherData"]["started"] == 90.0


def test_the_last_rounds_are_those_of_the_run_and_not_of_each_rank():
    records = [record(0, no, 10.0 * no) for no in range(6)] + [record(1, no, 10.0 * no) for no in range(3)]
    assert [(r.rank, r.round_no) for r in last_rounds(records, 2)] == [(0, 4), (0, 5)]
    assert last_rounds([], 2) == []


def test_of_events_only_those_of_the_rounds_are_left_and_what_happened_between_them():
    def event(name: str, round_no: int, time: float) -> dict[str, object]:
        return {"event": name, "round": round_no, "time": time, "by": 0}

    early, late = 10.0, 45.0
    kept = [event("round_committed", 4, early), event("left", -1, late), event("rounds_retired", 1, late)]
    gone = [event("round_committed", 3, late), event("round_committed", 6, late), event("left", -1, early)]
    assert events_of([record(0, 4, 40.0), record(0, 5, 50.0)], [*kept, *gone]) == kept


def test_a_round_carries_its_bytes_and_requests():
    drawn = check_trace(chrome_trace("run", [record(0, 7, 50.0)]))
    (whole,) = [event for event in named(drawn, "round 7") if event["cat"] == "round"]
    assert whole["args"]["bytes_down"] == 2000
    assert whole["args"]["requests"] == {"get": 3, "put": 2}
    counters = [(e["ts"], e["args"]) for e in drawn if e["ph"] == "C"]
    assert counters == [(0, {"up": 1000, "down": 2000}), (4_000_000, {"up": 0, "down": 0})]


def test_standing_still_is_the_part_of_a_round_without_computing():
    records = [
        record(0, 0, 100.0, compute=phase((-5, 5))),
        record(0, 1, 110.0, compute=phase((-10, 3), (-6, 6))),  # the first piece was computed behind round 0
    ]
    drawn = check_trace(chrome_trace("run", records))
    still = [(e["ts"], e["dur"]) for e in drawn if e.get("cat") == "exposed"]
    assert still == [(8_000_000, 1_000_000), (15_000_000, 4_000_000)]


def test_events_are_instants_and_a_commit_is_everybodys():
    events = [
        {"event": "round_committed", "round": 3, "by": 1, "time": 102.0, "ranks": [0, 1], "mode": "scatter"},
        {"event": "rank_late", "round": 3, "by": 5, "time": 99.0, "rank": 2},
    ]
    drawn = check_trace(chrome_trace("run", [record(0, 3, 100.0)], events))
    commit = named(drawn, "round_committed 3")[0]
    assert (commit["ph"], commit["s"], commit["pid"], commit["ts"]) == ("i", "g", 1, 3_000_000)
    assert commit["args"]["ranks"] == [0, 1]
    late = named(drawn, "rank_late")[0]
    assert (late["s"], late["pid"], late["ts"]) == ("p", 5, 0)


def test_a_phase_nobody_knew_gets_a_track_of_its_own():
    trace = chrome_trace("run", [record(0, 0, 10.0, decode=phase((1, 1)))])
    check_trace(trace)
    tracks = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert tracks == [*TRACKS.values(), "decode"]


numbers = st.floats(-20, 20).map(lambda n: round(n, 6))
lengths = st.floats(0, 5).map(lambda n: round(n, 6))
phases = st.dictionaries(
    st.sampled_from([*TRACKS, "other"]), st.lists(st.tuples(numbers, lengths), max_size=4).map(lambda s: phase(*s))
)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.floats(0, 1e6), lengths, phases), max_size=8))
def test_whatever_was_recorded_the_format_holds(rounds):
    check_trace(chrome_trace("run", [record(rank, no, time, took, **done) for rank, no, time, took, done in rounds]))
