"""A small stand-in for the XML interface of Google Cloud Storage, which no emulator on hand speaks.

It does what Atoll asks of GCS: PUT with `x-goog-if-generation-match: 0` and metadata, GET with ranges, HEAD, DELETE,
and paged `?list-type=2`; a bearer token is checked. Limits: written from the public documentation and from what obstore
sends, not compared with the real service; no multipart uploads, no versions, no service-account tokens, no quotas
(the real GCS allows one write per second to one name), everything in memory; buckets exist once they are named.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000
DATE = "Mon, 01 Jan 2024 00:00:00 GMT"


@dataclass(frozen=True)
class StoredObject:
    data: bytes
    generation: int
    metadata: dict[str, str]

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class GcsShim:
    """Serves on a free port of this machine while it is open."""

    def __init__(self, *, token: str) -> None:
        self.token = token
        self.objects: dict[tuple[str, str], StoredObject] = {}
        self.lock = Lock()
        self.generations = itertools.count(1)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"shim": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> GcsShim:
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    shim: GcsShim
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self._name()
        if name is None:
            return
        prefix = "x-goog-meta-"
        metadata = {k.lower(): v for k, v in self.headers.items() if k.lower().startswith(prefix)}
        with self.shim.lock:
            if self.headers.get("x-goog-if-generation-match") == "0" and name in self.shim.objects:
                self._error(412, "PreconditionFailed")
                return
            stored = StoredObject(body, next(self.shim.generations), metadata)
            self.shim.objects[name] = stored
        self._answer(200, b"", {"ETag": stored.etag, "x-goog-generation": str(stored.generation)})

    def do_GET(self) -> None:
        if "list-type" in self._query():
            return self._list()
        found = self._find()
        if found is None:
            return None
        headers = {
            "ETag": found.etag,
            "Last-Modified": DATE,
            "x-goog-generation": str(found.generation),
            **found.metadata,
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self._answer(200, found.data, headers)
        start, size = int(wanted[1]), len(found.data)
        end = min(int(wanted[2]) + 1 if wanted[2] else size, size)
        if start >= size:
            return self._error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return self._answer(206, found.data[start:end], headers)

    do_HEAD = do_GET  # noqa: N815

    def do_DELETE(self) -> None:
        if self._find() is not None:
            with self.shim.lock:
                self.shim.objects.pop(self._name() or ("", ""), None)
            self._answer(204, b"", {})

    def _list(self) -> None:
        name = self._name()
        if name is None:
            return
        query = self._query()
        prefix, after = query.get("prefix", ""), query.get("continuation-token") or query.get("start-after", "")
        with self.shim.lock:
            objects = dict(self.shim.objects)
        keys = sorted(key for bucket, key in objects if bucket == name[0] and key.startswith(prefix) and key > after)
        page = keys[:PAGE]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{objects[name[0], key].etag}</ETag><Size>{len(objects[name[0], key].data)}</Size></Contents>"
            for key in page
        )
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(keys) > PAGE else ""
        truncated = str(len(keys) > PAGE).lower()
        body = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}{entries}</ListBucketResult>"
        self._answer(200, body.encode(), {"Content-Type": "application/xml"})

    def _name(self) -> tuple[str, str] | None:
        """Bucket and key of the request; None, and answered, if it may not be made."""
        if self.headers.get("Authorization") != f"Bearer {self.shim.token}":
            self._error(401, "AuthenticationRequired")
            return None
        bucket, _, key = urlsplit(self.path).path.lstrip("/").partition("/")
        return unquote(bucket), unquote(key)

    def _find(self) -> StoredObject | None:
        name = self._name()
        if name is None:
            return None
        with self.shim.lock:
            found = self.shim.objects.get(name)
        if found is None:
            self._error(404, "NoSuchKey")
        return found

    def _query(self) -> dict[str, str]:
        return {k: v[0] for k, v in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode(), {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
