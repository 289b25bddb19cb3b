"""The address of a cloud store: a URI such as `s3://bucket/prefix?region=eu-west-1`, parsed and formatted.

The query has the options that every reader of the store needs. It never contains secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit

from atoll.errors import BadKey, ConfigError, did_you_mean
from atoll.stores.base import check_key

Service: TypeAlias = Literal["s3", "gs", "az"]

_SCHEMES: dict[str, Service] = {"s3": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az"}
_FOR_SERVICE: dict[Service, frozenset[str]] = {
    "s3": frozenset({"endpoint", "region", "path_style", "anonymous", "profile"}),
    "gs": frozenset({"endpoint", "anonymous"}),
    "az": frozenset({"endpoint", "account", "anonymous"}),
}
_YES, _NO = frozenset({"1", "true", "yes"}), frozenset({"0", "false", "no"})


@dataclass(frozen=True)
class CloudAddress:
    """A bucket (or container), a prefix in it, and the options of the service."""

    service: Service
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    account: str | None = None
    profile: str | None = None
    path_style: bool | None = None
    anonymous: bool = False

    @property
    def uri(self) -> str:
        path = f"{self.service}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        given = {name: value for name, value in sorted(self._options().items()) if value is not None}
        if not self.anonymous:
            del given["anonymous"]
        text = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
        return path + ("?" + urlencode(text, safe="/:") if text else "")

    def with_options(self, options: Mapping[str, Any]) -> CloudAddress:
        """This address with these options; raises `ConfigError` for unknown names and invalid values."""
        allowed = sorted(_FOR_SERVICE[self.service])
        for name in options:
            if name not in allowed:
                raise ConfigError(
                    f"a {self.service}:// store has no option `{name}`{did_you_mean(name, allowed)}",
                    reason="option",
                    hint=f"options: {', '.join(allowed)}; secrets come from the environment",
                )
        return _checked(replace(self, **{name: _value(name, value) for name, value in options.items()}))

    def path(self, key: str) -> str:
        """The full name of the object in the bucket."""
        full = f"{self.prefix}/{key}" if self.prefix else key
        if len(full.encode()) > 1024:
            raise BadKey(key, "the prefix of the store and the key have at most 1024 bytes together")
        return full

    def key(self, path: str) -> str:
        """The key of the object with this full name."""
        return path[len(self.prefix) + 1 :] if self.prefix else path

    def _options(self) -> dict[str, Any]:
        parts = {"service", "bucket", "prefix"}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in parts}


def parse_address(uri: str) -> CloudAddress:
    """The address in a URI. The path is not decoded: `%20` is three characters."""
    base, _, query = uri.partition("?")
    scheme, separator, rest = base.partition("://")
    if not separator or scheme not in _SCHEMES:
        hint = "write s3://…, gs://… or az://…"
        raise ConfigError(f"not the address of a cloud store: {base!r}", reason="scheme", hint=hint)
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not bucket or "@" in bucket or ":" in bucket:
        hint = f"write {scheme}://bucket/prefix; secrets never go in a URI"
        shown = f"{scheme}://…@{rest.rpartition('@')[2]}" if "@" in rest else base  # never a password
        raise ConfigError(f"no bucket in {shown!r}", reason="bucket", hint=hint)
    if prefix:
        try:
            check_key(prefix)
        except BadKey as exc:
            raise ConfigError(f"bad prefix in {base!r}: {exc.message}", reason="prefix") from exc
    options = dict(parse_qsl(query, keep_blank_values=True))
    return CloudAddress(_SCHEMES[scheme], bucket, prefix).with_options(options)


def _value(name: str, value: Any) -> Any:
    if name not in ("path_style", "anonymous"):
        return value
    text = str(value).lower()
    if text not in _YES | _NO:
        raise ConfigError(f"`{name}` is true or false, not {value!r}", reason=name)
    return text in _YES


def _checked(address: CloudAddress) -> CloudAddress:
    if address.endpoint is None:
        return address
    parts = urlsplit(address.endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc or parts.query:
        message = f"an endpoint is an http(s) URL without user or query, not {parts.scheme}://{parts.hostname or ''}"
        raise ConfigError(message, reason="endpoint")
    return replace(address, endpoint=address.endpoint.rstrip("/"))
