"""Names to adapters: built in, or added by third parties through entry points. Each is imported on first use."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.arguments import keyword_problems, shown
from atoll.errors import ConfigError, UnknownName
from atoll.installing import install_command

if TYPE_CHECKING:
    from atoll.executors.base import Executor
    from atoll.stores.base import Store


class Row(NamedTuple):
    """Where an adapter lives, and which extra it needs."""

    path: str
    extra: str | None = None


EXECUTORS: dict[str, Row] = {
    "local": Row("atoll.executors.local.executor:LocalExecutor"),
    "sagemaker": Row("atoll.executors.sagemaker.executor:SageMakerTrainingExecutor", "sagemaker"),
}

STORES: dict[str, Row] = {
    "memory": Row("atoll.stores.memory:MemoryStore"),
    "file": Row("atoll.stores.file.store:FileStore"),
    "s3": Row("atoll.stores.cloud.store:CloudStore", "cloud"),
    "gs": Row("atoll.stores.cloud.store:CloudStore", "cloud"),
    "gcs": Row("atoll.stores.cloud.store:CloudStore", "cloud"),
    "az": Row("atoll.stores.cloud.store:CloudStore", "cloud"),
    "azure": Row("atoll.stores.cloud.store:CloudStore", "cloud"),
}

ANY_OTHER_STORE = Row("atoll.stores.fsspec:FsspecStore", "fsspec")
"""For a scheme that nobody has claimed, if fsspec knows it."""

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.S)
"""What becomes of an address in a `Path`: `s3:/bucket`."""
_NEARLY = re.compile(rf"({'|'.join(STORES)}):(?!//)/?(.+)", re.S)
"""An address that lacks a slash. A folder may be called so, but then it is there."""


def executor(name: str, **settings: Any) -> Executor:
    """The executor called `name`, built with `settings`; did-you-mean on a name or setting that does not exist."""
    plain = name.replace("-", "_")
    adapter = load("executor", plain)
    try:
        return adapter(**settings)  # type: ignore[no-any-return]
    except TypeError as exc:
        problems = keyword_problems(adapter, settings)
        raise ConfigError(f"settings of executor `{name}`: {'; '.join(problems) or exc}") from exc


def open_store(uri: str | os.PathLike[str], **options: Any) -> Store:
    """The store at `uri`: `memory://name`, `file:///path`, a plain path, `s3://bucket/prefix`, …"""
    address = store_uri(uri)
    adapter = load("store", address.partition("://")[0])
    return adapter.from_uri(address, **options)  # type: ignore[no-any-return]


def store_uri(given: str | os.PathLike[str]) -> str:
    """What is given as a full URI: a path without a scheme is a folder here."""
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not text or not isinstance(text, str):
        rule = "a URI or a path, such as `./runs` or `s3://bucket/prefix`"
        raise ConfigError(f"a store is {rule}, not {shown(given)}")
    if text is not given and (mistaken := _ADDRESS.match(text)):
        meant = f"{mistaken[1]}://{mistaken[2]}"
        raise ConfigError(f"store `{text}`: a `Path` cannot hold an address", hint=f"give it as text: '{meant}'")
    if (mistaken := _NEARLY.match(text)) and not os.path.isdir(text):
        slashes = "///" if mistaken[1] == "file" else "//"
        raise ConfigError(f"store `{text}`: an address has `://`", hint=f"write '{mistaken[1]}:{slashes}{mistaken[2]}'")
    if "://" in text:
        return text.rstrip("/") if not text.endswith("://") else text
    from urllib.parse import quote

    path = os.path.abspath(os.path.expanduser(text))
    _refuse_options(text, path)
    return "file://" + quote(path)


def _refuse_options(text: str, path: str) -> None:
    """A path has no options. Who writes them wants them, and not a folder that is called so; unless there is one."""
    folder, mark, options = path.rpartition("?")
    if not mark or "=" not in options or "/" in options or os.path.isdir(path):
        return
    from urllib.parse import quote

    uri = f"file://{quote(folder)}?{options}"
    raise ConfigError(f"store `{text}`: a plain path takes no options", hint=f"write it as a URI: '{uri}'")


def known(kind: str) -> dict[str, Row]:
    """Every adapter of a kind (`executor` or `store`), the built-in ones first."""
    return {**_built_in(kind), **_plugins(kind)}


def load(kind: str, name: str) -> Any:
    """The adapter class; a plug-in that does not load says so when it is used, and never before."""
    row = _built_in(kind).get(name) or _plugins(kind).get(name)
    if row is None and kind == "store":
        row = _any_other_store(name)
    if row is None:
        hint = f"other fsspec file systems: {install_command('fsspec')}" if kind == "store" else None
        raise UnknownName(kind, name, sorted(known(kind)), hint=hint)
    module, _, attribute = row.path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"{kind} `{name}` ({row.path}) does not load: {exc}") from exc


def _built_in(kind: str) -> dict[str, Row]:
    return EXECUTORS if kind == "executor" else STORES


def _any_other_store(scheme: str) -> Row | None:
    try:
        from fsspec.registry import known_implementations  # type: ignore[import-untyped]
    except ImportError:
        return None
    return ANY_OTHER_STORE if scheme in known_implementations else None


@cache
def _plugins(kind: str) -> dict[str, Row]:
    from importlib.metadata import entry_points

    return {point.name: Row(point.value) for point in entry_points(group=f"atoll.{kind}s")}
