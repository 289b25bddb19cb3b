"""The peer on a socket: the endpoints of Hugging Face Jobs that `huggingface_hub` 2.4.0 calls.

Point a client at it with HF_ENDPOINT and HF_TOKEN (`environment()`), or with `HfApi(endpoint=…, token=…)`. A request to
an endpoint that it does not have is answered with 501 and the name of the endpoint, and is listed in `unimplemented`.

What it does not model: images and Spaces (the container's `python` is this one, with the files of this machine),
volumes, network groups, exposed ports, SSH, metrics, scheduled jobs, uv jobs, resource groups, payment (only 402 on
cue), and rate limits (only on cue). Not checked against the real service: the wording of `status.message`, the limits
of labels, the size of a page, and that SIGTERM precedes SIGKILL at a cancel and at the time limit.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from services.hf_jobs.faults import Empty, Faults, Refusal
from services.hf_jobs.job import Job
from services.hf_jobs.validation import problems

TOKEN = "hf_peer"
NAMESPACES = ("tester", "team")
_JOBS = re.compile(r"/api/jobs/([^/]+)(?:/([^/]+)(?:/(\w+))?)?\Z")
_OPERATIONS = {
    ("POST", False, None): "run",
    ("GET", False, None): "list",
    ("GET", True, None): "inspect",
    ("POST", True, "cancel"): "cancel",
    ("GET", True, "logs"): "logs",
}
_KEEP_ALIVE_S = 0.2


def _machine(name: str, cpus: int, ram: int, price: float, gpu: tuple[str, int, int] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": name,
        "prettyName": name,
        "cpu": f"{cpus} vCPU",
        "ram": f"{ram} GB",
        "ephemeralStorage": "50 GB",
        "unitCostMicroUSD": round(price * 1e6),
        "unitCostUSD": price,
        "unitLabel": "minute",
    }
    if gpu is not None:
        model, count, vram = gpu
        about = {"type": "gpu", "model": model, "quantity": str(count), "vram": f"{vram} GB", "manufacturer": "Nvidia"}
        made["accelerator"] = about
    return made


HARDWARE = [
    _machine("cpu-basic", 2, 16, 0.000167),
    _machine("cpu-upgrade", 8, 32, 0.0005),
    _machine("t4-small", 4, 15, 0.0067, ("T4", 1, 16)),
    _machine("t4-medium", 8, 30, 0.01, ("T4", 1, 16)),
    _machine("l4x1", 8, 30, 0.0133, ("L4", 1, 24)),
    _machine("l4x4", 48, 186, 0.0633, ("L4", 4, 96)),
    _machine("a10g-small", 4, 15, 0.0167, ("A10G", 1, 24)),
    _machine("a10g-large", 12, 46, 0.025, ("A10G", 1, 24)),
    _machine("a100-large", 12, 142, 0.0417, ("A100", 1, 80)),
    _machine("a100x4", 48, 568, 0.1667, ("A100", 4, 320)),
    _machine("h200", 23, 256, 0.0833, ("H200", 1, 141)),
    _machine("h200x8", 184, 2048, 0.6667, ("H200", 8, 1128)),
]


class Peer:
    """Serves on a free port of this machine until `close`."""

    def __init__(self, *, port: int = 0, stop_grace_s: float = 30.0) -> None:
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        """Operation -> how many requests asked for it."""
        self.unimplemented: list[str] = []
        self.admits = Event()
        """While clear, jobs stay SCHEDULING."""
        self._stop_grace_s = stop_grace_s
        self._lock = Lock()
        self.jobs: dict[str, Job] = {}
        self._threads: list[Thread] = []
        self._started: list[Job] = []
        self._as_new()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"peer": self}))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def _as_new(self) -> None:
        self.admits.set()
        self.page_size = 50
        self.hardware: list[dict[str, Any]] = list(HARDWARE)
        self.list_lag = 0
        """How many lists do not show a new job."""
        self.old_stages: dict[str, str] = {}
        """Job id -> the stage that lists still show; a lookup shows the true one."""
        self.date_offset_s = 0.0
        """How wrong the Date header is."""
        self.log_cut_every: int | None = None
        """The n-th connection to a log is cut after n times this many events."""
        self.log_delay_s = 0.0
        """How much later than the head of the answer the first event of a log comes."""
        self.lists_are_short = False
        """Lists leave out the variables of a job."""
        self.cuts_are_clean = False
        """A cut looks like the end of the log, as behind a proxy that ends the answer."""
        self._connections: Counter[str] = Counter()

    def environment(self) -> dict[str, str]:
        """The variables with which `huggingface_hub` and Atoll find this peer."""
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": "/nonexistent"}

    def reset(self) -> None:
        """As new: nothing runs, nothing fails."""
        self.faults.heal()
        self.admits.set()
        for job in self._started:
            job.kill()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._started.clear()
        self.jobs.clear()
        self.calls.clear()
        self.unimplemented.clear()
        self._as_new()

    def close(self) -> None:
        self.reset()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def forget(self, run: str) -> None:
        """Remove every trace of the jobs of a run, by the label `atoll-run`."""
        with self._lock:
            self.jobs = {key: job for key, job in self.jobs.items() if job.labels.get("atoll-run") != run}

    # ── operations ──────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, namespace: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        found = list(problems(spec, {each["name"]: each for each in self.hardware}))
        if found:
            raise Refusal(400, "; ".join(found))
        job = Job(spec, namespace, stop_grace_s=self._stop_grace_s)
        job.unseen_lists = self.list_lag
        with self._lock:
            self.jobs[job.id] = job
        self._started.append(job)
        thread = Thread(target=job.run, args=(self.admits,), daemon=True)
        self._threads.append(thread)
        thread.start()
        return job.info()

    def list(self, namespace: str, query: Mapping[str, list[str]]) -> tuple[list[dict[str, Any]], int | None]:
        """One page, newest first, and where the next page begins."""
        wanted = [tuple(each.partition("=")[::2]) for each in query.get("label", [])]
        with self._lock:
            jobs = [job for job in self.jobs.values() if job.namespace == namespace]
        place = int(query.get("cursor", ["0"])[0])
        jobs = [job for job in jobs if all(job.labels.get(key) == value for key, value in wanted)]
        jobs = [job for job in jobs if not query.get("stage") or job.stage in query["stage"]]
        if place == 0:
            for job in jobs:
                job.unseen_lists -= 1
        seen = sorted((job for job in jobs if job.unseen_lists < 0), key=lambda job: -job.created_at)
        page, following = seen[place : place + self.page_size], place + self.page_size
        listed = [_listed(job, self.old_stages.get(job.id)) for job in page]
        if self.lists_are_short:
            listed = [{**each, "environment": None} for each in listed]
        return listed, following if following < len(seen) else None

    def find(self, namespace: str, job_id: str) -> Job:
        with self._lock:
            job = self.jobs.get(job_id)
        if job is None or job.namespace != namespace:
            raise Refusal(404, "Job not found")
        return job

    def cancel(self, namespace: str, job_id: str) -> dict[str, Any]:
        job = self.find(namespace, job_id)
        if job.is_over:
            raise Refusal(409, f"Job is already in stage {job.stage}")
        job.cancel()
        return job.info()

    def cut_after(self, job_id: str) -> int | None:
        """After how many events this connection to a log is cut."""
        if self.log_cut_every is None:
            return None
        with self._lock:
            self._connections[job_id] += 1
            return self.log_cut_every * self._connections[job_id]

    def counted(self, operation: str) -> None:
        with self._lock:
            self.calls[operation] += 1


class _Handler(BaseHTTPRequestHandler):
    peer: Peer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate((timestamp or time.time()) + self.peer.date_offset_s, usegmt=True)

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        try:
            self._check_token()
            self._dispatch(method, url.path, parse_qs(url.query), body)
        except Refusal as refusal:
            self._refuse(refusal)
        except Empty:
            self._answer(200, [])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _check_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(401, "Invalid username or password.")

    def _dispatch(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> None:
        peer = self.peer
        if (method, path) in (("GET", "/api/whoami-v2"), ("GET", "/api/jobs/hardware")):
            operation = path.rpartition("/")[2]
            peer.counted(operation)
            with peer.faults.around(operation):
                answer: Any = peer.hardware if operation == "hardware" else _identity()
            self._answer(200, answer)
            return
        found = _JOBS.match(path)
        operation = _OPERATIONS.get((method, found[2] is not None, found[3])) if found else None
        if found is None or operation is None:
            peer.unimplemented.append(f"{method} {path}")
            raise Refusal(501, f"the peer does not implement {method} {path}")
        namespace, job_id = found[1], found[2]
        peer.counted(operation)
        if operation == "logs":
            with peer.faults.around(operation):
                job = peer.find(namespace, job_id)
            self._stream(job, query)
            return
        if namespace not in NAMESPACES:
            raise Refusal(403, f"You don't have the rights to run Jobs in the namespace {namespace}")
        headers = {}
        with peer.faults.around(operation):
            if operation == "run":
                answer = peer.run(namespace, json.loads(body))
            elif operation == "list":
                answer, following = peer.list(namespace, query)
                if following is not None:
                    more = "&".join(
                        f"{key}={value}" for key, values in query.items() for value in values if key != "cursor"
                    )
                    headers["Link"] = f'<{peer.endpoint}/api/jobs/{namespace}?{more}&cursor={following}>; rel="next"'
            elif operation == "inspect":
                answer = peer.find(namespace, job_id).info()
            else:
                answer = peer.cancel(namespace, job_id)
        self._answer(200, answer, headers)

    def _stream(self, job: Job, query: dict[str, list[str]]) -> None:
        """Server-sent events until the job is over; the connection is closed at the end, or cut."""
        tail = int(query["tail"][0]) if "tail" in query else None
        most = self.peer.cut_after(job.id)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        self.wfile.flush()
        time.sleep(self.peer.log_delay_s)
        sent = 0
        for event in job.log.events(tail, _KEEP_ALIVE_S):
            if event is not None and sent == most:
                if self.peer.cuts_are_clean:
                    break
                return  # without the last chunk: the client sees a cut connection
            sent += event is not None
            text = ": keep-alive\n\n" if event is None else f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
            data = text.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, refusal: Refusal) -> None:
        headers = {"X-Error-Message": refusal.message, "X-Request-Id": "Root=1-peer"}
        if refusal.status == 401:
            headers["X-Error-Message"] = "Invalid credentials in Authorization header"
        if refusal.status == 429:
            headers["RateLimit"] = '"api";r=0;t=1'
        self._answer(refusal.status, {"error": refusal.message}, headers)

    def _answer(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def _listed(job: Job, old_stage: str | None) -> dict[str, Any]:
    return job.info() if old_stage is None else {**job.info(), "status": {"stage": old_stage, "message": None}}


def _identity() -> dict[str, Any]:
    scopes = [{"entity": {"type": "user", "name": "tester"}, "permissions": ["job.write", "repo.content.read"]}]
    token = {"displayName": "peer", "role": "fineGrained", "fineGrained": {"scoped": scopes, "global": []}}
    return {
        "type": "user",
        "name": "tester",
        "canPay": True,
        "orgs": [{"type": "org", "name": "team"}],
        "auth": {"type": "access_token", "accessToken": token},
    }
