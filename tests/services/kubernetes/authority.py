"""A certificate authority of one cluster: EC P-256 keys, in files below one folder."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = dt.timedelta(days=2)


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, as two PEM files."""

    path: Path
    key_path: Path


class Authority:
    """Issues certificates. Another process that opens the same folder issues them with the same key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "ca.crt"
        if not self.path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self._create()
        self._certificate = x509.load_pem_x509_certificate(self.path.read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key

    def server(self, name: str, *hosts: str) -> Certificate:
        """A certificate with which a server at these host names or addresses answers."""
        names = [general_name(host) for host in hosts]
        return self._issue(name, _subject(name, ()), ExtendedKeyUsageOID.SERVER_AUTH, names)

    def client(self, user: str, *groups: str, file_name: str | None = None) -> Certificate:
        """A certificate that makes its holder this user of these groups."""
        return self._issue(file_name or user.replace(":", "-"), _subject(user, groups), ExtendedKeyUsageOID.CLIENT_AUTH)

    def key_pair(self, name: str) -> Certificate:
        """A public and a private key without a certificate: what signs the tokens of service accounts."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = Certificate(self.folder / f"{name}.pub", self._write_key(name, key))
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        pair.path.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
        return pair

    def _create(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _subject("atoll-test-ca", ())
        usage = x509.KeyUsage(True, False, True, False, False, True, False, False, False)
        builder = _builder(name, name, key.public_key()).add_extension(x509.BasicConstraints(True, None), critical=True)
        certificate = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
        self._write_key("ca", key)
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _issue(
        self, name: str, subject: x509.Name, usage: x509.ObjectIdentifier, names: list[x509.GeneralName] | None = None
    ) -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(subject, self._certificate.subject, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        issued = Certificate(self.folder / f"{name}.crt", self._write_key(name, key))
        signed = builder.sign(self._key, hashes.SHA256())
        issued.path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return issued

    def _write_key(self, name: str, key: ec.EllipticCurvePrivateKey) -> Path:
        path = self.folder / f"{name}.key"
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return path


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - dt.timedelta(hours=1)).not_valid_after(now + _LIFETIME)


def _subject(user: str, groups: tuple[str, ...]) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
