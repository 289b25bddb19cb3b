"""A wire-speed S3: nginx with WebDAV and a little Lua, on 127.0.0.1, in a folder in memory. Ended by its pid.

nginx costs a tenth of what a real S3 server costs in CPU, so that the client is what a benchmark sees.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

BUCKET = "wire"
INSTALL = "apt-get install nginx-light libnginx-mod-http-ndk libnginx-mod-http-lua"
_HERE = Path(__file__).resolve().parent
_MODULES = Path("/usr/lib/nginx/modules")


def missing_parts() -> str | None:
    """What is not installed, in words; None if the server can be started."""
    if nginx() is None:
        return "nginx is not installed"
    absent = [n for n in ("ndk_http_module.so", "ngx_http_lua_module.so") if not (_MODULES / n).exists()]
    return f"nginx has no {' and no '.join(absent)}" if absent else None


def nginx() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@dataclass
class Traffic:
    """What the server saw: requests by verb, and bytes each way with and without HTTP headers."""

    requests: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    body_up: int = 0
    body_down: int = 0
    whole_up: int = 0
    whole_down: int = 0

    def add(self, line: str) -> None:
        method, status, received, body_up, sent, body_down, uri = line.split(" ", 6)
        if uri.partition("?")[0].rstrip("/") == f"/{BUCKET}":  # the benchmark itself lists what it tidies away
            self.requests["LIST"] += 1
            return
        self.requests[method] += 1
        self.missed += status == "404"
        self.body_up += int(body_up) if body_up.isdigit() else 0
        self.body_down += int(body_down)
        self.whole_up += int(received)
        self.whole_down += int(sent)


class WireServer:
    """`with WireServer(folder) as server: CloudStore.from_uri(server.uri("run"), unsigned_payload=True)`."""

    def __init__(self, root: Path, *, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        self.root, self.latency_s, self.bytes_per_s = root, latency_s, bytes_per_s
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def uri(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    def __enter__(self) -> WireServer:
        for name in ("objects", "temp"):
            (self.root / name).mkdir(parents=True)
        config = self.root / "nginx.conf"
        config.write_text(self._config())
        program = nginx()
        assert program is not None, missing_parts()
        command = [program, "-p", str(self.root), "-c", str(config), "-e", str(self.root / "error.log")]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            self._await_answer()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """SIGTERM: the master ends its workers, then itself."""
        if self._process is not None:
            self._process.terminate()
            self._process.communicate(timeout=20)
            self._process = None

    def traffic(self) -> Traffic:
        """What was seen since the last call. Lines are written a moment after the answer, hence the pause."""
        time.sleep(0.2)
        with open(self.root / "access.log", "rb") as log:
            log.seek(self._read)
            text = log.read()
        self._read += len(text)
        seen = Traffic()
        for line in text.decode().splitlines():
            seen.add(line)
        return seen

    def _config(self) -> str:
        values = {
            "ROOT": str(self.root),
            "HERE": str(_HERE),
            "MODULES": str(_MODULES),
            "PORT": str(self.port),
            "BUCKET": BUCKET,
            "LATENCY_S": f"{self.latency_s:g}",
            "BYTES_PER_S": f"{self.bytes_per_s:.0f}",
        }
        text = (_HERE / "nginx.conf").read_text()
        if os.geteuid() != 0:
            text = text.replace("user root;\n", "")
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        return text

    def _await_answer(self) -> None:
        assert self._process is not None
        for _ in range(200):
            if self._process.poll() is not None:
                said = self._process.stderr.read().decode() if self._process.stderr else ""
                raise RuntimeError(f"nginx did not start: {said.strip()}")
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("nginx does not answer")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
