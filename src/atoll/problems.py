"""Problems that do not depend on each other, told together: nobody should mend one only to meet the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from atoll.errors import ConfigError, InvalidSpec, Unsupported

T = TypeVar("T")


class Problems:
    """Tries one thing after the other and keeps what is wrong with the input."""

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def trying(self, make: Callable[[], T]) -> T | None:
        """What `make` gives; None if the input for it has to change."""
        try:
            return make()
        except ConfigError as exc:
            self._errors.append(exc)
            return None

    def raise_any(self, what: str) -> None:
        """Raise the only error as it is, or all of them as one about `what`."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            lines = [line for error in self._errors for line in _lines(error)]
            hints = dict.fromkeys(error.hint for error in self._errors if error.hint)
            raise InvalidSpec(what, lines, hint="; ".join(hints) or None) from self._errors[0]


def _lines(error: ConfigError) -> list[str]:
    return list(error.problems) if isinstance(error, InvalidSpec | Unsupported) else [error.message]
