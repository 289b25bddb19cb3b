"""`atoll deploy modal`: deploys the app of Atoll with the function `replica`, from the user's image or one made by pip.

The image has Atoll; nothing of this machine is mounted, so that a container runs what was deployed. A development copy
of Atoll is the exception: its source is copied into the image, because no index has it.
"""

from __future__ import annotations

import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import atoll
from atoll.errors import ConfigError, InvalidSpec, RunNotFound
from atoll.executors.base import Deployment
from atoll.executors.modal.client import ModalClient
from atoll.executors.modal.settings import LONGEST_S, ModalSettings
from atoll.executors.modal.submit import SECRET_HINT
from atoll.registry import checkout, requirement

_DEPLOY_S = 3600.0
"""A first deployment builds the image."""
_EXTRAS = ("aws", "train")
"""What the replicas need of Atoll besides itself: a store, and the training loop."""


def deploy_app(client: ModalClient, settings: ModalSettings, *, environment: str | None) -> Deployment:
    """Build the image, if Modal does not have it, and deploy the function."""
    if problems := list(settings.problems()):
        raise InvalidSpec("deploy", problems)
    from atoll.executors.modal.app import replica

    modal, where = client.modal, {"environment_name": environment}

    def send() -> str:
        app = modal.App(settings.app)
        app.function(
            name=settings.function,
            image=_image(modal, settings),
            timeout=LONGEST_S,
            retries=0,
            include_source=False,
            secrets=[modal.Secret.from_name(name, **where) for name in settings.secrets],
            volumes={path: modal.Volume.from_name(name, **where) for path, name in settings.volumes.items()},
            region=settings.region,
            cloud=settings.cloud,
        )(replica)
        app.deploy(tag=_tag(atoll.__version__), client=client.connection, **where)
        return str(app.app_id)

    what = f"deploy app `{settings.app}`"
    try:
        app_id = client.call("deploy", what, send, tries=1, timeout_s=_DEPLOY_S)
    except RunNotFound as exc:  # a secret or a volume that the settings name
        raise ConfigError(exc.message, reason="not_found", hint=SECRET_HINT) from exc
    place = f" in environment `{environment}`" if environment else ""
    message = f"function `{settings.function}` of app `{settings.app}`{place}, from {_origin(settings)}"
    return Deployment(settings.app, atoll.__version__, message, f"https://modal.com/id/{app_id}")


def _image(modal: Any, settings: ModalSettings) -> Any:
    """The user's image, or a small one with Atoll and the given packages."""
    if settings.image:
        return modal.Image.from_registry(settings.image)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    plain = modal.Image.debian_slim(python_version=python)
    module = Path(atoll.__file__)
    if checkout(module) is None:
        return plain.pip_install(f"{requirement(module, _named_extras())}", *settings.packages)
    copied = plain.pip_install(*_requirements(), *settings.packages)
    return copied.add_local_python_source("atoll", copy=True)


def _requirements() -> list[str]:
    """What the installed copy of Atoll requires, with the extras of a replica."""
    found = []
    for line in requires("atoll") or []:
        need, _, condition = line.partition(";")
        if not condition or any(f"'{extra}'" in condition.replace('"', "'") for extra in _EXTRAS):
            found.append(need.strip())
    return found


def _named_extras() -> str:
    return f"[{','.join(_EXTRAS)}]"


def _origin(settings: ModalSettings) -> str:
    if settings.image:
        return f"image `{settings.image}`"
    with_more = f" and {', '.join(settings.packages)}" if settings.packages else ""
    return f"an image with Atoll {atoll.__version__}{with_more}"


def _tag(version: str) -> str:
    """The version as a tag of the deployment: letters, digits, dashes, dots and underscores."""
    return "".join(char if char.isalnum() or char in "-._" else "-" for char in f"atoll-{version}")[:50]
