"""MCAD: dispatches AppWrappers of version v1beta1. Its custom resource has the name of AppWrapper's, so it needs a
control plane of its own. It has no webhooks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from services.kubernetes import build
from services.kubernetes.controllers import manifests
from services.kubernetes.controllers.installation import Installation, answers

Object = dict[str, Any]
_VALUE = re.compile(r"\{\{\s*\.Values\.([\w.]+)\s*\}\}")
_KINDS = ("ClusterRole", "ClusterRoleBinding", "ServiceAccount")


class Mcad:
    program = build.MCAD

    def install(self, at: Installation) -> None:
        definitions = manifests.read(*sorted((at.built.manifests / "crds").glob("*.yaml")))
        manifests.create(at.api, definitions)
        manifests.create(at.api, _roles(at.built.manifests))
        manifests.wait_until_established(at.api, [each["metadata"]["name"] for each in definitions])

    def command(self, at: Installation, settings: Object) -> list[str]:
        """`settings` are flags. A job that does not fit is tried again after 2 seconds, not 20."""
        config = at.kubeconfig("kube-system", "mcad-controller")
        given = {
            "healthProbeListenAddr": f"127.0.0.1:{at.ports[0]}",
            "kubeconfig": config,
            "backofftime": 2,
            **settings,
        }
        return [str(at.built.binary), "--logtostderr", *(f"--{name}={value}" for name, value in given.items())]

    def is_ready(self, at: Installation) -> bool:
        return answers(f"http://127.0.0.1:{at.ports[0]}/healthz")


def _roles(chart: Path) -> list[Object]:
    """The service account and its roles, from the template of the chart, with the chart's values."""
    values = yaml.safe_load((chart / "values.yaml").read_text())

    def value(match: re.Match[str]) -> str:
        found = values
        for word in match[1].split("."):
            found = (found or {}).get(word)
        return "" if found is None else str(found)

    found = []
    for text in (chart / "templates" / "deployment.yaml").read_text().split("\n---"):
        if re.search(rf"^kind: ({'|'.join(_KINDS)})$", text, re.M):
            document = yaml.safe_load(_VALUE.sub(value, text))
            if "rules" in document:  # what the values leave empty is not in the chart's output
                document["rules"] = [rule for rule in document["rules"] if None not in rule["apiGroups"]]
            if document["kind"] == "ServiceAccount":
                document.pop("imagePullSecrets", None)
            found.append(document)
    return found
