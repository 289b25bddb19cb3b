"""The executor of a part whose own executor cannot be made on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NoReturn

from atoll.context import RunContext
from atoll.errors import ConfigError
from atoll.executors.base import Capabilities, Plan
from atoll.handle import RunHandle
from atoll.spec import Placement
from atoll.status import RunStatus


class Unusable:
    """Raises the same error for every call, so that the other parts can be asked and stopped."""

    name: ClassVar[str] = ""
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, name: str, problem: ConfigError) -> None:
        self._problem = problem
        self.name = name  # type: ignore[misc]

    def plan(self, context: RunContext, placement: Placement) -> Plan:
        self._fail(context, placement)

    def submit(self, plan: Plan) -> RunHandle:
        self._fail(plan)

    def status(self, handle: RunHandle) -> RunStatus:
        self._fail(handle)

    def cancel(self, handle: RunHandle, ranks: Sequence[int] | None = None) -> None:
        self._fail(handle, ranks)

    def logs(self, handle: RunHandle, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
        self._fail(handle, rank, tail, follow)

    def _fail(self, *_: object) -> NoReturn:
        raise self._problem
