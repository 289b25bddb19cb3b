"""Run ids, native names, key names, handles and GPU names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError, UnknownName
from atoll.executors.local.gpus import Device, share, short_name
from atoll.handle import RunHandle
from atoll.names import key_name, native_name, new_run_id, run_id_problem
from atoll.spec import KNOWN, Gpu

HOSTILE = [
    "a",
    "A",
    "x" * 128,
    "x" * 127 + "y",
    "Ünï",
    "a b",
    "-a",
    "a-",
    "1",
    "😀",
    "'; rm -rf /",
    "a.b",
    "a_b",
    "%",
    "CON",
]


def test_new_ids_are_valid_and_differ():
    ids = {new_run_id() for _ in range(500)}
    assert len(ids) == 500
    assert all(run_id_problem(run_id) is None for run_id in ids)


@pytest.mark.parametrize("bad", ["", "a/b", ".", "..", "a\nb", "a\\b", " a", "x" * 129, None, 3, "\x00"])
def test_bad_run_ids_are_refused(bad):
    assert run_id_problem(bad) is not None


def test_hostile_names_become_valid_and_distinct_native_names():
    names = [native_name(run_id, "s3://a") for run_id in HOSTILE]
    assert len(set(names)) == len(HOSTILE)
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{0,61}[a-z0-9]", name) for name in names)


@given(st.text(min_size=1, max_size=128), st.integers(24, 63), st.integers(0, 8))
def test_native_names_fit_whatever_the_limit(run_id, limit, reserve):
    name = native_name(run_id, "store", limit=limit, reserve=reserve)
    assert len(name) <= limit - reserve
    assert re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", name)


def test_one_id_in_two_stores_has_two_native_names():
    assert native_name("a", "s3://x") != native_name("a", "s3://y")


def test_key_names_are_single_parts_and_distinct():
    names = [key_name(run_id) for run_id in HOSTILE]
    assert len(set(names)) == len(HOSTILE)
    assert not any("/" in name or name in (".", "..") for name in names)


@given(
    st.sampled_from(["local", "hf_jobs"]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1),
    st.integers(1, 10**6),
)
def test_a_handle_survives_text(executor, scope, native_id, replicas):
    handle = RunHandle(executor, scope, native_id, replicas)
    assert RunHandle.parse(str(handle)) == handle
    assert "\n" not in str(handle)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        "local://h/x",
        "local://h/?replicas=2",
        "local://h/x?replicas=0",
        "://a/b?replicas=1",
        "local://[",
        f"local://h/x?replicas={'9' * 5000}",
    ],
)
def test_what_is_no_handle_is_refused(bad):
    with pytest.raises(ConfigError, match=re.escape(f"`{bad}`")):
        RunHandle.parse(bad)


@pytest.mark.parametrize(
    ("text", "gpu"), [("H100", Gpu("H100")), ("h100:8", Gpu("H100", 8)), ("a100_80gb:2", Gpu("A100-80GB", 2))]
)
def test_gpus_are_read_by_name_and_count(text, gpu):
    assert Gpu.parse(text) == gpu
    assert Gpu.parse(str(gpu)) == gpu


def test_an_unknown_gpu_is_refused_with_what_may_be_meant():
    with pytest.raises(UnknownName, match=r"`H10O`.*`H100`\?"):
        Gpu.parse("H10O:8")
    for bad in ("H100:0", "H100:x", "H100:-1"):
        with pytest.raises(ValueError, match=re.escape(f"`{bad.partition(':')[2]}`")):
            Gpu.parse(bad)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("Tesla T4", "T4"),
        ("Something New", "Something New"),
    ],
)
def test_product_names_become_the_names_people_use(product, name):
    assert short_name(product) == name


def test_devices_are_shared_without_overlap():
    devices = [Device(str(i), "L4") for i in range(6)]
    assert share(Gpu("L4", 2), 3, devices) == ["0,1", "2,3", "4,5"]
    assert share(Gpu("any", 3), 2, devices) == ["0,1,2", "3,4,5"]
    refused = share(Gpu("H100"), 1, devices)
    assert isinstance(refused, str)
    assert "H100" in refused
    assert "any" in KNOWN
