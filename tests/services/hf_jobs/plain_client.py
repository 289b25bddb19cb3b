"""A client of the peer that is not `huggingface_hub`'s, as a user may inject it: plain HTTP, and errors of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

CALLS: Mapping[str, tuple[str, ...]] = {
    "client": ("run_job", "list_jobs", "inspect_job", "cancel_job", "fetch_job_logs", "list_jobs_hardware", "whoami"),
}
_NAMES = {"env": "environment", "timeout": "timeoutSeconds", "image": "dockerImage"}


class PlainError(Exception):
    """Has a `response` with a status, and is no class of the SDK."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.response = SimpleNamespace(status_code=status, headers={})


class PlainClient:
    """The methods of `HfApi` that Atoll calls."""

    def __init__(self) -> None:
        self.endpoint = os.environ["HF_ENDPOINT"]

    def run_job(self, *, namespace: str, **given: Any) -> Any:
        body = {_NAMES.get(name, name): value for name, value in given.items()}
        return _job(self._send("POST", f"/api/jobs/{namespace}", {"arguments": [], **body}))

    def list_jobs(self, *, namespace: str, labels: Mapping[str, str], status: Any = ()) -> Iterator[Any]:
        wanted = [("label", f"{name}={value}") for name, value in labels.items()]
        query = urlencode([*wanted, *(("stage", stage) for stage in status)])
        yield from map(_job, self._send("GET", f"/api/jobs/{namespace}?{query}"))

    def inspect_job(self, *, job_id: str, namespace: str) -> Any:
        return _job(self._send("GET", f"/api/jobs/{namespace}/{job_id}"))

    def cancel_job(self, *, job_id: str, namespace: str) -> None:
        self._send("POST", f"/api/jobs/{namespace}/{job_id}/cancel", {})

    def fetch_job_logs(self, *, job_id: str, namespace: str, follow: bool = False) -> list[str]:
        with self._open("GET", f"/api/jobs/{namespace}/{job_id}/logs") as answer:
            events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: ")]
        return [event["data"] for event in events if not event["data"].startswith("===== Job started")]

    def list_jobs_hardware(self) -> list[Any]:
        return [
            SimpleNamespace(name=each["name"], unit_cost_usd=each["unitCostUSD"], unit_label=each["unitLabel"])
            for each in self._send("GET", "/api/jobs/hardware")
        ]

    def whoami(self) -> dict[str, Any]:
        return dict(self._send("GET", "/api/whoami-v2"))

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        with self._open(method, path, body) as answer:
            return json.load(answer)

    def _open(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {os.environ['HF_TOKEN']}"}
        try:
            return urlopen(Request(self.endpoint + path, data, headers, method=method))
        except HTTPError as exc:
            with exc:
                raise PlainError(exc.code, json.load(exc)["error"]) from None


def plain_client() -> dict[str, Any]:
    """Constructor arguments of `HFJobsExecutor`."""
    return {"client": PlainClient()}


def _job(answer: Mapping[str, Any]) -> Any:
    times = {
        ours: datetime.fromisoformat(answer[theirs]) if answer.get(theirs) else None
        for ours, theirs in (("created_at", "createdAt"), ("started_at", "startedAt"), ("finished_at", "finishedAt"))
    }
    status = SimpleNamespace(**answer["status"])
    plain = {name: answer[name] for name in ("id", "labels", "environment", "flavor")}
    return SimpleNamespace(**plain, **times, status=status)
