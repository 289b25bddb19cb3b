"""Addresses of hosts, and which ranks each host gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.executors.ssh.hosts import Host, blocks, parsed, repeated


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu1", Host("gpu1")),
        ("me@gpu2:2222", Host("gpu2", "me", 2222)),
        ("10.0.0.7:22", Host("10.0.0.7", None, 22)),
        ("a_b.example.com", Host("a_b.example.com")),
        ("[fd00::7]:2222", Host("fd00::7", None, 2222)),
        ("me@[fe80::1%eth0]", Host("fe80::1%eth0", "me")),
    ],
)
def test_an_address_reads_back(text: str, host: Host) -> None:
    assert parsed(text) == host
    assert str(host) == text


@pytest.mark.parametrize(
    "text",
    ["", " ", "-oProxyCommand=x", "me@-x", "-l@gpu1", "gpu1:0", "gpu1:65536", "gpu1:x", "gpu1:", "a b", "a;b", "a,b",
     "$(x)", "a\nb", "ssh://gpu1", "me@you@gpu1", "fd00::7", "gpu/1", "ü", "x" * 300, None, 5, ["gpu1"]],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: object) -> None:
    assert parsed(text) is None


@given(st.text(max_size=40))
def test_no_text_becomes_an_option_or_a_second_word(text: str) -> None:
    host = parsed(text)
    assert host is None or not any(part.startswith("-") or " " in part for part in (host.name, host.user or "x"))


@given(st.integers(1, 200), st.integers(1, 40))
def test_blocks_cover_every_replica_in_order_and_differ_by_one(replicas: int, hosts: int) -> None:
    found = blocks(replicas, hosts)
    assert [rank for block in found for rank in block] == list(range(replicas))
    sizes = [len(block) for block in found]
    assert max(sizes) - min(sizes) <= 1
    assert len(found) == min(replicas, hosts)
    assert sizes == sorted(sizes, reverse=True)


def test_an_address_that_is_listed_twice_is_found() -> None:
    assert repeated(["a", "b", "a", "c", "b"]) == ["a", "b"]
    assert repeated(["a", "me@a", "a:22"]) == []
