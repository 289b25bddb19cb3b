"""A server that plays S3 and the places AWS credentials come from, and notes who signed each request.

It keeps objects, answers the EKS Pod Identity agent's, the instance metadata service's, STS's and SSO's requests with
keys `KEY-1`, `KEY-2`, … that end within a minute, so a client that renews is seen to. Keys in `expired` are refused
as S3 refuses them. It checks no signature: SeaweedFS does that.
"""

from __future__ import annotations

import itertools
import json
import re
import ssl
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

_SIGNER = re.compile(r"Credential=([^/]+)/")


class FakeAws:
    """Serves on a free port of this machine while it is open."""

    def __init__(self, *, certificate: Path | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.signers: list[str | None] = []
        self.asked: list[str] = []
        self.tokens: list[str] = []
        self.expired: set[str] = set()
        self.payload_hashes: list[str] = []
        self._numbers = itertools.count(1)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"aws": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate)
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
            self.url = f"https://localhost:{self._server.server_port}"

    def __enter__(self) -> FakeAws:
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def new_key(self) -> tuple[str, str]:
        """A key, and when it ends."""
        end = datetime.now(UTC) + timedelta(seconds=60)
        return f"KEY-{next(self._numbers)}", end.strftime("%Y-%m-%dT%H:%M:%SZ")


class _Handler(BaseHTTPRequestHandler):
    aws: FakeAws
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if path.startswith(("/pod", "/latest", "/federation")) or "AssumeRole" in self.path or b"AssumeRole" in body:
            self.aws.asked.append(path)
            return self._credentials(path)
        return self._object(path, body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve  # noqa: N815

    def _credentials(self, path: str) -> None:
        if path == "/latest/api/token":
            return self._answer(200, b"metadata-token")
        if path.rstrip("/").endswith("security-credentials"):
            return self._answer(200, b"the-role")
        self.aws.tokens.append(self.headers.get("Authorization", ""))
        key, end = self.aws.new_key()
        if path.startswith("/federation"):
            ends_ms = int((time.time() + 3600) * 1000)
            role = {"accessKeyId": key, "secretAccessKey": "s", "sessionToken": "t", "expiration": ends_ms}
            return self._answer(200, json.dumps({"roleCredentials": role}).encode())
        if path.startswith(("/pod", "/latest")):
            plain = {"AccessKeyId": key, "SecretAccessKey": "s", "Token": "t", "Expiration": end, "Code": "Success"}
            return self._answer(200, json.dumps(plain).encode())
        return self._answer(
            200,
            f"<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key}"
            f"</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>{end}"
            "</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>".encode(),
        )

    def _object(self, path: str, body: bytes) -> None:
        found = _SIGNER.search(self.headers.get("Authorization", ""))
        signer = found[1] if found else None
        self.aws.signers.append(signer)
        self.aws.payload_hashes.append(self.headers.get("x-amz-content-sha256", ""))
        if signer in self.aws.expired:
            return self._answer(400, b"<Error><Code>ExpiredToken</Code><Message>ended</Message></Error>")
        if self.command == "PUT":
            self.aws.objects[path] = body
            return self._answer(200, b"")
        if path not in self.aws.objects:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        return self._answer(200, self.aws.objects[path])

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
