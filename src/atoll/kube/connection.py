"""Where the cluster is and who asks: a private configuration of the official client.

An explicit kubeconfig or context comes first, then the token of the pod that this process runs in, then the default
kubeconfig. The global configuration of the client is never read or changed. The client is used as transport only:
its connection pool, its TLS settings and its token plug-ins. Its models differ between versions, so that bodies are
plain dicts, and answers plain JSON.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from atoll.errors import ConfigError, InvalidSpec
from atoll.registry import require
from atoll.validation import TEXT, shown

EXTRA = "kubernetes"
_PLACE = "set KUBECONFIG, or the settings `kubeconfig` and `context` (`kubectl config get-contexts`)"
_PLUGIN = "log in again, such as with `aws sso login`; `kubectl get pods` runs the same plug-in of the kubeconfig"
_DEFAULT = "~/.kube/config"
POD_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Kubernetes mounts the token and the namespace of a pod here."""
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")
_NEEDED = ("configuration.host", "configuration.auth_settings", "rest_client.pool_manager.request")


class Connection:
    """The address, the pool and the credentials of one cluster."""

    def __init__(self, *, kubeconfig: str | None = None, context: str | None = None, api_client: Any = None) -> None:
        self._kubeconfig, self._context, self._given = kubeconfig, context, given_client(api_client)
        self._made: Any = None

    @property
    def is_given(self) -> bool:
        """Whether the caller gave the client; then its credentials are not read again."""
        return self._given is not None

    @property
    def client(self) -> Any:
        """The `ApiClient`; made at the first request."""
        if self._given is not None:
            return self._given
        if self._made is None:
            self._made = self._new_client()
        return self._made

    @property
    def host(self) -> str:
        """The address of the API server."""
        return str(self.client.configuration.host).rstrip("/")

    @property
    def pool(self) -> Any:
        """The connection pool of urllib3."""
        return self.client.rest_client.pool_manager

    def headers(self) -> dict[str, str]:
        """Credentials and agent; a token that is about to expire is renewed here by the client's own hook."""
        client = self.client
        found = {str(name): str(value) for name, value in dict(getattr(client, "default_headers", {})).items()}
        with _heard():
            settings = client.configuration.auth_settings()
        for each in settings.values():
            if each.get("in") == "header" and each.get("value"):
                found[str(each["key"])] = str(each["value"])
        return found

    def renew(self) -> None:
        """Read the configuration again: the user may have logged in since, or a token file has changed."""
        self._made = None

    def _new_client(self) -> Any:
        config, client = require("kubernetes.config", extra=EXTRA), require("kubernetes.client", extra=EXTRA)
        private = client.Configuration()
        private.proxy = private.no_proxy = None  # versions of the client read different variables
        load: Callable[[], Any]
        if self._is_in_pod:
            load = lambda: config.load_incluster_config(client_configuration=private)  # noqa: E731
        else:
            # The client reads KUBECONFIG only once, when it is imported.
            file = self._kubeconfig or os.environ.get("KUBECONFIG") or None
            load = lambda: config.load_kube_config(  # noqa: E731
                config_file=file, context=self._context, client_configuration=private, persist_config=False
            )
        try:
            with _heard() as errors:
                load()
        except Exception as exc:  # the classes differ between versions, and a plug-in may raise anything
            files = self._kubeconfig or os.environ.get("KUBECONFIG") or _DEFAULT
            message = f"cannot find the cluster in `{files}`: {' '.join(str(exc).split())}"
            raise ConfigError(message, reason="kubeconfig", hint=_PLACE) from exc
        if errors and not private.api_key and not private.cert_file:
            raise ConfigError(f"cannot log in to the cluster: {errors[-1]}", reason="login", hint=_PLUGIN)
        private.proxy = self._own_proxy
        if private.proxy is None:
            private.proxy = environment_proxy(str(private.host))
            private.no_proxy = getproxies_environment().get("no")
        made = client.ApiClient(configuration=private)
        weakref.finalize(self, made.rest_client.pool_manager.clear)  # close idle connections when nobody uses them
        return made

    @property
    def _is_in_pod(self) -> bool:
        return self._kubeconfig is None and self._context is None and is_in_cluster()

    @property
    def _own_proxy(self) -> str | None:
        """The proxy that the kubeconfig names for the cluster; versions of the client before 37 do not read it."""
        found = None if self._is_in_pod else _chosen(self._kubeconfig, self._context)[2].get("proxy-url")
        return str(found) if found else None

    @cached_property
    def place(self) -> Place:
        """The context that is used, None without a kubeconfig, and the namespace of runs that name none."""
        if self._given is not None:
            return Place(None, "default")
        if self._is_in_pod:
            try:
                with open(os.path.join(POD_FOLDER, "namespace"), encoding="utf-8") as file:
                    return Place(None, file.read().strip() or "default")
            except OSError:
                return Place(None, "default")
        return place_of(self._kubeconfig, self._context)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """The errors that the client logs in this block: it does not raise if a plug-in of the kubeconfig fails."""
    found: list[str] = []
    handler, thread = logging.Handler(logging.ERROR), threading.get_ident()
    handler.addFilter(lambda record: record.name == "root" and record.thread == thread)
    handler.emit = lambda record: found.append(" ".join(record.getMessage().split()))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


def given_client(found: Any) -> Any:
    """The `ApiClient` of an injected `ApiClient`, `BatchV1Api` or `CoreV1Api`; `InvalidSpec` names what it lacks."""
    if found is None:
        return None
    client = getattr(found, "api_client", found)
    missing = next((path for path in _NEEDED if _at(client, path) is None), None)
    rule = None
    if missing is not None:
        rule = f"has no `{missing}`, nor an `api_client` that has it"
    elif not TEXT.fits(client.configuration.host):
        rule = f"its `configuration.host` is {shown(client.configuration.host)}, not the address of a cluster"
    if rule is not None:
        raise InvalidSpec("the given client", [f"api_client={shown(found)}: {rule}"])
    return client


def _at(found: Any, path: str) -> Any:
    """The attribute of an attribute; None if there is none."""
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def is_in_cluster() -> bool:
    """Whether this process runs in a pod with a token."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and os.path.exists(os.path.join(POD_FOLDER, "token"))


class Place(NamedTuple):
    """A context of a kubeconfig and its namespace."""

    context: str | None
    namespace: str


def place_of(kubeconfig: str | None, context: str | None) -> Place:
    """The context, or the current one, and its namespace, or `default`. Reads the files only."""
    current, chosen, _ = _chosen(kubeconfig, context)
    return Place(current, str(chosen.get("namespace") or "default"))


def environment_proxy(host: str) -> str | None:
    """The proxy that the environment names for this address; none for this machine, as with `kubectl`."""
    address = urlsplit(host)
    if _LOOPBACK.fullmatch(address.hostname or ""):
        return None
    found = getproxies_environment()
    return found.get(address.scheme) or found.get("all")


def _chosen(kubeconfig: str | None, context: str | None) -> tuple[str | None, Mapping[str, Any], Mapping[str, Any]]:
    """The name of the context, or of the current one, its fields and those of its cluster."""
    yaml = require("yaml", extra=EXTRA)
    paths = [kubeconfig] if kubeconfig else (os.environ.get("KUBECONFIG") or _DEFAULT).split(os.pathsep)
    current, found = context, dict[tuple[str, str], Any]()
    for path in paths:
        try:
            with open(os.path.expanduser(path), encoding="utf-8") as file:
                data = yaml.safe_load(file)
        except (OSError, yaml.YAMLError, UnicodeDecodeError):
            continue
        if isinstance(data, dict):
            current = current or data.get("current-context")
            for kind in ("context", "cluster"):
                for each in data.get(f"{kind}s") or []:
                    found.setdefault((kind, str(each.get("name"))), each.get(kind) or {})
    chosen = found.get(("context", str(current))) or {}
    return current, chosen, found.get(("cluster", str(chosen.get("cluster")))) or {}
