"""`atoll doctor modal`: checks whether a launch from this machine would work. The probe is a call of the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import atoll
from atoll.errors import AtollError, AuthError, RunNotFound
from atoll.executors.base import Check
from atoll.executors.modal.client import ModalClient
from atoll.executors.modal.settings import ModalSettings
from atoll.executors.modal.submit import DEPLOY_HINT, SECRET_HINT

_PROBE_S = 300.0
"""A first container pulls the image."""
_TOKEN_HINT = "set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or run `modal setup`"  # noqa: S105

_ENVIRONMENT_HINT = "`modal environment list` shows those of the workspace; set `environment`, or MODAL_ENVIRONMENT"


def setup_checks(client: ModalClient, settings: ModalSettings, *, environment: str | None) -> list[Check]:
    """Token, environment, secrets, the deployed function, and the version of Atoll in its image."""
    if problems := list(settings.problems()):
        return [Check("settings", False, "; ".join(problems), is_input=True)]
    modal, where = client.modal, {"environment_name": environment}

    def hello() -> None:
        client.connection.hello()

    token = _checked("token", client, hello, lambda _: "Modal accepts it", _TOKEN_HINT)
    if not token.ok:
        return [token]
    found = [token, _environment(client, environment)]
    if not found[-1].ok:
        return found
    for name in settings.secrets:

        def secret(name: str = name) -> Any:
            return modal.Secret.from_name(name, client=client.connection, **where).hydrate()

        found.append(_checked(f"secret {name}", client, secret, lambda _: "exists", SECRET_HINT))

    def function() -> Any:
        return modal.Function.from_name(settings.app, settings.function, client=client.connection, **where).hydrate()

    deployed = _checked("function", client, function, lambda _: f"{settings.app}.{settings.function}", DEPLOY_HINT)
    found.append(deployed)
    return [*found, _image(client, function)] if deployed.ok else found


def _environment(client: ModalClient, name: str | None) -> Check:
    """Whether the workspace has the environment. Without a name, Modal uses the default of the workspace."""
    if name is None:
        return Check("environment", True, "the default of the workspace")

    def look() -> Any:
        return client.modal.Environment.from_name(name, client=client.connection).hydrate()

    try:
        client.call("doctor", f"environment `{name}`", look)
    except (RunNotFound, AuthError) as exc:
        return Check("environment", False, exc.message, _ENVIRONMENT_HINT)
    except AtollError as exc:  # the checks of the function and of the secrets need it too
        return Check("environment", True, f"{name}; not checked: {exc.message}")
    return Check("environment", True, name)


def _image(client: ModalClient, function: Callable[[], Any]) -> Check:
    """Call the function: its container starts, has Atoll, and has the version of this machine."""

    def probe() -> Any:
        return function().spawn({"probe": True}).get(timeout=_PROBE_S)

    try:
        answer = client.call("doctor", "probe", probe, tries=1, timeout_s=_PROBE_S + 30)
    except AtollError as exc:
        return Check("image", False, exc.message, f"the function does not run; {DEPLOY_HINT}")
    except Exception as exc:  # noqa: BLE001  whatever the container raised
        return Check("image", False, f"{type(exc).__name__}: {exc}", f"the image needs Atoll; {DEPLOY_HINT}")
    version = answer.get("atoll") if isinstance(answer, dict) else None
    if version != atoll.__version__:
        message = f"it has Atoll {version}, and this machine {atoll.__version__}"
        return Check("image", False, message, "deploy it again: `atoll deploy modal`")
    return Check("image", True, f"Atoll {version}, Python {answer.get('python')}")


def _checked(name: str, client: ModalClient, send: Callable[[], Any], told: Callable[[Any], str], hint: str) -> Check:
    try:
        return Check(name, True, told(client.call("doctor", name, send)))
    except RunNotFound as exc:
        return Check(name, False, exc.message, hint)
    except AtollError as exc:
        return Check(name, False, exc.message, exc.hint or hint)
