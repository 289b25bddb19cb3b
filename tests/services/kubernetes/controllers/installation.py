"""What a controller is installed with: its control plane, a folder of its own, its user and its ports."""

from __future__ import annotations

import contextlib
import json
import ssl
import urllib.request
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from services.kubernetes.api import Api, ApiError
from services.kubernetes.build import Built, Program
from services.kubernetes.control_plane import ControlPlane
from services.programs import free_ports

Object = dict[str, Any]
_TOKEN_S = 24 * 3600


@dataclass(frozen=True)
class Installation:
    name: str
    plane: ControlPlane
    built: Built
    ports: list[int] = field(default_factory=lambda: free_ports(4))

    @cached_property
    def api(self) -> Api:
        return self.plane.admin_api()

    @property
    def folder(self) -> Path:
        found = self.plane.folder / self.name
        found.mkdir(exist_ok=True)
        return found

    @property
    def namespace(self) -> str:
        return f"{self.name}-system"

    def kubeconfig(self, namespace: str = "", account: str = "") -> Path:
        """Of the service account of the controller: it may do what the roles of its installation say."""
        path = f"/api/v1/namespaces/{namespace or self.namespace}/serviceaccounts"
        path = f"{path}/{account or f'{self.name}-controller-manager'}/token"
        token = self.api.create(path, {"spec": {"expirationSeconds": _TOKEN_S}})["status"]["token"]
        content = json.loads(self.plane.admin.read_text())
        content["users"][0]["user"] = {"token": token}
        config = self.folder / "kubeconfig"
        config.touch(mode=0o600)
        config.write_text(json.dumps(content))
        return config

    def serves(self, path: str) -> bool:
        """Whether the cluster's API server answers, even if only that there is no such object."""
        try:
            self.api.get(path)
        except ApiError as exc:
            return exc.status == 404 and exc.reason == "NotFound"
        return True


class Controller(Protocol):
    program: Program

    def install(self, at: Installation) -> None:
        """Make what the controller needs: custom resources, roles, certificates and webhooks."""

    def command(self, at: Installation, settings: Object) -> list[str]: ...

    def is_ready(self, at: Installation) -> bool: ...


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        return bool(response.status == 200)
    return False


def answers_securely(port: int, path: str) -> bool:
    """The same for a server on loopback with a certificate that it made itself."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"https://127.0.0.1:{port}{path}", timeout=5, context=context) as response,
    ):
        return bool(response.status == 200)
    return False
