"""What the peer keeps: apps, functions and their bound variants, secrets, calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from threading import Event, Lock, Thread
from typing import Any

from services.modal.call import Call, Zygote

DEFAULT_TIMEOUT_S = 300.0


@dataclass
class Function:
    """A deployed function, or one with other options."""

    function_id: str
    app: str
    name: str
    module: str
    implementation: str = ""
    """The attribute of the module, if it is not the name."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    is_published: bool = True
    definition: Any = None
    """The function of the request that deployed it."""
    options: dict[str, Any] = field(default_factory=dict)
    """What was bound: `gpu`, `cpu`, `memory`, `timeout`, `secrets`, `retries`, `region`, `volumes`."""


class Engine:
    """Calls by id. `admits` is cleared while no container may start."""

    def __init__(self, zygote: Zygote) -> None:
        self.zygote = zygote
        self.admits = Event()
        self.admits.set()
        self.calls: dict[str, Call] = {}
        self.functions: dict[str, Function] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        self.volumes: set[str] = set()
        self.environments: set[str] = {"main"}
        self.images: list[list[str]] = []
        """The commands of every image that was asked for."""
        self.tag = ""
        """The tag of the last deployment."""
        self.apps: dict[str, str] = {}
        """Name -> app id."""
        self._lock = Lock()
        self._numbers = itertools.count(1)

    def new_id(self, kind: str) -> str:
        with self._lock:
            return f"{kind}-{next(self._numbers):022d}"

    def deploy(self, app: str, name: str, module: str, *, function_id: str = "", **more: Any) -> Function:
        """A function of an app; a later one of the same name replaces it."""
        self.apps.setdefault(app, self.new_id("ap"))
        made = Function(function_id or self.new_id("fu"), app, name, module, **more)
        self.functions[made.function_id] = made
        return made

    def publish(self, function_ids: Iterable[str], *, tag: str) -> None:
        """Let launchers find these functions."""
        self.tag = tag
        for function_id in function_ids:
            self.functions[function_id].is_published = True

    def find(self, app: str, name: str) -> Function | None:
        """The newest deployed function of this name."""
        deployed = [each for each in self.functions.values() if each.is_published and not each.options]
        found = [each for each in deployed if (each.app, each.name) == (app, name)]
        return found[-1] if found else None

    def bind(self, function: Function, options: Mapping[str, Any]) -> Function:
        merged = {**function.options, **options}
        timeout_s = float(merged.get("timeout") or function.timeout_s)
        made = replace(function, function_id=self.new_id("fu"), timeout_s=timeout_s, options=merged)
        self.functions[made.function_id] = made
        return made

    def spawn(self, function: Function, data: bytes, data_format: int, *, call_id: str = "") -> Call:
        variables: dict[str, str] = {}
        for secret in function.options.get("secrets", ()):
            variables |= self.secrets[secret]
        call = Call(call_id or self.new_id("fc"), function, data, data_format, variables, self.zygote)
        self.calls[call.call_id] = call
        Thread(target=call.life, args=(self.admits,), daemon=True, name=f"peer-{call.call_id}").start()
        return call

    def close(self) -> None:
        """End every call."""
        for call in self.calls.values():
            call.kill()
        self.admits.set()
        for call in self.calls.values():
            call.wait(30)
