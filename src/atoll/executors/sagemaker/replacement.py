"""Pure: the job that replaces a failed one, its name and its request.

A rank's first job is `LABEL-00002`; the job that replaces it is `LABEL-00002-r1`, then `-r2`. The names follow from the
rank, so two watchers create each job once. Only a job that has failed is replaced, so each job leads to the next one,
and the newest job of a rank is found by name, also if no list contains it yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.context import ATTEMPT, MAX_RESTARTS
from atoll.executors.sagemaker.request import job_name, parsed_name


def following_name(job: Mapping[str, Any]) -> str | None:
    """The name of the job that replaces this one, whether there is such a job or not; None if there can be none.

    A summary, and the description of a service that hides variables, do not say how many restarts there are.
    """
    name = parsed_name(str(job["TrainingJobName"]))
    if job["TrainingJobStatus"] != "Failed" or name is None:
        return None
    variables = job.get("Environment")
    if variables is not None and name.replacement >= int(variables.get(MAX_RESTARTS, 0)):
        return None
    return job_name(name.label, name.rank, name.replacement + 1)


def replacement_body(body: Mapping[str, Any], failed: Mapping[str, Any]) -> dict[str, Any] | None:
    """The request for the job that replaces `failed`; None if there can be none. `body` is the request of its rank.

    The launch token is that of `body`, so a job of this name is recognized. The time limit is what `failed` has left,
    so that all jobs of a rank together keep the limit of the run. Each job has at least one attempt, also if `failed`
    was lost before it could register one.
    """
    name, left_s = following_name(failed), _left_s(failed, body["StoppingCondition"])
    parts = None if name is None else parsed_name(name)
    if parts is None or left_s < 1:
        return None
    stopping = {**body["StoppingCondition"], "MaxRuntimeInSeconds": left_s}
    variables = {**body["Environment"], ATTEMPT: str(parts.replacement)}
    return {**body, "TrainingJobName": name, "StoppingCondition": stopping, "Environment": variables}


def _left_s(job: Mapping[str, Any], asked: Mapping[str, Any]) -> int:
    limit_s = int((job.get("StoppingCondition") or asked)["MaxRuntimeInSeconds"])
    if (used_s := job.get("TrainingTimeInSeconds")) is not None:
        return limit_s - int(used_s)
    began, ended = job.get("TrainingStartTime"), job.get("TrainingEndTime")
    return limit_s if began is None or ended is None else limit_s - int((ended - began).total_seconds())
