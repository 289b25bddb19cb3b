"""`atoll doctor sagemaker`: would a launch work from here? Every check is one harmless call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from atoll.errors import AtollError, AuthError, RunNotFound
from atoll.executors.base import Check
from atoll.executors.sagemaker.client import Gateway
from atoll.executors.sagemaker.logs import GROUP
from atoll.executors.sagemaker.request import JobSettings

_SOON = timedelta(hours=1)


def checks(gateway: Gateway, settings: JobSettings) -> list[Check]:
    """Region, credentials and their end, role, buckets, quota, and the calls a run makes."""
    if not gateway.region:
        hint = "set `region`, or AWS_REGION, or `region` in ~/.aws/config"
        return [Check("region", False, "none is set", hint)]
    found = [Check("region", True, gateway.region)]
    try:
        identity = gateway.ask("sts", "get_caller_identity", "doctor", "who am I")
    except AtollError as exc:
        return [*found, Check("credentials", False, exc.message, exc.hint or "")]
    found.append(Check("credentials", True, f"{identity['Arn']}; {_end(gateway)}"))
    found.append(_role(gateway, settings.role_arn, str(identity["Account"])))
    found += _buckets(gateway, settings)
    found += [_quota(gateway, name) for name in dict.fromkeys([settings.instance_type, settings.cpu_instance_type])]
    found += _calls(gateway)
    return found


def _end(gateway: Gateway) -> str:
    """When the credentials end, as far as the machine knows."""
    credentials = gateway.session.get_credentials()
    end: datetime | None = getattr(credentials, "_expiry_time", None)
    if end is None:
        token = getattr(credentials, "token", None)
        return "temporary keys whose end is not known here" if token else "keys that do not expire"
    left = end - datetime.now(UTC)
    warning = "; a longer run than that cannot be waited for without a new login" if left < _SOON else ""
    return f"expire at {end:%Y-%m-%d %H:%M} UTC, in {int(left.total_seconds() // 60)} min{warning}"


def _role(gateway: Gateway, role_arn: str, account: str) -> Check:
    if not role_arn:
        return Check("role", False, "role_arn is not set", "set it to the role of docs/sagemaker.md")
    parts = role_arn.split(":")
    if len(parts) < 6 or not parts[5].startswith("role/"):
        return Check("role", False, f"`{role_arn}` is not the ARN of a role", "arn:aws:iam::ACCOUNT:role/NAME")
    if parts[4] != account:
        hint = "a launcher can pass only roles of its own account"
        return Check("role", False, f"`{role_arn}` is of account {parts[4]}, and you are in {account}", hint)

    def look() -> Check:
        gateway.ask("iam", "get_role", "doctor", "role", RoleName=role_arn.rpartition("/")[2])
        return Check("role", True, role_arn)

    return _tried("role", look, unseen=f"{role_arn}; it cannot be seen with these credentials, which is no harm")


def _buckets(gateway: Gateway, settings: JobSettings) -> Iterator[Check]:
    if not settings.output_s3_path:
        yield Check("bucket", False, "output_s3_path is not set", "set it to s3://BUCKET/PREFIX")
    paths = [path for path in (settings.output_s3_path, settings.checkpoint_s3_uri) if path]
    for bucket in dict.fromkeys(path.partition("://")[2].partition("/")[0] for path in paths):

        def look(bucket: str = bucket) -> Check:
            gateway.ask("s3", "head_bucket", "doctor", f"bucket `{bucket}`", Bucket=bucket)
            return Check("bucket", True, f"{bucket} answers from here")

        yield _tried("bucket", look)


def _quota(gateway: Gateway, instance_type: str) -> Check:
    """How many such machines training jobs may have at once, where Service Quotas tells."""
    wanted = f"{instance_type} for training job usage"
    name = f"quota {instance_type}"

    def look() -> Check:
        more: dict[str, Any] = {}
        while True:
            page = gateway.ask(
                "service-quotas", "list_service_quotas", "doctor", "quotas", ServiceCode="sagemaker", **more
            )
            for quota in page.get("Quotas", []):
                if quota.get("QuotaName") == wanted:
                    most = int(quota["Value"])
                    hint = "" if most else f"ask for more of `{wanted}` in Service Quotas"
                    return Check(name, most > 0, f"{most} at once", hint)
            if not page.get("NextToken"):
                return Check(name, True, "not told by Service Quotas")
            more = {"NextToken": page["NextToken"]}

    return _tried(name, look, unseen="cannot be seen with these credentials, which is no harm")


def _calls(gateway: Gateway) -> Iterator[Check]:
    def jobs() -> Check:
        gateway.ask("sagemaker", "list_training_jobs", "doctor", "training jobs", MaxResults=1)
        return Check("jobs", True, "training jobs can be listed")

    def logs() -> Check:
        try:
            gateway.ask("logs", "describe_log_streams", "doctor", "logs", logGroupName=GROUP, limit=1)
        except RunNotFound:
            return Check("logs", True, f"{GROUP} is not there yet: no training job has run in this region")
        return Check("logs", True, f"{GROUP} can be read")

    yield _tried("jobs", jobs)
    yield _tried("logs", logs)


def _tried(name: str, look: Callable[[], Check], *, unseen: str = "") -> Check:
    try:
        return look()
    except AuthError as exc:
        return Check(name, True, unseen) if unseen else Check(name, False, exc.message, exc.hint or "")
    except AtollError as exc:
        return Check(name, False, exc.message, exc.hint or "")
