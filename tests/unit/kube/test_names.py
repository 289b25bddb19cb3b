"""Names, labels and annotations of Kubernetes objects."""

from __future__ import annotations

import re

import pytest

from atoll.context import RunContext
from atoll.kube import names
from atoll.testing.executor_contract.plan import HOSTILE

DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?\Z")


@pytest.mark.parametrize("replicas", [1, 2, 11, 100, 100_000])
@pytest.mark.parametrize("launch", [1, 12])
def test_the_name_of_every_pod_host_is_one_dns_label(replicas, launch):
    for run_id in HOSTILE:
        name = names.job_name(RunContext(run_id, "s3://b/x", launch), replicas)
        assert DNS_LABEL.match(f"{name}-{replicas - 1}"), name


def test_names_are_distinct_for_runs_stores_and_launches():
    runs = [RunContext(run_id, "s3://b/x") for run_id in HOSTILE]
    others = [RunContext(HOSTILE[0], "s3://b/y"), RunContext(HOSTILE[0], "s3://b/x", 2)]
    found = [names.job_name(context, 4) for context in [*runs, *others]]
    assert len(set(found)) == len(found)


def test_a_plain_run_id_is_its_own_label_and_others_get_a_safe_form():
    assert names.run_label("exp-7.a_b") == "exp-7.a_b"
    for run_id in HOSTILE:
        assert LABEL.match(names.run_label(run_id)), run_id


def test_the_annotations_bring_the_context_back():
    for context in (RunContext(HOSTILE[-2], "s3://b/x?region=r", 3), RunContext("a", "file:///x")):
        assert names.context_of({"metadata": {"annotations": names.job_annotations(context)}}) == context


@pytest.mark.parametrize("job", [{}, {"metadata": {}}, {"metadata": {"annotations": {names.RUN_ID: "a"}}}])
def test_a_job_of_someone_else_has_no_context(job):
    assert names.context_of(job) is None


@pytest.mark.parametrize(
    ("key", "is_one"),
    [("a", True), ("example.com/a_b", True), ("nvidia.com/gpu", True), ("/a", False), ("a/", False), ("A.com/x", False),
     ("a b", False), ("x" * 64, False), ("", False), (3, False)],
)  # fmt: skip
def test_label_keys(key, is_one):
    assert names.is_label_key(key) is is_one


def test_reserved_keys():
    assert all(map(names.is_ours, [names.TOKEN, names.RUN, names.INDEX, names.MANAGED_BY, "job-name"]))
    assert not names.is_ours("team")
