"""`atoll doctor sagemaker`: checks whether a launch from this machine would work. Each check only reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from atoll.errors import AtollError, AuthError, RunNotFound
from atoll.executors.base import Check
from atoll.executors.sagemaker.client import AwsClient
from atoll.executors.sagemaker.errors import EXECUTOR
from atoll.executors.sagemaker.logs import GROUP
from atoll.executors.sagemaker.machines import CPU_INSTANCE_TYPE, GPU_INSTANCE_TYPE
from atoll.executors.sagemaker.settings import JobSettings
from atoll.validation import settings_hint

_SOON = timedelta(hours=1)


def setup_checks(client: AwsClient, settings: JobSettings) -> list[Check]:
    """Region, credentials and their expiry, role, buckets, quotas, and the read calls that a run makes."""
    if problem := client.region_problem():
        return [Check("region", False, problem, settings_hint(EXECUTOR), is_input=True)]
    found = [Check("region", True, client.region or "the one of the given client")]
    if not client.may_use_sdk:
        return [*found, *_checks_without_sdk(client, settings)]
    try:
        identity = client.call("sts", "get_caller_identity", "doctor", "caller identity")
    except AtollError as exc:
        return [*found, Check("credentials", False, exc.message, exc.hint or "")]
    found.append(Check("credentials", True, f"{identity['Arn']}; {_expiry(client)}"))
    found.append(_role(client, settings.role_arn, str(identity["Account"])))
    found += _buckets(client, settings)
    machines = (settings.instance_type or GPU_INSTANCE_TYPE, settings.cpu_instance_type or CPU_INSTANCE_TYPE)
    found += [_quota(client, name) for name in dict.fromkeys(machines)]
    found += _calls(client)
    return found


def _checks_without_sdk(client: AwsClient, settings: JobSettings) -> Iterator[Check]:
    """The checks that need no other service than those whose clients the caller gave."""
    found = (_role_form(settings.role_arn), None if settings.output_s3_path else _no_output())
    yield from (check for check in found if check is not None)
    yield from _calls(client)


def _expiry(client: AwsClient) -> str:
    """When the credentials expire, as far as this machine knows."""
    credentials = client.session.get_credentials()
    end: datetime | None = getattr(credentials, "_expiry_time", None)
    if end is None:
        token = getattr(credentials, "token", None)
        return "temporary keys with an unknown expiry" if token else "keys that do not expire"
    left = end - datetime.now(UTC)
    warning = "; to wait for a longer run you must log in again" if left < _SOON else ""
    return f"expire at {end:%Y-%m-%d %H:%M} UTC, in {int(left.total_seconds() // 60)} min{warning}"


def _role_form(role_arn: str) -> Check | None:
    """What is wrong with the setting itself."""
    if not role_arn:
        return Check("role", False, "role_arn is not set", "set it to the role of docs/sagemaker.md", is_input=True)
    parts = role_arn.split(":")
    if len(parts) < 6 or not parts[5].startswith("role/"):
        hint = "arn:aws:iam::ACCOUNT:role/NAME"
        return Check("role", False, f"`{role_arn}` is not the ARN of a role", hint, is_input=True)
    return None


def _no_output() -> Check:
    return Check("bucket", False, "output_s3_path is not set", "set it to s3://BUCKET/PREFIX", is_input=True)


def _role(client: AwsClient, role_arn: str, account: str) -> Check:
    if (problem := _role_form(role_arn)) is not None:
        return problem
    if (owner := role_arn.split(":")[4]) != account:
        hint = "a launcher can pass only roles of its own account"
        return Check("role", False, f"`{role_arn}` is of account {owner}, the credentials are of {account}", hint)

    def read() -> Check:
        client.call("iam", "get_role", "doctor", "role", RoleName=role_arn.rpartition("/")[2])
        return Check("role", True, role_arn)

    return _checked("role", read, if_denied=f"{role_arn}; not readable with these credentials, which is no problem")


def _buckets(client: AwsClient, settings: JobSettings) -> Iterator[Check]:
    if not settings.output_s3_path:
        yield _no_output()
    paths = [path for path in (settings.output_s3_path, settings.checkpoint_s3_uri) if path]
    for bucket in dict.fromkeys(path.partition("://")[2].partition("/")[0] for path in paths):

        def read(bucket: str = bucket) -> Check:
            client.call("s3", "head_bucket", "doctor", f"bucket `{bucket}`", Bucket=bucket)
            return Check("bucket", True, f"{bucket} answers from here")

        yield _checked("bucket", read)


def _quota(client: AwsClient, instance_type: str) -> Check:
    """How many such machines training jobs may use at once, if Service Quotas lists it."""
    wanted = f"{instance_type} for training job usage"
    name = f"quota {instance_type}"

    def read() -> Check:
        more: dict[str, Any] = {}
        while True:
            page = client.call(
                "service-quotas", "list_service_quotas", "doctor", "quotas", ServiceCode="sagemaker", **more
            )
            for quota in page.get("Quotas", []):
                if quota.get("QuotaName") == wanted:
                    most = int(quota["Value"])
                    hint = "" if most else f"ask for more of `{wanted}` in Service Quotas"
                    return Check(name, most > 0, f"{most} at once", hint)
            if not page.get("NextToken"):
                return Check(name, True, "Service Quotas does not list it")
            more = {"NextToken": page["NextToken"]}

    return _checked(name, read, if_denied="not readable with these credentials, which is no problem")


def _calls(client: AwsClient) -> Iterator[Check]:
    def jobs() -> Check:
        client.call("sagemaker", "list_training_jobs", "doctor", "training jobs", MaxResults=1)
        return Check("jobs", True, "training jobs can be listed")

    def logs() -> Check:
        try:
            client.call("logs", "describe_log_streams", "doctor", "logs", logGroupName=GROUP, limit=1)
        except RunNotFound:
            return Check("logs", True, f"{GROUP} does not exist yet: no training job has run in this region")
        return Check("logs", True, f"{GROUP} can be read")

    yield _checked("jobs", jobs)
    if client.may_use_sdk or client.is_given("logs"):
        yield _checked("logs", logs)


def _checked(name: str, read: Callable[[], Check], *, if_denied: str = "") -> Check:
    try:
        return read()
    except AuthError as exc:
        return Check(name, True, if_denied) if if_denied else Check(name, False, exc.message, exc.hint or "")
    except AtollError as exc:
        return Check(name, False, exc.message, exc.hint or "")
