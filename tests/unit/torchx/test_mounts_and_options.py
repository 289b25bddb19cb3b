"""Mounts in their text form and as volumes; run options and their rules; times of log lines."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

import pytest
from torchx import specs

from atoll.errors import InvalidSpec
from atoll.torchx.logs import shown, since_seconds, split
from atoll.torchx.mounts import ConfigMapMount, EmptyMount, SecretMount, mount_problems, parse_mounts, volumes
from atoll.torchx.options import V1BETA1, Options, read_overlay


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("type=bind,src=/a,dst=/b,readonly", specs.BindMount(src_path="/a", dst_path="/b", read_only=True)),
        ("type=bind,src=/a,dst=/b,readonly=false", specs.BindMount(src_path="/a", dst_path="/b", read_only=False)),
        ("type=bind,source=~/a,target=/b", specs.BindMount(src_path="~/a", dst_path="/b", read_only=False)),
        ("type=volume,src=c,dst=/b,read_only=true", specs.VolumeMount(src="c", dst_path="/b", read_only=True)),
        ("type=device,src=/dev/a", specs.DeviceMount(src_path="/dev/a", dst_path="/dev/a", permissions="rwm")),
        ("type=secret,src=s,dst=/s", SecretMount("s", "/s")),
        ("type=configmap,src=c,dst=/c", ConfigMapMount("c", "/c")),
        ("type=empty,dst=/scratch,size=10Gi", EmptyMount("/scratch", "10Gi")),
    ],
)
def test_mounts_are_parsed(text, expected):
    assert parse_mounts(text.split(",")) == [expected]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("src=/a", KeyError),
        ("type=bind,src=/a", KeyError),
        ("type=bind,colour=red", KeyError),
        ("type=other,dst=/a", ValueError),
        ("type=device,src=/dev/a,perm=x", ValueError),
        ("type=bind,src=/a,dst=/b,readonly=maybe", ValueError),
    ],
)
def test_wrong_mounts_are_refused(text, error):
    with pytest.raises(error):
        parse_mounts(text.split(","))


def test_each_mount_is_a_volume():
    mounts = [SecretMount("s", "/s"), ConfigMapMount("c", "/c"), EmptyMount("/e", "1Gi"), specs.VolumeMount("p", "/p")]
    sources, places = volumes(mounts)
    assert [{name: value for name, value in each.items() if name != "name"} for each in sources[1:]] == [
        {"secret": {"secretName": "s"}},
        {"configMap": {"name": "c"}},
        {"emptyDir": {"sizeLimit": "1Gi"}},
        {"persistentVolumeClaim": {"claimName": "p"}},
    ]
    assert [each["readOnly"] for each in places[1:]] == [True, True, False, False]
    with pytest.raises(TypeError):
        volumes([object()])


def test_mount_problems_name_each_field():
    bad = [specs.VolumeMount("Not A Name", "/a"), EmptyMount("/a", "many"), EmptyMount("/dev/shm"), object()]
    found = [text.partition("=")[0].partition(":")[0] for text in mount_problems("r", bad)]
    assert found == [
        "r.mounts[0].src",
        "r.mounts[1].dst_path",
        "r.mounts[1].size",
        "r.mounts[2].dst_path",
        "r.mounts[3]",
    ]


def test_options_name_every_wrong_value_at_once():
    wrong = {
        "namespace": "Not Valid",
        "dialect": "v1",
        "layout": "jobs",
        "retry_pause": "soon",
        "terminal_exit_codes": "a",
        "shm_size": "big",
        "reserved_memmb": -1,
        "priority": "high",
        "service_account": "a b",
        "queue": "a b",
        "overlay": "/no/such/file",
    }
    with pytest.raises(InvalidSpec) as caught:
        Options.of(wrong)
    assert set(caught.value.fields) == set(wrong) - {"layout"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 2**31),
        ("priority", -(2**31) - 1),
        ("retry_limit", 2**31),
        ("terminal_exit_codes", "0"),
        ("terminal_exit_codes", "3;999"),
        ("retryable_exit_codes", "256"),
        ("retryable_exit_codes", "3;;4"),
        ("warmup_grace", "24h1s"),
        ("failure_grace", "1441m"),
        ("retry_pause", "86401s"),
        ("keep_failed", "100000000ms"),
        ("success_ttl", "99999999999h"),
        ("gpu_resource", "gpu"),
    ],
)
def test_values_that_the_cluster_would_refuse_or_replace_are_refused(name, value):
    with pytest.raises(InvalidSpec) as caught:
        Options.of({name: value})
    assert caught.value.fields == (name,)


def test_an_exit_code_cannot_be_both_terminal_and_retryable():
    with pytest.raises(InvalidSpec, match="4 is in both"):
        Options.of({"terminal_exit_codes": "3;4", "retryable_exit_codes": "4"})


def test_the_largest_values_are_accepted():
    largest = {"priority": 2**31 - 1, "warmup_grace": "24h", "success_ttl": "87600h", "terminal_exit_codes": "1;255"}
    assert Options.of(largest).priority == 2**31 - 1


def test_options_take_none_for_a_default_and_short_dialects():
    options = Options.of({"namespace": None, "dialect": "v1beta1", "unknown": 1})
    assert options.namespace == "default"
    assert options.wanted_dialect == V1BETA1
    assert Options.of(None).wanted_dialect is None


def test_overlays_are_json_or_files(tmp_path):
    file = tmp_path / "overlay.yaml"
    file.write_text("spec:\n  hostNetwork: true\n")
    expected = {"spec": {"hostNetwork": True}}
    assert read_overlay(str(file)) == read_overlay(f"file://{file}") == expected
    assert read_overlay('{"spec": {"hostNetwork": true}}') == read_overlay(expected) == expected


def test_ages_are_whole_seconds_of_aware_and_local_times():
    now = datetime(2026, 11, 18, 12, 0, 0, tzinfo=UTC)
    assert since_seconds(now - timedelta(seconds=12.5), now) == 13
    assert since_seconds((now - timedelta(seconds=60)).astimezone(timezone(timedelta(hours=5))), now) == 60
    assert since_seconds((now - timedelta(seconds=60)).astimezone().replace(tzinfo=None), now) == 60
    assert since_seconds(now + timedelta(hours=1), now) == 1
    assert since_seconds(None) is None


def test_lines_end_with_a_line_feed_and_may_lose_their_times():
    lines = ["2026-11-18T12:00:00.123456789Z one", "2026-11-18T12:00:02Z two\n", "three"]
    assert list(shown(lines, until=None, has_times=False)) == ["one\n", "two\n", "three\n"]
    assert list(shown(lines, until=None, has_times=True)) == [f"{line.rstrip()}\n" for line in lines]
    until = datetime(2026, 11, 18, 12, 0, 1, tzinfo=UTC)
    assert list(shown(lines, until=until, has_times=False)) == ["one\n"]
    assert list(split("a\r50%\rb\nc")) == ["a\r50%\rb\n", "c"]


def test_a_log_of_many_lines_is_split_in_one_pass():
    text = "x" * 39 + "\n"
    started = time.process_time()
    assert sum(1 for _ in split(text * 100_000)) == 100_000
    assert time.process_time() - started < 2.0
