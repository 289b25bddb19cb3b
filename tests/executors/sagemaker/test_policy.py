"""The policies in the docs allow exactly the calls that are made: no more, and no fewer."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

import atoll
from atoll.context import RunContext
from atoll.errors import Conflict, SubmitError
from atoll.spec import Placement
from repository import DOCS

pytestmark = pytest.mark.docs

PAGE = DOCS / "sagemaker.md"
WITH_A_CREATE = {"iam:PassRole", "sagemaker:AddTags"}
"""Checked by AWS inside CreateTrainingJob; never calls of their own."""
FREE = {"sts:GetCallerIdentity"}
"""Needs no permission."""


def policies() -> list[dict[str, Any]]:
    found = [json.loads(text) for text in re.findall(r"^```json\n(.*?)^```", PAGE.read_text(), re.M | re.S)]
    assert len(found) == 2
    return found


def actions(policy: dict[str, Any], *, platform: bool) -> set[str]:
    statements = [each for each in policy["Statement"] if each["Sid"].startswith("Platform") is platform]
    return {action for statement in statements for action in statement["Action"]}


@pytest.fixture
def bucket(peer) -> str:
    import boto3

    admin = {"aws_access_key_id": "admin-key", "aws_secret_access_key": "-"}
    boto3.client("s3", **admin).create_bucket(Bucket="bucket")
    boto3.client("iam", **admin).create_role(RoleName="replicas", AssumeRolePolicyDocument="{}")
    yield "s3://bucket"
    boto3.client("iam", **admin).delete_role(RoleName="replicas")


def test_recorded_calls_are_the_policies(peer, executor, bucket, store):
    made = executor()
    assert all(check.ok for check in made.diagnose()), made.diagnose()
    run = atoll.launch(
        "atoll.testing.contract_jobs:act",
        replicas=2,
        on=made,
        store=f"{bucket}/exp",
        args={"parts": ["return", "raise"]},
    )
    run.wait(60)
    assert [outcome.exit_code for outcome in run.result().outcomes] == [0, 1]
    list(made.logs(run.handle, 1))
    run.store.delete("left-over")
    peer.engine.admits.clear()
    context = RunContext("undone", f"{bucket}/exp")
    undone = made.plan(context, Placement(replicas=2))
    peer.engine.quota = 1
    with pytest.raises(SubmitError):
        made.submit(undone)
    peer.engine.quota = None
    made.cancel(made.submit(undone))
    foreign = copy.deepcopy(made.plan(RunContext("foreign", f"{bucket}/exp"), Placement()))
    body = {name: value for name, value in foreign.request["jobs"][0].items() if name != "Environment"}
    peer.engine.seed(body | {"Tags": []}, "InProgress", "Training")
    with pytest.raises(Conflict):
        made.submit(foreign)
    launcher, replica = policies()
    assert peer.callers["peer-key"] - FREE == actions(launcher, platform=False) - WITH_A_CREATE
    assert peer.callers["role-key"] <= actions(replica, platform=False)
    assert {"s3:GetObject", "s3:PutObject", "s3:ListBucket"} <= peer.callers["role-key"]


def test_the_platforms_part_is_what_the_service_needs_for_logs_and_images():
    assert {action.partition(":")[0] for action in actions(policies()[1], platform=True)} == {"logs", "ecr"}


def test_passing_the_role_is_limited_to_sagemaker():
    statement = next(each for each in policies()[0]["Statement"] if each["Sid"] == "PassRole")
    assert statement["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
    assert statement["Resource"] != "*"
