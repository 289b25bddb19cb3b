"""Kueue: admits Jobs and AppWrappers by quota. Its API server of pending workloads is behind the cluster's one."""

from __future__ import annotations

import copy
import datetime as dt
import json
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.kubernetes import build
from services.kubernetes.authority import general_name
from services.kubernetes.controllers import manifests
from services.kubernetes.controllers.installation import Installation, answers

Object = dict[str, Any]
_GROUPS = ("batch", "kueue.x-k8s.io", "workload.codeflare.dev")
_FRAMEWORKS = ("batch/job", "workload.codeflare.dev/appwrapper")
_READ = (
    "/apis/kueue.x-k8s.io/v1beta2/workloads",
    "/apis/visibility.kueue.x-k8s.io/v1beta2/clusterqueues/none/pendingworkloads",
)
_LIFETIME = dt.timedelta(days=200)
"""Kueue replaces a certificate that ends within 90 days by one that is not for 127.0.0.1."""


class Kueue:
    """Ports: health, webhooks, visibility, metrics."""

    program = build.KUEUE

    def install(self, at: Installation) -> None:
        folder, api = at.built.manifests, at.api
        _write_certificates(at.folder, f"kueue-webhook-service.{at.namespace}.svc")
        authority = at.folder / "ca.crt"
        manifests.create(api, [{"kind": "Namespace", "metadata": {"name": at.namespace}}])
        definitions = [
            _convertible(each, folder, at.ports[1], authority) for each in manifests.resources(folder / "crd")
        ]
        manifests.create(api, definitions)
        manifests.create(api, [manifests.named(each, at.name) for each in manifests.resources(folder / "rbac")])
        manifests.create(api, [_secret(at)])
        manifests.wait_until_established(api, [each["metadata"]["name"] for each in definitions])
        for document in manifests.read(folder / "webhook" / "manifests.yaml"):
            found = manifests.called_at(document, at.ports[1], authority, _GROUPS)
            manifests.create(api, [manifests.named(found, at.name)])

    def command(self, at: Installation, settings: Object) -> list[str]:
        """`settings` are keys of Kueue's configuration, such as `waitForPodsReady`."""
        health, webhooks, visibility, metrics = at.ports
        configuration = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": at.namespace,
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "metrics": {"bindAddress": f"127.0.0.1:{metrics}"},
            "webhook": {"host": "127.0.0.1", "port": webhooks, "certDir": str(at.folder)},
            "visibilityServer": {"bindAddress": "127.0.0.1", "bindPort": visibility},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": True},
            "integrations": {"frameworks": list(_FRAMEWORKS)},
            "clientConnection": {"qps": 200, "burst": 400},
            **settings,
        }
        path = at.folder / "configuration.json"
        path.write_text(json.dumps(configuration, indent=1))
        return [str(at.built.binary), f"--config={path}", f"--kubeconfig={at.kubeconfig()}"]

    def is_ready(self, at: Installation) -> bool:
        """Its visibility API is registered once Kueue answers: of one that is not there yet the cluster's API server
        takes notice some 20 seconds later only."""
        if not answers(f"http://127.0.0.1:{at.ports[0]}/readyz"):
            return False
        registered = at.folder / "visibility-is-registered"
        if not registered.exists():
            manifests.create(at.api, _visibility(at.built.manifests / "visibility", at))
            registered.touch()
        return all(map(at.serves, _READ))


def _convertible(definition: Object, folder: Path, port: int, authority: Path) -> Object:
    """The definition, with the conversion webhook that the installation patches into some of them."""
    plural = definition["spec"]["names"]["plural"]
    patch = folder / "crd" / "patches" / f"webhook_in_{plural}.yaml"
    is_active = f"- path: patches/{patch.name}" in (folder / "crd" / "kustomization.yaml").read_text().splitlines()
    if not is_active:
        return definition
    found = copy.deepcopy(definition)
    found["spec"]["conversion"] = manifests.read(patch)[0]["spec"]["conversion"]
    webhook = found["spec"]["conversion"]["webhook"]
    webhook["clientConfig"] = manifests.client_config(webhook["clientConfig"]["service"]["path"], port, authority)
    return found


def _visibility(folder: Path, at: Installation) -> list[Object]:
    """The Service leads to this machine, because no pod runs Kueue."""
    name, found = f"{at.name}-visibility-server", []
    for document in manifests.resources(folder):
        if document["kind"] == "RoleBinding":
            found.append(manifests.named(document, at.name))
        elif document["kind"] == "APIService":
            service = {"name": name, "namespace": at.namespace, "port": at.ports[2]}
            found.append({**document, "spec": {**document["spec"], "service": service}})
    port = {"name": "https", "port": at.ports[2], "protocol": "TCP"}
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [port]}
    metadata = {"name": name, "namespace": at.namespace}
    return [{"kind": "Service", "metadata": metadata, "spec": spec}, *found]


def _secret(at: Installation) -> Object:
    names = ("ca.crt", "ca.key", "tls.crt", "tls.key")
    data = {name: manifests.in_base64(at.folder / name) for name in names}
    return {
        "kind": "Secret",
        "metadata": {"name": "kueue-webhook-server-cert", "namespace": at.namespace},
        "data": data,
    }


def _write_certificates(folder: Path, host: str) -> None:
    """An authority and a server in the form that Kueue would make itself, and so keeps: RSA, and these names."""
    authority_key = rsa.generate_private_key(65537, 2048)
    authority = _builder("kueue-ca", authority_key, ["kueue-ca"])
    usage = x509.KeyUsage(True, False, True, False, False, True, False, False, False)
    authority = authority.issuer_name(_name("kueue-ca")).add_extension(x509.BasicConstraints(True, None), True)
    signed = authority.add_extension(usage, True).sign(authority_key, hashes.SHA256())
    server_key = rsa.generate_private_key(65537, 2048)
    server = _builder(host, server_key, [host, "127.0.0.1"]).issuer_name(signed.subject)
    server = server.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    _write(folder / "ca", signed, authority_key)
    _write(folder / "tls", server.sign(authority_key, hashes.SHA256()), server_key)


def _builder(name: str, key: rsa.RSAPrivateKey, hosts: list[str]) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder().subject_name(_name(name)).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(hours=1))
    names = x509.SubjectAlternativeName([general_name(host) for host in hosts])
    return builder.not_valid_after(now + _LIFETIME).add_extension(names, False)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "kueue"),
                      x509.NameAttribute(NameOID.COMMON_NAME, common)])  # fmt: skip


def _write(stem: Path, certificate: x509.Certificate, key: rsa.RSAPrivateKey) -> None:
    form, plain = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    stem.with_suffix(".crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    path = stem.with_suffix(".key")
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
