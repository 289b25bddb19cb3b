"""AWS credentials that obstore does not find itself: profiles, SSO and the files under `~/.aws`.

The order is AWS's own: a profile asked for by name; keys in the environment; `AWS_PROFILE`; web identity (IRSA) and
container credentials (EKS Pod Identity, ECS); the default profile; the instance's role. Those without a file are
obstore's work, and it renews them; for the others botocore does, asked again every few minutes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError
from atoll.extras import require

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
