"""The model against the tables that it was published with, its limits, and what it says of streaming."""

from __future__ import annotations

import json
import re

import pytest

from atoll.errors import InvalidSpec, UnknownName
from atoll.reports.estimate import SERVICES, Setting, encoded_bytes, estimate, exchange_of

GBIT = 1e9 / 8
CHUNK = (64 << 20) // 4
S3 = SERVICES[0]

# N: naive 25G, scatter 25G, phase after phase, naive 100G, scatter 100G, phase after phase, 25G: bf16, int8, int4,
# dollars naive, scatter. As printed in the reference, section 3.5.
TABLES = {
    1e9: """
        2    1.5  1.7 3.0   0.5 0.7 1.0    1.0 0.7 0.6   0.001 0.001
        4    4.0  2.3 3.6   1.2 0.9 1.2    1.4 0.9 0.6   0.001 0.001
        8    9.2  2.6 3.9   2.4 1.0 1.3    1.5 1.0 0.7   0.004 0.003
        16   19.4 2.8 4.1   5.0 1.0 1.3    1.6 1.0 0.7   0.010 0.005
        64   80.8 2.9 4.2   20.4 1.0 1.4   1.7 1.0 0.7   0.115 0.022""",
    8e9: """
        2    10.4 10.6 20.9 2.8 3.0 5.5    5.5 3.0 1.7   0.005 0.005
        4    30.9 15.8 26.0 7.9 4.2 6.8    8.1 4.3 2.4   0.012 0.011
        8    71.9 18.3 28.6 18.1 4.9 7.4   9.4 4.9 2.7   0.030 0.022
        16   154  19.6 29.8 38.6 5.2 7.8   10.0 5.3 2.9  0.084 0.044
        64   645  20.6 30.8 162 5.4 8.0    10.5 5.5 3.0  0.922 0.177""",
    70e9: """
        2    89.8 90 180    22.6 22.8 45.2 45.2 23.1 11.9  0.045 0.045
        4    269  135 224   67.4 34.0 56.4 67.6 34.5 17.7  0.103 0.093
        8    627  157 247   157 39.6 62.0  78.8 40.2 20.6  0.260 0.190
        16   1344 168 258   336 42.4 64.8  84.4 43.1 22.1  0.734 0.384
        64   5645 177 266   1411 44.5 66.9 88.6 45.2 23.1  8.06 1.55""",
}
ROWS = [(params, line.split()) for params, table in TABLES.items() for line in table.split("\n") if line.strip()]


def agrees(value: float, printed: str) -> bool:
    """Equal to the printed precision; a half may go either way (161.48 is printed as 162)."""
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 0.521 * 10**-digits


def setting(params: float, replicas: int, gbit: float, codec: str = "fp32") -> Setting:
    return Setting(params, replicas, bandwidth_bytes_s=gbit * GBIT, codec=codec, chunk=CHUNK)


@pytest.mark.parametrize(("params", "row"), ROWS, ids=[f"{p / 1e9:.0f}B-{row[0]}" for p, row in ROWS])
def test_the_tables_of_the_reference_come_out(params, row):
    replicas = int(row[0])
    seconds = []
    for gbit in (25, 100):
        asked = setting(params, replicas, gbit)
        size = encoded_bytes(asked.grid, "fp32")
        whole, scatter = (exchange_of(asked, mode, size, size) for mode in ("whole", "scatter"))
        seconds += [whole.pipelined_s, scatter.pipelined_s, scatter.phased_s]
    half = setting(params, replicas, 25, "bf16")
    seconds.append(exchange_of(half, "scatter", *2 * [encoded_bytes(half.grid, "bf16")]).pipelined_s)
    for each in (1 + 4 / 256, 0.5 + 4 / 256):  # bytes for a value, with the four-byte scales of the reference
        seconds.append(exchange_of(half, "scatter", *2 * [int(each * params)]).pipelined_s)
    in_part = size / (64 << 20) / whole.chunks  # the reference counts parts of chunks
    dollars = [exchange.dollars(S3, replicas, bulk_only=True) * in_part for exchange in (whole, scatter)]
    for value, printed in zip([*seconds, *dollars], row[1:], strict=True):
        assert agrees(value, printed), f"{value} is not {printed}"


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_our_codecs_are_at_most_a_little_larger_than_those_of_the_reference(name):
    asked = setting(8e9, 16, 25, name)
    ideal = {"int8": 1 + 4 / 256, "int4": 0.5 + 4 / 256}[name] * 8e9
    assert 0.95 < encoded_bytes(asked.grid, name) / ideal < 1.05


def test_the_command_of_the_readme_in_numbers():
    made = estimate(Setting(8e9, 16, inner_steps=100, step_time_s=2.0, bandwidth_bytes_s=25 * GBIT, codec="int8"))
    assert made.exchange.mode == "scatter"
    assert made.exchange.pipelined_s == pytest.approx(5.3, abs=0.1)
    assert made.pace.exposed_share == pytest.approx(5.24 / 205.24, abs=1e-3)
    per_round, per_hour = made.dollars(S3)
    assert per_hour == pytest.approx(per_round * 3600 / made.pace.round_s)
    assert json.loads(json.dumps(made.to_json()))["dollars"]["Azure"]["per_round"] > per_round


@pytest.mark.parametrize("replicas", [2, 3, 4, 7, 8, 13, 16, 64, 256, 1024])
@pytest.mark.parametrize("params", [1, 1000, 1e6, 350e6, 8e9, 1e12])
def test_whatever_the_size_the_figures_hang_together(replicas, params):
    made = estimate(Setting(params, replicas))
    forced = [estimate(Setting(params, replicas, mode=mode)).exchange for mode in ("whole", "scatter")]
    assert made.exchange.pipelined_s <= min(e.pipelined_s for e in forced) + 0.2 + 1e-9
    for exchange in (made.exchange, *forced):
        assert 0 < exchange.pipelined_s <= exchange.phased_s
        assert exchange.requests > 0
        assert exchange.bytes_up >= exchange.update_bytes / 2
    assert forced[0].bytes_down >= forced[1].bytes_down * 0.5
    assert made.dollars(S3)[0] > 0


@pytest.mark.parametrize(
    ("replicas", "gigabytes"), [(3, 0.94), (4, 0.42), (8, 0.12)], ids=["3 replicas", "4 replicas", "8 replicas"]
)
def test_whole_updates_win_below_the_sizes_of_the_reference(replicas, gigabytes):
    def mode(size: float) -> str:
        return estimate(setting(size / 4, replicas, 25)).exchange.mode

    assert mode(gigabytes * 0.98e9) == "whole"
    assert mode(gigabytes * 1.04e9) == "scatter"


def test_two_replicas_exchange_whole_updates():
    assert estimate(setting(70e9, 2, 25)).exchange.mode == "whole"


def test_a_delay_hides_as_much_as_it_lasts():
    common = {"params": 8e9, "replicas": 16, "inner_steps": 100, "step_time_s": 0.1, "codec": "int8"}
    blocking = estimate(Setting(**common))
    took = blocking.exchange.pipelined_s
    assert blocking.pace == blocking.blocking
    half = estimate(Setting(**common, delay=20))
    assert half.pace.exposed_s == pytest.approx(took - 2.0)
    assert half.blocking.exposed_s == pytest.approx(took)
    assert half.pace.hidden_share == pytest.approx(2.0 / took)
    assert estimate(Setting(**common, delay=100)).pace.exposed_share == 0.0


def test_fragments_make_rounds_smaller_and_more_frequent():
    one, four = (estimate(Setting(8e9, 16, inner_steps=100, fragments=count, delay=25)) for count in (1, 4))
    assert four.exchange.update_bytes == pytest.approx(one.exchange.update_bytes / 4, rel=0.01)
    assert (one.pace.compute_s, four.pace.compute_s) == (100.0, 25.0)
    assert four.rounds_per_hour == pytest.approx(4 * one.rounds_per_hour)


def test_few_connections_are_slower_than_the_network_and_that_is_said():
    asked = {"params": 8e9, "replicas": 8, "bandwidth_bytes_s": 100 * GBIT, "codec": "bf16"}
    wide, narrow = estimate(Setting(**asked)), estimate(Setting(**asked, connections=25))
    assert narrow.exchange.pipelined_s - 0.4 == pytest.approx(5 * (wide.exchange.pipelined_s - 0.4))
    assert any(re.search(r"\b25\b.*\b125\b", note) for note in narrow.notes)
    assert not any("connections" in note for note in wide.notes)


def test_more_writes_a_second_than_a_prefix_takes_is_said():
    assert any("S3 3500" in note for note in estimate(Setting(70e9, 256, codec="fp32", chunk=1 << 20)).notes)
    assert estimate(Setting(350e6, 4)).notes == ()


def test_a_mean_may_travel_in_another_codec():
    plain, mixed = (estimate(Setting(8e9, 16, codec="int8", mean_codec=mean)) for mean in (None, "bf16"))
    assert mixed.exchange.mean_bytes > 1.9 * plain.exchange.mean_bytes
    assert mixed.exchange.pipelined_s > plain.exchange.pipelined_s


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"params": 0}, "params=0"),
        ({"replicas": 1}, "replicas=1: .*2 .*1024"),
        ({"replicas": 1025}, "replicas=1025"),
        ({"mode": "ring"}, "mode=ring"),
        ({"bandwidth_bytes_s": 0}, "bandwidth_bytes_s=0"),
        ({"latency_s": -1}, "latency_s=-1"),
        ({"connections": 0}, "connections=0"),
        ({"chunk": 1000}, "chunk=1000: .*1024"),
        ({"fragments": 3}, "fragments=3: .*inner_steps=100"),
        ({"fragments": 4, "delay": 26}, "delay=26: .*25"),
        ({"inner_steps": 0}, "inner_steps=0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes, named):
    with pytest.raises(InvalidSpec, match=named):
        Setting(**{"params": 1e9, "replicas": 4, **changes})


def test_all_problems_are_named_at_once_and_codecs_by_what_was_meant():
    with pytest.raises(InvalidSpec) as caught:
        Setting(0, 1, mode="x")
    assert caught.value.fields == ("params", "replicas", "mode")
    with pytest.raises(UnknownName, match=r"`int88`.*`int8`\?"):
        Setting(1e9, 4, codec="int88")
