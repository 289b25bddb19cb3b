"""Build obstore's clients from an address, settings and the environment.

AWS credentials that obstore does not find itself: profiles, SSO and the files under `~/.aws`.

The order is AWS's own: a profile asked for by name; keys in the environment; `AWS_PROFILE`; web identity (IRSA) and
container credentials (EKS Pod Identity, ECS); the default profile; the instance's role. Those without a file are
obstore's work, and it renews them; for the others botocore does, asked again every few minutes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from atoll.errors import ConfigError
from atoll.registry import require
from atoll.stores.cloud.address import CloudAddress

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

    Client = AzureStore | GCSStore | S3Store

# botocore renews credentials ten minutes before they end, so a copy this old is always good.
_ASK_AGAIN = timedelta(minutes=5)
_HANDLED_BY_OBSTORE = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)


def aws_credential_provider(profile: str | None, environ: Mapping[str, str] = os.environ) -> Any | None:
    """What to ask for credentials, or None if obstore finds them alone."""
    if profile is not None:
        return _from_profile(profile)
    if environ.get("AWS_ACCESS_KEY_ID") or environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return None
    if environ.get("AWS_PROFILE"):
        return _from_profile(environ["AWS_PROFILE"])
    if any(environ.get(name) for name in _HANDLED_BY_OBSTORE):
        return None
    return _from_default_profile() if _has_files(environ) and find_spec("boto3") else None


def _from_profile(name: str) -> Any:
    boto3 = require("boto3", extra="aws")
    exceptions = require("botocore.exceptions", extra="aws")
    try:
        return _provider(boto3.Session(profile_name=name))
    except (exceptions.BotoCoreError, ValueError) as exc:
        raise ConfigError(f"AWS profile `{name}` gives no credentials: {exc}", hint="see `aws configure list`") from exc


def _from_default_profile() -> Any | None:
    session = require("boto3", extra="aws").Session()
    return None if session.get_credentials() is None else _provider(session)


def _provider(session: Any) -> Any:
    return require("obstore.auth.boto3", extra="aws").Boto3CredentialProvider(session, ttl=_ASK_AGAIN)


def _has_files(environ: Mapping[str, str]) -> bool:
    home = Path(environ.get("HOME") or Path.home()) / ".aws"
    shared = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials")
    return shared.is_file() or Path(environ.get("AWS_CONFIG_FILE") or home / "config").is_file()


@dataclass(frozen=True)
class CloudSettings:
    """How long to wait, how often to try, whom to trust.

    `ca_file` adds certificates to the system's (default: what `AWS_CA_BUNDLE` names). `config` goes to obstore as it
    is: keys, encryption, tenant, …
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    slowest_upload_bytes_per_s: float = 1e6
    max_retries: int = 10
    retry_timeout_s: float = 900.0
    unsigned_payload: bool | None = None
    ca_file: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def patience_s(self, upload_bytes: int) -> float:
        """How long a request may be silent. The HTTP client counts an upload as silence, so size matters.

        Doubling steps keep the number of clients, and so of connection pools, small.
        """
        patience = self.read_timeout_s
        while patience < upload_bytes / self.slowest_upload_bytes_per_s:
            patience *= 2
        return patience

    def with_retry_timeout(self, seconds: float) -> CloudSettings:
        """The same, but a request is given up after about so many seconds."""
        return replace(
            self,
            connect_timeout_s=min(self.connect_timeout_s, seconds),
            read_timeout_s=min(self.read_timeout_s, seconds),
            retry_timeout_s=min(self.retry_timeout_s, seconds),
        )


def build_client(address: CloudAddress, settings: CloudSettings, patience_s: float) -> Client:
    """A client whose requests may be silent for `patience_s`."""
    store = require("obstore.store", extra="cloud")
    common: dict[str, Any] = {
        "client_options": _client_options(address, settings, patience_s),
        "retry_config": {
            "max_retries": settings.max_retries,
            "retry_timeout": timedelta(seconds=settings.retry_timeout_s),
        },
    }
    client: Client
    match address.service:
        case "s3":
            client = store.S3Store(address.bucket, **common, **_s3_options(address, settings))
        case "gs":
            client = store.GCSStore(address.bucket, **common, config=_gs_config(address, settings))
        case "az":
            client = store.AzureStore(address.bucket, **common, config=_az_config(address, settings))
    return client


def _client_options(address: CloudAddress, settings: CloudSettings, patience_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        "read_timeout": timedelta(seconds=patience_s),
        "timeout": timedelta(seconds=30 * patience_s),
        "allow_http": (_endpoint(address) or "https:").startswith("http:"),
    }
    if ca_file := ca_file_of(settings):
        try:
            options["root_certificate"] = Path(ca_file).read_bytes()
        except OSError as exc:
            raise ConfigError(f"cannot read the certificates in {ca_file!r}: {exc.strerror}") from exc
    return options


def ca_file_of(settings: CloudSettings) -> str | None:
    """Certificates to trust besides the system's."""
    return settings.ca_file or os.environ.get("AWS_CA_BUNDLE") or None


def _s3_options(address: CloudAddress, settings: CloudSettings) -> dict[str, Any]:
    endpoint = _endpoint(address)
    is_tls = endpoint is None or endpoint.startswith("https:")
    is_path_style = (
        address.path_style if address.path_style is not None else endpoint is not None or "." in address.bucket
    )
    # TLS already protects the body on its way; hashing it again costs four times the CPU of the upload.
    is_unsigned = is_tls if settings.unsigned_payload is None else settings.unsigned_payload
    config: dict[str, Any] = {
        "disable_bulk_delete": True,  # many S3 clones lack it, and we delete one key at a time
        "virtual_hosted_style_request": not is_path_style,
        "unsigned_payload": is_unsigned,
    }
    if not is_unsigned:  # some clones check this header but not the same hash in the signature
        config["checksum_algorithm"] = "sha256"
    if endpoint is not None:
        at = endpoint if is_path_style else _with_bucket(endpoint, address.bucket)
        config |= {"endpoint": at, "aws_endpoint_url_s3": at}  # the second one wins over its environment variable
    if address.region is not None:
        config["region"] = address.region
    if address.anonymous:
        config["skip_signature"] = True
    options: dict[str, Any] = {"config": config | dict(settings.config)}
    has_keys = address.anonymous or "access_key_id" in settings.config
    provider = None if has_keys else aws_credential_provider(address.profile)
    return options if provider is None else options | {"credential_provider": provider}


def _gs_config(address: CloudAddress, settings: CloudSettings) -> dict[str, Any]:
    config: dict[str, Any] = {"base_url": address.endpoint} if address.endpoint else {}
    return config | ({"skip_signature": True} if address.anonymous else {}) | dict(settings.config)


def _az_config(address: CloudAddress, settings: CloudSettings) -> dict[str, Any]:
    config: dict[str, Any] = {"endpoint": address.endpoint} if address.endpoint else {}
    config |= {"account_name": address.account} if address.account else {}
    return config | ({"skip_signature": True} if address.anonymous else {}) | dict(settings.config)


_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


def _endpoint(address: CloudAddress) -> str | None:
    if address.endpoint is not None:
        return address.endpoint
    return next((os.environ[name] for name in _ENDPOINT_VARIABLES[address.service] if os.environ.get(name)), None)


def is_own_endpoint(address: CloudAddress) -> bool:
    """True if the service is not the cloud vendor's own, so what it promises has to be seen."""
    endpoint = _endpoint(address)
    host = urlsplit(endpoint).hostname or "" if endpoint else ""
    return bool(host) and not host.endswith((".amazonaws.com", ".googleapis.com", ".core.windows.net"))


def _with_bucket(endpoint: str, bucket: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    return endpoint if rest.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{rest}"
