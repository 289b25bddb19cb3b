"""The settings of `atoll run --on modal` and of `atoll deploy modal`: their names, defaults and rules.

`validation.check_settings` reads the rules from the annotations before anything is sent. The rules between settings
(`ModalSettings.problems`) are part of a plan. The annotations are not kept as texts, which would be compiled again for
each check.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from atoll.executors.modal.errors import EXECUTOR
from atoll.executors.modal.machines import GPUS
from atoll.validation import OBJECT, Kind, a_list_of, a_table_of, between, is_number, is_text, settings_hint, shown

LONGEST_S = 86_400
"""Modal ends every call after a day."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


def _is_word(value: Any) -> bool:
    return is_text(value) and not any(map(str.isspace, value))


_NAMED = Kind(
    "a name of 1 to 64 letters, digits, dots, dashes and underscores",
    lambda value: isinstance(value, str) and _NAME.match(value) is not None,
)
_WORD = Kind("a text without spaces that is not empty", _is_word)
_MOUNT = Kind("a path from `/`", lambda value: _is_word(value) and value[0] == "/")
Name = Annotated[str, _NAMED]
Word = Annotated[str, _WORD]
Names = Annotated[Sequence[str], a_list_of(_NAMED)]
Words = Annotated[Sequence[str], a_list_of(_WORD)]
Seconds = Annotated[float, Kind(f"seconds above 0, at most {28 * 86_400}", between(1e-3, 28 * 86_400))]
Lag = Annotated[float, Kind(f"seconds from 0 to {LONGEST_S}", between(0, LONGEST_S))]
Client = Annotated[Any, OBJECT._replace(may_be_none=True)]


@dataclass(frozen=True)
class ModalSettings:
    """The settings of the deployed app and of a run on it. None, or an empty value, means that the user set none."""

    app: Name = "atoll"
    """The deployed app."""
    function: Annotated[
        str, Kind("a name of a function", lambda value: isinstance(value, str) and value.isidentifier())
    ] = "replica"
    """The function of the app that runs a replica."""
    environment: Name | None = None
    """The environment of the workspace; without it, that of the user's profile."""
    image: Word | None = None
    """`deploy`: the user's image in a registry, which contains Atoll. Without it, `deploy` makes one with pip."""
    packages: Words = ()
    """`deploy` without `image`: what pip installs besides Atoll, such as `torch`."""
    secrets: Names = ()
    """Secrets of the environment whose variables every replica gets, such as the credentials of the store."""
    volumes: Annotated[Mapping[str, str], a_table_of(_NAMED, key=_MOUNT)] = field(default_factory=dict)
    """Path in the container -> name of a volume."""
    region: Word | None = None
    cloud: Word | None = None
    prices: Annotated[
        Mapping[str, float],
        a_table_of(
            Kind("dollars an hour", lambda v: is_number(v) and v >= 0), key=_WORD._replace(known=lambda: sorted(GPUS))
        ),
    ] = field(default_factory=dict)
    """GPU -> dollars an hour; overrides the built-in table."""
    store_is_mounted: bool = False
    """Every replica sees the folder of a `file://` store under the same path, on a shared file system."""
    store_needs_no_secret: bool = False
    """Replicas can open the store without a secret of Modal: the image has the credentials, or nobody needs any."""

    @staticmethod
    def value_problems(given: Mapping[str, Any]) -> Iterator[str]:
        """A client that is not of the package `modal`, which reads attributes of it that are not public."""
        client = given.get("client")
        if client is not None and not any(
            each.__module__.partition(".")[0] == "modal" for each in type(client).__mro__
        ):
            yield f"client={shown(client)}: not a `modal.Client`, such as `modal.Client.from_env()`"

    def problems(self) -> Iterator[str]:
        """Settings that contradict each other."""
        if self.image and self.packages:
            yield f"packages={list(self.packages)}: pip adds nothing to image=`{self.image}`; use one of the two"


def plan_hint(problems: Sequence[str]) -> str | None:
    """Where to set what a refused plan needs; None if no problem is about a setting."""
    settings = ("store", *(each.name for each in fields(ModalSettings)))
    own = [each for each in problems if not each.startswith("secrets.")]  # those are of `--secret`
    return settings_hint(EXECUTOR) if any(each.startswith(settings) for each in own) else None
