"""The processes of the controllers. Tests stop them, and start them with other settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import HTTPServer
from typing import Any

from services.kubernetes.build import Built
from services.kubernetes.control_plane import ControlPlane
from services.kubernetes.controllers.appwrapper import AppWrapper
from services.kubernetes.controllers.coscheduling import Coscheduling
from services.kubernetes.controllers.installation import Controller, Installation
from services.kubernetes.controllers.kueue import Kueue
from services.kubernetes.controllers.mcad import Mcad
from services.kubernetes.remote import handler
from services.programs import running, wait_until

Object = dict[str, Any]
CONTROLLERS: dict[str, Controller] = {
    "appwrapper": AppWrapper(),
    "kueue": Kueue(),
    "mcad": Mcad(),
    "coscheduling": Coscheduling(),
}


class Controllers:
    """Each public method is a request that a test can send."""

    def __init__(self, plane: ControlPlane, built: dict[str, Built]) -> None:
        self._installations = {name: Installation(name, plane, each) for name, each in built.items()}
        self._processes: dict[str, ExitStack] = {}
        self._settings: dict[str, Object] = {}
        for name, installation in self._installations.items():
            CONTROLLERS[name].install(installation)
        for name in self._installations:
            self.start(name)

    def start(self, name: str, settings: Object | None = None) -> None:
        """Start a controller that does not run, and wait until it is ready."""
        if name in self._processes:
            raise ValueError(f"{name} runs already")
        at, controller = self._installations[name], CONTROLLERS[name]
        log = at.folder / f"{name}.log"
        with ExitStack() as stack:
            process = stack.enter_context(running(controller.command(at, settings or {}), log=log))
            self._settings[name] = settings or {}
            wait_until(lambda: controller.is_ready(at), process, log, timeout_s=120)
            self._processes[name] = stack.pop_all()

    def stop(self, name: str) -> None:
        """Kill it. Its webhooks stay, so the API server refuses what they should look at."""
        if name in self._processes:
            self._processes.pop(name).close()

    def restart(self, name: str, settings: Object | None = None) -> None:
        self.stop(name)
        self.start(name, settings)

    def restore(self) -> None:
        """Make all run with their first settings again."""
        for name in self._installations:
            if name not in self._processes or self._settings[name]:
                self.restart(name)

    def log(self, name: str) -> str:
        """What a controller has written since it was started."""
        return (self._installations[name].folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for name in list(self._processes):
            self.stop(name)


@contextmanager
def started(plane: ControlPlane, built: dict[str, Built]) -> Iterator[Controllers]:
    with contextlib.closing(Controllers(plane, built)) as found:
        yield found


def server_for(controllers: Controllers) -> HTTPServer:
    """Serves the requests of tests in the thread that calls it.

    A controller ends with the thread that started it, so this server has no threads of its own.
    """
    return HTTPServer(("127.0.0.1", 0), handler(controllers))
