"""Where a client puts arguments that are too long for a request: HTTP PUT to an address that `BlobCreate` returns."""

from __future__ import annotations

import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Blobs:
    """Serves on a free port of this machine until `close`."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        blobs = self._blobs

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                blobs[self.path.removeprefix("/")] = data
                self.send_response(200)
                self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')  # the client checks it
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True, name="peer-blobs").start()

    def address(self, blob_id: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{blob_id}"

    def get(self, blob_id: str) -> bytes:
        return self._blobs[blob_id]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
