"""`docs/kubernetes.md`: its settings work, it has every setting, and it quotes what Atoll really says."""

from __future__ import annotations

import inspect
import re
import tomllib
from dataclasses import fields

import pytest

from atoll.context import RunContext
from atoll.kube import connection, errors, gpus, kueue, pod_state, reading
from atoll.kube.request import job_request
from atoll.kube.role import role_text
from atoll.kube.settings import KubernetesSettings
from atoll.runs import queue_limit
from atoll.spec import Placement
from atoll.validation import check_settings
from repository import DOCS

pytestmark = pytest.mark.docs

PAGE = (DOCS / "kubernetes.md").read_text()
BOTH = PAGE + (DOCS / "kueue.md").read_text()
TABLES = [tomllib.loads(text) for text in re.findall(r"^```toml\n(.*?)^```", BOTH, re.M | re.S)]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: ",".join(table["executors"]["kubernetes"]))
def test_the_settings_of_the_page_are_accepted(table):
    given = table["executors"]["kubernetes"]
    settings = KubernetesSettings(**check_settings("kubernetes", {"image": "i", **given}, KubernetesSettings))
    placement = Placement(replicas=2, **({"gpu": "H100:8"} if "efa" in given else {}))
    context = RunContext("exp", "s3://bucket/exp")
    index = {} if settings.bootstrap is None else {"pip_index": "https://packages.invalid/simple"}
    made = KubernetesSettings(**{**vars(settings), **index})
    _, problems, _ = job_request(context, placement, made, namespace="n", version="1")
    assert problems == []


@pytest.mark.parametrize("name", [field.name for field in fields(KubernetesSettings)])
def test_the_page_has_every_setting(name):
    assert f"`{name}`" in PAGE.partition("## Settings")[2].partition("### GPUs")[0]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (connection, "cannot find the cluster in"),
        (connection, "cannot log in to the cluster"),
        (errors, "no answer from the cluster"),
        (pod_state, "the image has no Atoll, or one that is too old"),
        (pod_state, "still running after its limit"),
        (pod_state, "the scheduler has not looked at this pod yet"),
        (reading, "the Job is suspended"),
        (reading, "the Job counts this rank as failed, and its pod was deleted"),
        (reading, "its Job was removed; this pod goes on without it"),
        (errors, "no safe connection"),
        (queue_limit, "cancelled because replicas waited for longer than their limit"),
        (queue_limit, "cancelled because replicas can never start"),
        (reading, "Kubernetes has no such Job"),
        (reading, "starts again after: "),
    ],
)
def test_a_symptom_of_the_page_is_what_atoll_says(module, words):
    assert words in inspect.getsource(module)
    assert words in PAGE


@pytest.mark.parametrize(
    "words",
    [
        "Kueue has not seen it yet",
        "Kueue has made no Workload for it",
        "in line in queue",
        "is full: ",
        "never fits in queue",
        "of lower priority",
        "doesn't exist",
        "is inactive",
        "waits for its admission checks",
        "preempted for ",
        "evicted by Kueue",
        "admitted by queue",
        "Kueue ended it at its time limit",
        "Kueue gave up: the pods were never all ready in time",
        "Kueue ended it for good",
        "first in line",
    ],
)
def test_the_page_of_kueue_quotes_what_atoll_says(words):
    assert words in inspect.getsource(kueue)
    assert words in (DOCS / "kueue.md").read_text()


def test_the_page_of_kueue_has_its_lines_of_the_role():
    lines = role_text("team-a", KubernetesSettings(gang="kueue:team-a")).splitlines()
    rules = [line for line in lines if "kueue.x-k8s.io" in line]
    assert len(rules) == 3
    assert "\n".join(rules) in (DOCS / "kueue.md").read_text()


def test_the_page_names_every_selector_of_gpus():
    assert all(f"| `{selector}` |" in PAGE for selector in gpus.SELECTORS if selector != "auto")
