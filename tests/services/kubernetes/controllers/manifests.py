"""A controller's manifests from the folder of its module, named and placed as its own installation does it."""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from services.kubernetes.api import Api

Object = dict[str, Any]
_PATHS = {
    "APIService": "/apis/apiregistration.k8s.io/v1/apiservices",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "MutatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "Namespace": "/api/v1/namespaces",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ValidatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
}


def read(*paths: Path) -> list[Object]:
    return [document for path in paths for document in yaml.safe_load_all(path.read_text()) if document]


def resources(folder: Path) -> list[Object]:
    """The documents that a folder's kustomization lists."""
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return read(*(folder / name for name in listed))


def named(document: Object, prefix: str) -> Object:
    """The document as kustomize would name it: names get the prefix, and the namespace is that of the installation."""
    found = copy.deepcopy(document)
    metadata = found["metadata"]
    metadata["name"] = f"{prefix}-{metadata['name']}"
    if "{}" in _PATHS[found["kind"]] and metadata.get("namespace", "system") == "system":
        metadata["namespace"] = f"{prefix}-system"
    if found.get("roleRef", {}).get("name", "").endswith("-role"):  # the others are of Kubernetes itself
        found["roleRef"]["name"] = f"{prefix}-{found['roleRef']['name']}"
    for subject in found.get("subjects", []):
        subject.update(name=f"{prefix}-{subject['name']}", namespace=f"{prefix}-system")
    return found


def called_at(document: Object, port: int, authority: Path, groups: Iterable[str]) -> Object:
    """A webhook configuration for a server on loopback, with only the webhooks for kinds of these groups."""
    found = copy.deepcopy(document)
    chosen = set(groups)
    found["webhooks"] = [
        {**webhook, "clientConfig": client_config(webhook["clientConfig"]["service"]["path"], port, authority)}
        for webhook in found["webhooks"]
        if chosen.issuperset(group for rule in webhook["rules"] for group in rule["apiGroups"])
    ]
    return found


def client_config(path: str, port: int, authority: Path) -> Object:
    """How the API server calls a webhook on loopback."""
    return {"url": f"https://127.0.0.1:{port}{path}", "caBundle": in_base64(authority)}


def in_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def path_of(document: Object) -> str:
    """The collection in which the document is made."""
    return _PATHS[document["kind"]].format(document["metadata"].get("namespace", ""))


def create(api: Api, documents: Iterable[Object]) -> None:
    for document in documents:
        api.create(path_of(document), document)


def wait_until_established(api: Api, names: Iterable[str]) -> None:
    """Wait until the API server serves these custom resources."""
    wanted = set(names)
    path = _PATHS["CustomResourceDefinition"]
    while True:
        listed = api.get(path)
        if wanted <= {item["metadata"]["name"] for item in listed["items"] if _is_established(item)}:
            return
        version = listed["metadata"]["resourceVersion"]
        next(api.watch(path, timeout=60, resourceVersion=version, timeoutSeconds=60), None)


def _is_established(definition: Object) -> bool:
    conditions = definition.get("status", {}).get("conditions", [])
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)
