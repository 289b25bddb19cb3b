"""The peer on a socket: training-job calls go to our engine, everything else (S3, CloudWatch Logs, IAM, STS) to moto.

Point any AWS client at it with AWS_ENDPOINT_URL; `environment()` has all it takes. What it does not model: IAM and
PassRole, images (the container's `python` is this one, without a /opt/ml of its own), input channels, checkpoint
upload, warm pools, capacity waits, RetryStrategy. Blank lines reach CloudWatch as line ends.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from threading import Condition, Lock, RLock, Thread
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

from services.sagemaker.engine import ACCOUNT, Engine, from_wire, now_ms
from services.sagemaker.faults import Empty, Faults, Refusal
from services.sagemaker.job import Tempo

GROUP = "/aws/sagemaker/TrainingJobs"
REGION = "us-east-1"
_SCOPE = re.compile(r"Credential=[^/]+/\d+/[^/]+/([a-z0-9-]+)/aws4_request")
_WORDS = {200: "200 OK", 400: "400 Bad Request", 500: "500 Internal Server Error"}
Answer = tuple[list[bytes], Any]
"""A body, and the status and headers for `start_response`."""
_S3 = {"GET": "GetObject", "PUT": "PutObject", "DELETE": "DeleteObject", "HEAD": "GetObject"}


class Peer:
    """Serves on a free port of this machine until `close`."""

    def __init__(self, *, port: int = 0, tempo: Tempo | None = None, log_lag_s: float = 0.0) -> None:
        import moto.server
        from moto.logs import logs_backends

        self.faults = Faults()
        self.calls: Counter[tuple[str, str]] = Counter()
        """(service, operation) -> how often it was called."""
        self.callers: dict[str, set[str]] = defaultdict(set)
        """Access key -> the IAM actions it used. Containers have a key of their own."""
        self.quotas: dict[str, float] = {}
        self.empty_pages = 0
        """How many pages of a log that is read forwards come without events, though there are some."""
        self._moto = moto.server.DomainDispatcherApplication(moto.server.create_backend_app)
        self._moto_lock = RLock()  # moto's `If-None-Match` is not atomic between threads
        self._count_lock = Lock()
        self.log = LogGroup(logs_backends[ACCOUNT][REGION], self._moto_lock, log_lag_s)
        self.engine = Engine(self.log, region=REGION, tempo=tempo)
        self._server = make_server("127.0.0.1", port, self._wsgi, threaded=True, request_handler=_Quiet)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "peer-key",
            "AWS_SECRET_ACCESS_KEY": "peer-secret",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def reset(self) -> None:
        """As new: nothing runs, nothing fails."""
        self.faults.heal()
        self.engine.close()
        self.engine = Engine(self.log, region=REGION, tempo=self.engine.tempo)
        self.calls.clear()
        self.callers.clear()
        self.quotas.clear()
        self.empty_pages = 0
        self.log.lag_s = 0.0
        self.log.forget("")

    def close(self) -> None:
        self.reset()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.log.close()

    # ── the wire ────────────────────────────────────────────────────────────────────────────────────────────────

    def _wsgi(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        service, operation = _named(environ, body)
        with self._count_lock:
            self.calls[service, operation] += 1
            self.callers[_caller(environ)].add(f"{service}:{operation}")
        try:
            request = from_wire(body) if service == "sagemaker" else {}
            with self.faults.around(operation, str(request.get("TrainingJobName", ""))):
                answer, head = self._answer(service, operation, request, environ, body)
        except Refusal as refusal:
            answer, head = _refused(service, refusal)
        except Empty:
            answer, head = _json({"TrainingJobSummaries": []})
        start_response(*head)  # only now: a fault after the effect replaces the answer
        return answer

    def _answer(
        self, service: str, operation: str, request: dict[str, Any], environ: dict[str, Any], body: bytes
    ) -> Answer:
        if service == "sagemaker":
            return _json(self.engine.answer(operation, request))
        if service == "servicequotas":
            return _json({"Quotas": [{"QuotaName": name, "Value": value} for name, value in self.quotas.items()]})
        if operation == "GetLogEvents" and self.empty_pages and from_wire(body).get("startFromHead"):
            self.empty_pages -= 1
            return _json(_empty_page(from_wire(body), self.empty_pages))
        return self._by_moto(environ, body)

    def _by_moto(self, environ: dict[str, Any], body: bytes) -> Answer:
        sent: list[Any] = []
        environ["wsgi.input"] = io.BytesIO(body)
        with self._moto_lock:
            answer = list(self._moto(environ, lambda *head: sent.append(head[:2])))
        return answer, sent[-1]


class LogGroup:
    """The log group of all training jobs, in moto. With `lag_s`, what is written is seen that much later."""

    def __init__(self, backend: Any, lock: Any, lag_s: float) -> None:
        self.lag_s = lag_s
        self._backend, self._lock = backend, lock
        self._changed = Condition()
        self._late: list[tuple[float, Any]] = []
        self._is_closed = False
        with lock:
            if not any(group.name == GROUP for group in backend.groups.values()):
                backend.create_log_group(GROUP, {})
        self._thread = Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def open(self, stream: str) -> None:
        self._do(lambda: self._backend.create_log_stream(GROUP, stream))

    def write(self, stream: str, line: str) -> None:
        event = {"timestamp": now_ms(), "message": line}
        self._do(lambda: self._backend.put_log_events(GROUP, stream, [event]))

    def forget(self, label: str) -> None:
        """Delete the streams whose names begin so."""
        with self._lock:
            streams = self._backend.groups[GROUP].streams
            for name in [name for name in streams if name.startswith(label)]:
                del streams[name]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _do(self, act: Any) -> None:
        if self.lag_s <= 0:
            with self._lock:
                act()
            return
        with self._changed:
            self._late.append((time.monotonic() + self.lag_s, act))
            self._changed.notify()

    def _deliver(self) -> None:
        while True:
            with self._changed:
                while not self._late and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                due_at, act = self._late[0]
                if (left := due_at - time.monotonic()) > 0:
                    self._changed.wait(left)
                    continue
                self._late.pop(0)
            with self._lock:
                act()


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any, **__: Any) -> None:
        pass


def _named(environ: dict[str, Any], body: bytes) -> tuple[str, str]:
    """Which operation of which service a request is, as IAM calls them."""
    found = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    service = found[1] if found else "s3"
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        return service, str(target).rpartition(".")[2]
    if action := re.search(rb"(?:^|&)Action=(\w+)", body):
        return service, action[1].decode()
    if service != "s3":
        return service, environ["REQUEST_METHOD"]
    is_bucket = environ["PATH_INFO"].strip("/").count("/") == 0
    if is_bucket and environ["REQUEST_METHOD"] in ("GET", "HEAD"):
        return service, "ListBucket"
    is_delete = environ["QUERY_STRING"].startswith("delete")
    return service, "DeleteObject" if is_delete else _S3.get(environ["REQUEST_METHOD"], environ["REQUEST_METHOD"])


def _caller(environ: dict[str, Any]) -> str:
    found = re.search(r"Credential=([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    return found[1] if found else ""


def _empty_page(request: dict[str, Any], number: int) -> dict[str, Any]:
    """A page without events whose token is new, as CloudWatch gives them out now and then: the place is the same."""
    index = int(request.get("nextToken", "f/-1")[2:])
    return {"events": [], "nextForwardToken": f"f/{index:0{60 + number}d}", "nextBackwardToken": f"b/{index:056d}"}


def _refused(service: str, refusal: Refusal) -> Answer:
    if service not in ("iam", "sts", "s3"):
        return _json({"__type": refusal.code, "message": refusal.message}, status=refusal.status)
    text = (
        f"<ErrorResponse><Error><Code>{refusal.code}</Code><Message>{refusal.message}</Message></Error></ErrorResponse>"
    )
    return [text.encode()], (_WORDS[refusal.status], [("Content-Type", "text/xml")])


def _json(body: dict[str, Any], *, status: int = 200) -> Answer:
    data = json.dumps(body).encode()
    return [data], (
        _WORDS[status],
        [("Content-Type", "application/x-amz-json-1.1"), ("Content-Length", str(len(data)))],
    )
