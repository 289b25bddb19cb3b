"""AppWrapper: wraps a Job and a Service in one object that is queued, started, retried and removed together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.kubernetes import build
from services.kubernetes.controllers import manifests
from services.kubernetes.controllers.installation import Installation, answers

Object = dict[str, Any]
_GROUP = "workload.codeflare.dev"


class AppWrapper:
    program = build.APPWRAPPER

    def install(self, at: Installation) -> None:
        folder, api = at.built.manifests, at.api
        manifests.create(api, [{"kind": "Namespace", "metadata": {"name": at.namespace}}])
        manifests.create(api, manifests.read(folder / "crd" / "bases" / f"{_GROUP}_appwrappers.yaml"))
        manifests.create(api, [manifests.named(each, at.name) for each in manifests.resources(folder / "rbac")])
        manifests.wait_until_established(api, [f"appwrappers.{_GROUP}"])
        authority = at.plane.authority
        issued = authority.server("appwrapper-webhooks", "127.0.0.1")
        _link(at.folder / "tls.crt", issued.path)
        _link(at.folder / "tls.key", issued.key_path)
        for document in manifests.read(folder / "webhook" / "manifests.yaml"):
            found = manifests.called_at(document, at.ports[1], authority.path, [_GROUP])
            manifests.create(api, [manifests.named(found, at.name)])

    def command(self, at: Installation, settings: Object) -> list[str]:
        if settings:
            raise ValueError(f"AppWrapper has no settings here: {settings}; annotations of each AppWrapper set them")
        return [
            str(at.built.binary),
            f"-kubeconfig={at.kubeconfig()}",
            f"-health=127.0.0.1:{at.ports[0]}",
            f"-webhook-port={at.ports[1]}",
            f"-certificates={at.folder}",
        ]

    def is_ready(self, at: Installation) -> bool:
        return answers(f"http://127.0.0.1:{at.ports[0]}/readyz")


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)
