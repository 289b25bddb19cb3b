"""Executors and stores by name, built in or from entry points of other packages; each is imported on first use.

Also the import of optional packages (`require`), and the `pip` command that installs what is missing.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.errors import ConfigError, MissingExtra, UnknownName
from atoll.validation import check_settings, settings_hint, shown

if TYPE_CHECKING:
    from atoll.executors.base import Executor
    from atoll.stores.base import Store


class Row(NamedTuple):
    """The import path of an adapter, and the extra that it needs."""

    path: str
    extra: str | None = None


EXECUTORS: dict[str, Row] = {
    "local": Row("atoll.executors.local.executor:LocalExecutor"),
    "sagemaker": Row("atoll.executors.sagemaker.executor:SageMakerTrainingExecutor", "sagemaker"),
    "kubernetes": Row("atoll.executors.kubernetes.executor:KubernetesExecutor", "kubernetes"),
    "appwrapper": Row("atoll.executors.appwrapper.executor:AppWrapperExecutor", "kubernetes"),
    "hf_jobs": Row("atoll.executors.hf_jobs.executor:HubJobsExecutor", "hf"),
    "modal": Row("atoll.executors.modal.executor:ModalExecutor", "modal"),
    "join": Row("atoll.executors.join.executor:JoinExecutor"),
    "ssh": Row("atoll.executors.ssh.executor:SshExecutor"),
    "several": Row("atoll.executors.several.executor:SeveralExecutor"),
}
ALIASES = {"eks": "kubernetes", "mcad": "appwrapper"}
"""Other names of executors."""
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
"""For a scheme that has no adapter, if fsspec supports it."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.S)
"""A URI that went through `Path`: `s3:/bucket`."""
_NEARLY = re.compile(rf"({'|'.join(STORES)})(?::(?!//)/?|//)(?=[^/])(.+)", re.S)
"""A URI that lacks a slash or its colon; accepted if a folder of this name exists."""


def executor(name: str, /, **settings: Any) -> Executor:
    """The executor `name`, created with `settings`; an unknown name or a wrong setting is an error."""
    plain = plain_name(name)
    adapter = load("executor", plain)
    checked = check_settings(plain, settings, adapter, getattr(adapter, "settings_class", None))
    try:
        return adapter(**checked)  # type: ignore[no-any-return]
    except TypeError as exc:  # a setting without an annotation
        raise ConfigError(f"settings of executor `{name}`: {exc}", hint=settings_hint(plain)) from exc


def plain_name(name: str) -> str:
    """The name of an executor, for a name as a user writes it: `eks`, `hf-jobs`."""
    return ALIASES.get(name, name).replace("-", "_")


def open_store(uri: str | os.PathLike[str], **options: Any) -> Store:
    """The store at `uri`: `memory://name`, `file:///path`, a plain path, `s3://bucket/prefix`, …"""
    address = store_uri(uri)
    adapter = load("store", address.partition("://")[0])
    return adapter.from_uri(address, **options)  # type: ignore[no-any-return]


def store_uri(given: str | os.PathLike[str]) -> str:
    """The full URI of a store; a path without a scheme is a folder on this machine."""
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

    try:
        path = os.path.abspath(os.path.expanduser(text))
    except FileNotFoundError as exc:
        what = f"store `{text}`: the working folder, in which this path begins, was deleted"
        raise ConfigError(what, hint="cd to another one, or give the whole path") from exc
    _refuse_options(text, path)
    return "file://" + quote(path)


def _refuse_options(text: str, path: str) -> None:
    """Refuse `path?key=value`: options need a URI. A folder of exactly this name is accepted."""
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
    """The adapter class. A plug-in that cannot be imported raises `ConfigError` here, not earlier."""
    row = _built_in(kind).get(name) or _plugins(kind).get(name)
    if row is None and kind == "store":
        row = _any_other_store(name)
    if row is None:
        hint = f"other fsspec file systems: {install_command('fsspec')}" if kind == "store" else None
        others = ALIASES if kind == "executor" else ()
        raise UnknownName(kind, name, sorted({*known(kind), *others}), hint=hint)
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


def require(module: str, *, extra: str) -> ModuleType:
    """Import a module of an optional package; `MissingExtra` names the extra that installs it."""
    try:
        return import_module(module)
    except ImportError as exc:
        package = module.partition(".")[0]
        is_absent = isinstance(exc, ModuleNotFoundError) and (exc.name or "").partition(".")[0] == package
        raise MissingExtra(package, extra=extra, problem="" if is_absent else str(exc)) from exc


def install_command(extra: str) -> str:
    """The command that installs an extra of Atoll, such as `pip install 'atoll[train]'`."""
    return f"pip install {requirement(Path(__file__), f'[{extra}]')}"


def reinstall_command() -> str:
    """The command that builds and installs Atoll again."""
    return f"pip install --force-reinstall --no-deps {requirement(Path(__file__))}"


def requirement(module: Path, extra: str = "") -> str:
    """The requirement for pip that installs this copy of Atoll again, from its source: a clone, a URL or an index."""
    import shlex

    root = checkout(module)
    if root is not None:
        return f"-e {shlex.quote(f'{_from_here(root)}{extra}')}"
    return shlex.quote(_named(_direct_url(module), extra))


def checkout(module: Path) -> Path | None:
    """The folder of the clone that contains `module`; None for an installed copy."""
    source = module.absolute().parents[1]
    return source.parent if source.name == "src" and (source.parent / "pyproject.toml").is_file() else None


def _named(origin: dict[str, Any], extra: str) -> str:
    """A requirement for pip; the name alone if the copy came from an index."""
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    url = str(origin.get("url", ""))
    if not url:
        return f"atoll{extra}"
    if url.startswith("file://") and "vcs_info" not in origin:
        return f"{_from_here(Path(url2pathname(urlsplit(url).path)))}{extra}"
    vcs = origin.get("vcs_info", {})
    prefix = f"{vcs['vcs']}+" if "vcs" in vcs else ""
    revision = f"@{vcs['requested_revision']}" if "requested_revision" in vcs else ""
    return f"atoll{extra} @ {prefix}{url}{revision}"


def _direct_url(module: Path) -> dict[str, Any]:
    """The `direct_url.json` that pip wrote for this copy; empty for a copy from an index."""
    import json
    from importlib.metadata import distributions

    folder = str(module.absolute().parents[1])
    for found in distributions(name="atoll", path=[folder]):
        try:
            written = json.loads(found.read_text("direct_url.json") or "{}")
        except ValueError:
            return {}
        return written if isinstance(written, dict) else {}
    return {}


def _from_here(root: Path) -> str:
    try:
        return "." if os.path.samefile(root, os.curdir) else str(root)
    except OSError:  # the working folder was deleted, or the clone
        return str(root)
