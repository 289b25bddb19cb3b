"""The HTTPS server through which the API server reads logs from the nodes."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from services.kubernetes.authority import Certificate
from services.kubernetes.kubelet.logs import Log, Selection, timestamp, with_nanoseconds
from services.kubernetes.kubelet.pods import Pod

Find = Callable[[str, str], Pod | None]


class LogServer(ThreadingHTTPServer):
    """Demands the client certificate of the API server."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, find: Find, certificate: Certificate, authority: Path) -> None:
        super().__init__(("127.0.0.1", 0), type("Handler", (_Handler,), {"find": staticmethod(find)}))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(str(certificate.path), str(certificate.key_path))
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    find: Find
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        if len(parts) != 4 or parts[0] != "containerLogs":
            return self._answer(404, b"not found\n")
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        pod = type(self).find(parts[1], parts[2])
        if pod is None:
            return self._answer(404, f'pod "{parts[2]}" not found\n'.encode())
        if not pod.node.is_online:
            self.close_connection = True
            return None
        return self._answer_log(pod, parts[3], query)

    def _answer_log(self, pod: Pod, name: str, query: dict[str, str]) -> None:
        container = pod.container(name)
        is_previous = query.get("previous") == "true"
        if container is None:
            return self._answer(404, f'container "{name}" not found\n'.encode())
        logs: list[Log] = container.logs
        if is_previous and len(logs) < 2:
            return self._bad(
                pod, name, f'previous terminated container "{name}" in pod "{pod.metadata["name"]}" not found'
            )
        if not logs:
            reason = container.status.state.get("waiting", {}).get("reason", "")
            problem = {"ErrImagePull": "image can't be pulled", "ImagePullBackOff": "trying and failing to pull image"}
            why = problem.get(reason, reason or "ContainerCreating")
            return self._bad(
                pod, name, f'container "{name}" in pod "{pod.metadata["name"]}" is waiting to start: {why}'
            )
        return self._stream(logs[-2 if is_previous else -1].read(_selection(query)))

    def _bad(self, pod: Pod, name: str, message: str) -> None:
        self._answer(400, f"{message}\n".encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, pieces: Iterable[bytes]) -> None:
        self.send_response_only(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for piece in pieces:
            if piece:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")


def _selection(query: dict[str, str]) -> Selection:
    since = with_nanoseconds(query.get("sinceTime", ""))
    if "sinceSeconds" in query:
        since = timestamp(before_s=float(query["sinceSeconds"]))
    return Selection(
        tail=int(query["tailLines"]) if "tailLines" in query else None,
        is_followed=query.get("follow") == "true",
        has_timestamps=query.get("timestamps") == "true",
        since=since,
        limit_bytes=int(query["limitBytes"]) if "limitBytes" in query else None,
    )
