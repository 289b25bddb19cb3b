"""`docs/appwrapper.md`: its settings work, it has every setting, and it quotes what Atoll really says."""

from __future__ import annotations

import inspect
import re
import tomllib
from dataclasses import fields

import pytest

from atoll.context import RunContext
from atoll.executors.appwrapper import reading
from atoll.executors.appwrapper.request import wrapper_request
from atoll.executors.appwrapper.role import role_text
from atoll.executors.appwrapper.settings import AppWrapperSettings
from atoll.kube.appwrapper import DIALECTS
from atoll.kube.pod_settings import PodSettings
from atoll.spec import Placement
from atoll.validation import check_settings
from repository import DOCS

pytestmark = pytest.mark.docs

PAGE = (DOCS / "appwrapper.md").read_text()
TABLES = [tomllib.loads(text) for text in re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)]
SOURCE = re.sub(r'"\s*\n\s*f?"', "", inspect.getsource(reading))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: ",".join(table["executors"]["appwrapper"]))
def test_the_settings_of_the_page_are_accepted(table):
    given = table["executors"]["appwrapper"]
    settings = AppWrapperSettings(**check_settings("appwrapper", given, AppWrapperSettings))
    context = RunContext("exp", "s3://bucket/exp")
    _, problems, _ = wrapper_request(context, Placement(replicas=2), settings, namespace="n", version="1")
    assert problems == []


def test_the_page_has_every_setting_of_its_own():
    own = {field.name for field in fields(AppWrapperSettings)} - {field.name for field in fields(PodSettings)}
    table = PAGE.partition("## Settings")[2].partition("## Permissions")[0]
    assert {name for name in own if f"`{name}`" not in table} == set()


def test_the_page_has_every_dialect():
    assert {each.api_version for each in DIALECTS.values() if f"`{each.api_version}`" not in PAGE} == set()


def test_the_role_of_the_page_is_the_one_that_doctor_prints():
    (quoted,) = [each for each in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S) if "kind: Role\n" in each]
    printed = role_text("team-a", AppWrapperSettings(image="i"))
    assert printed.startswith(quoted)
    assert printed.removeprefix(quoted).startswith("# Add these")


@pytest.mark.parametrize(
    "words",
    [
        "has not looked at it yet",
        "the AppWrapper is suspended: somebody holds it back",
        "there is no Job: the controller is about to create it, or somebody has deleted it",
        "the AppWrapper was suspended, and its pods end",
        "the AppWrapper has failed",
        "no command watched when it deleted the pods",
        "which this version of Atoll does not know",
        "Kubernetes has no such AppWrapper",
    ],
)
def test_the_page_quotes_what_status_says(words):
    assert words in PAGE
    assert words in SOURCE
