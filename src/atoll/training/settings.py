"""What all replicas of a run must have in common, and which numbers make sense at all."""

from __future__ import annotations

import logging
from types import NoneType
from typing import Any

from atoll.errors import ConfigError, InvalidSpec
from atoll.rounds.layout import CHUNK_MULTIPLE
from atoll.rounds.outer import OuterRule
from atoll.rounds.quorum import Quorum
from atoll.training.params import ModelVector
from atoll.training.stream import Stream

log = logging.getLogger("atoll.training")
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


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "eager": (bool, "True or False"),
    "error_feedback": ((bool, NoneType), "True, False or None"),
    "codec": ((str, NoneType), "the name of a codec"),
    "mean_codec": ((str, NoneType), "the name of a codec"),
    "outer": ((OuterRule, NoneType), "Nesterov(…) or Average()"),
}


def check_kinds(chunk: int | None, **given: object) -> None:
    """Raise `InvalidSpec` for what is not of the kind it must be, such as a text for a switch."""
    problems = [
        f"{name}={value!r}: {_KINDS[name][1]}"
        for name, value in given.items()
        if not isinstance(value, _KINDS[name][0])
    ]
    if chunk is not None and (
        isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1 or chunk % CHUNK_MULTIPLE
    ):
        problems.append(f"chunk={chunk!r}: a multiple of {CHUNK_MULTIPLE} elements")
    if problems:
        raise InvalidSpec("DiLoCo", problems)


def check_counts(**counts: int | None) -> None:
    """Raise `InvalidSpec` unless each is a whole number from 1; there may be no `checkpoint`."""
    problems = [
        f"{name}={value}: a whole number from 1"
        for name, value in counts.items()
        if not (_is_count(value) or (name == "checkpoint" and value is None))
    ]
    if problems:
        raise InvalidSpec("DiLoCo", problems)


def check_held(steps: int, inner_steps: int) -> None:
    """Raise `ConfigError` if training has gone on for so long that nobody can be holding rounds."""
    if steps >= 10 * inner_steps:
        raise ConfigError(f"{steps} optimizer steps without a round, inner_steps={inner_steps}", hint=_HOLD)


def warn_of_no_round(begun: int, steps: int, stride: int) -> None:
    """A replica that leaves with what it trained, and never met the others, is told so."""
    if begun or not steps:
        return
    few = f"a round is due after {stride}" if steps < stride else _HOLD
    log.warning("%d optimizer steps and no round: no other replica has any of what was trained here; %s", steps, few)


def _is_count(value: int | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
