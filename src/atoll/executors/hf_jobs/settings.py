"""The settings of `atoll run --on hf_jobs`: their names, defaults and rules.

`validation.check_settings` reads the rules from the annotations before anything is created. The rules between settings
(`JobSettings.problems`) are part of a plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from atoll.executors.hf_jobs.errors import EXECUTOR
from atoll.validation import OBJECT, Kind, a_list_of, a_table_of, between, is_text, settings_hint, shown

_LONGEST_S = 28 * 86_400
_NEEDED_CALLS = ("run_job", "list_jobs", "inspect_job", "cancel_job")
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,63}")


def _is_word(value: Any) -> bool:
    return is_text(value) and not any(map(str.isspace, value))


def matches(pattern: str) -> Any:
    """A test for texts that match the whole pattern."""
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


_VARIABLE = Kind("the name of a variable such as `AWS_ACCESS_KEY_ID`", matches(r"[A-Za-z_][A-Za-z0-9_]*"))
_LABEL_TEXT = Kind("1 to 63 letters, digits, `.`, `_` and `-`", matches(_LABEL.pattern))
Word = Annotated[str, Kind("a text without spaces that is not empty", _is_word)]
Namespace = Annotated[str, Kind("a user or an organization such as `my-team`", matches(r"[A-Za-z0-9][A-Za-z0-9._-]*"))]
Flavor = Annotated[str, Kind("a flavor such as `a10g-small`", matches(r"[a-z0-9][a-z0-9.-]*"))]
Endpoint = Annotated[str, Kind("an address such as `https://huggingface.co`", matches(r"https?://[^\s/]\S*"))]
Names = Annotated[Sequence[str], a_list_of(_VARIABLE)]
Labels = Annotated[Mapping[str, str], a_table_of(_LABEL_TEXT, key=_LABEL_TEXT)]
Seconds = Annotated[float, Kind(f"seconds above 0, at most {_LONGEST_S}", between(1e-3, _LONGEST_S))]
Lag = Annotated[float, Kind(f"seconds from 0 to {_LONGEST_S}", between(0, _LONGEST_S))]
Client = Annotated[Any, OBJECT._replace(may_be_none=True)]


@dataclass(frozen=True)
class JobSettings:
    """The settings of a job. None, or an empty value, means that the user did not set it."""

    image: Word = ""
    """A Docker image, or a Space such as `hf.co/spaces/team/trainer`, for placements that name none. It has Atoll."""
    namespace: Namespace | None = None
    """The user or the organization that runs and pays for the jobs."""
    flavor: Flavor | None = None
    """The machine of each replica. Without it, the cheapest one with the GPU of the run, or `cpu-basic`."""
    secrets: Names = ()
    """Variables of this process that each job gets as secrets. `HF_TOKEN` may also be the token of the login."""
    labels: Labels = field(default_factory=dict)
    """More labels of each job."""
    network: bool = False
    """Let the replicas of a run reach each other, as `rank-0`, `rank-1`, …"""
    store_is_mounted: bool = False
    """Every replica sees the folder of a `file://` store under the same path, on a shared file system."""
    store_is_open: bool = False
    """Replicas can open the store without secrets of this run: it is public, or the image has credentials."""

    @staticmethod
    def value_problems(given: Mapping[str, Any]) -> Iterator[str]:
        """A client without the calls that are always needed."""
        client = given.get("client")
        lacking = [verb for verb in _NEEDED_CALLS if client is not None and not callable(getattr(client, verb, None))]
        if lacking:
            yield f"client={shown(client)}: has no {', '.join(f'`{verb}`' for verb in lacking)}"

    def problems(self, *, has_image: bool) -> Iterator[str]:
        """Settings that are missing or would be ignored."""
        if not has_image and not self.image:
            yield "image: not set; a job needs one, with Atoll installed"
        if self.namespace is None:
            yield "namespace: not set; name your user or an organization, which pays for the jobs"
        ours = [name for name in self.labels if name.startswith("atoll") or name in ("name", "managed-by")]
        yield from (f"labels.{name}: this label is set by Atoll" for name in ours)


def plan_hint(problems: Sequence[str]) -> str | None:
    """Where to set what a refused plan needs; None if no problem is about a setting."""
    settings = tuple(field.name for field in fields(JobSettings))
    own = [each for each in problems if not each.startswith("secrets.")]  # those are of `--secret`
    return settings_hint(EXECUTOR) if any(each.startswith(settings) for each in own) else None
