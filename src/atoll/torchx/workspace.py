"""A workspace without docker: the folder goes to a store as a code bundle, and each replica unpacks it.

The image needs Python and Atoll with the extra of the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from atoll.bundle import build, upload
from atoll.errors import ConfigError
from atoll.registry import open_store, store_uri

_WITHOUT_DOCKER = (
    "if the image contains the code, use --workspace '' to send no folder; "
    "or set the option code_store to upload the folder to a store"
)


def upload_workspace(role: Any, workspace: str, code_store: str) -> None:
    """Upload the folder, unless the store has it, and let the role unpack it before its own command runs."""
    bundle = build(local_folder(workspace))
    uri = store_uri(code_store)
    upload(bundle, open_store(uri))
    before = ["-m", "atoll.torchx.unpack", uri, bundle.digest, "--", role.entrypoint]
    role.entrypoint, role.args = "python", [*before, *role.args]


@contextmanager
def docker_explained() -> Iterator[None]:
    """Say what to do where docker does not answer; a build that fails has an error of its own."""
    from docker.errors import DockerException

    try:
        yield
    except DockerException as exc:
        if type(exc) is not DockerException:
            raise
        message = f"docker, which puts the workspace into the image, does not answer: {exc}"
        raise ConfigError(message, hint=_WITHOUT_DOCKER, reason="no_docker") from exc


def local_folder(workspace: str) -> Path:
    """The folder of a workspace; only folders of this machine can be packed."""
    address = urlsplit(workspace)
    if address.scheme not in ("", "file"):
        raise ConfigError(f"the workspace `{workspace}` is not a folder of this machine", hint="leave code_store out")
    return Path(unquote(address.path) if address.scheme else workspace).expanduser()
