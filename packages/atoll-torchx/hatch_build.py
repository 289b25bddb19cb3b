"""Keeps the order of the entry points: TorchX takes the first scheduler for its default, and Hatch sorts by name."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_GROUP, _DEFAULT = "torchx.schedulers", "local_docker"


class InOrder(BuildHookInterface[Any]):
    """Puts the default scheduler of TorchX first."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        found = self.metadata.core.entry_points[_GROUP]
        others = {name: found.pop(name) for name in list(found) if name != _DEFAULT}
        found.update(others)
