"""Clients of the peer that are not boto3's, as a user may inject them: plain HTTP, and errors of their own class."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

CALLS: Mapping[str, tuple[str, ...]] = {
    "sagemaker_client": (
        "create_training_job",
        "describe_training_job",
        "list_training_jobs",
        "stop_training_job",
        "list_tags",
        "add_tags",
    ),
    "logs_client": ("describe_log_streams", "get_log_events"),
}
_TARGETS = {"sagemaker_client": ("sagemaker", "SageMaker"), "logs_client": ("logs", "Logs_20140328")}


class PlainError(Exception):
    """Has a `response` as errors of AWS clients have, and is no class of botocore."""

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__(message)
        self.response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}


class PlainClient:
    """The calls of one service, each a method."""

    def __init__(self, keyword: str) -> None:
        self._service, self._target = _TARGETS[keyword]
        for call in CALLS[keyword]:
            setattr(self, call, self._method("".join(word.capitalize() for word in call.split("_"))))

    def _method(self, operation: str) -> Callable[..., dict[str, Any]]:
        def call(**request: Any) -> dict[str, Any]:
            return self._send(operation, request)

        return call

    def _send(self, operation: str, request: Mapping[str, Any]) -> dict[str, Any]:
        scope = f"peer-key/20250101/{os.environ['AWS_REGION']}/{self._service}/aws4_request"
        headers = {
            "Content-Type": "application/x-amz-json-1.1",
            "X-Amz-Target": f"{self._target}.{operation}",
            "Authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0",
        }
        sent = Request(os.environ["AWS_ENDPOINT_URL"], json.dumps(request).encode(), headers)
        try:
            with urlopen(sent) as answer:
                return _with_times(json.load(answer))
        except HTTPError as exc:
            found = json.load(exc)
            code = str(found.get("__type", "")).rpartition("#")[2]
            raise PlainError(code, str(found.get("message", "")), exc.code) from None


def plain_clients() -> dict[str, Any]:
    """Constructor arguments of `SageMakerExecutor`."""
    return {keyword: PlainClient(keyword) for keyword in CALLS}


def _with_times(value: Any) -> Any:
    """Seconds in fields that end with `Time` become times, as in the answers of boto3."""
    if isinstance(value, dict):
        return {
            name: datetime.fromtimestamp(each, UTC)
            if name.endswith("Time") and isinstance(each, int | float)
            else _with_times(each)
            for name, each in value.items()
        }
    return [_with_times(each) for each in value] if isinstance(value, list) else value
