"""What all replicas of a run must have in common, and which numbers make sense at all."""

from __future__ import annotations

import logging
from typing import Any

from atoll.errors import ConfigError
from atoll.rounds.outer import OuterRule
from atoll.rounds.quorum import Quorum
from atoll.training.params import ModelVector
from atoll.training.stream import Stream

log = logging.getLogger("atoll.training")
_STEP = "call `step()` of the optimizer that DiLoCo was given"
_HOLD = "iterate over `outer.steps(batches, rounds=…)`, or call `outer.step()` in your loop"


def agreed_settings(
    rule: OuterRule, inner_steps: int, stream: Stream, vector: ModelVector, quorum: Quorum
) -> dict[str, Any]:
    """What must be equal on every replica besides the layout."""
    settings: dict[str, Any] = {"outer": rule.to_json(), "inner_steps": inner_steps, "least": quorum.least}
    if not stream.is_settled:
        settings["stream"] = stream.to_json()
    places = list(zip(vector.averaged_from, vector.fragments, strict=True))
    if any(middle < whole.stop for middle, whole in places):
        tails = [middle - whole.start for middle, whole in places]
        settings["averaged_from"] = tails[0] if len(tails) == 1 else tails
    if frozen := vector.frozen_digest():
        settings["frozen_parameters"] = frozen
    return settings


def check_held(steps: int, inner_steps: int) -> None:
    """Raise `ConfigError` if training has gone on for so long that nobody can be holding rounds."""
    if steps >= 10 * inner_steps:
        raise ConfigError(f"{steps} optimizer steps without a round, inner_steps={inner_steps}", hint=_HOLD)


def check_trained(idle: int, inner_steps: int) -> None:
    """Raise `ConfigError` if so many passes of the loop had no optimizer step that it cannot be to add up gradients."""
    if idle >= max(1000, 10 * inner_steps):
        raise ConfigError(f"{idle} passes of the training loop without an optimizer step: no round is due", hint=_STEP)


def warn_of_no_round(begun: int, steps: int, stride: int) -> None:
    """A replica that leaves with what it trained, and never met the others, is told so."""
    if begun or not steps:
        return
    few = f"a round is due after {stride}" if steps < stride else _HOLD
    log.warning("%d optimizer steps and no round: no other replica has any of what was trained here; %s", steps, few)
