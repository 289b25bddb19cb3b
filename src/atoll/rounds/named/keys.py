"""The object names of exchanges by name: `allreduce/SPACE/WORLD/…`, apart from everything a run has.

Names come from callers, so they are escaped here: plain ones stay readable, any other becomes a readable beginning and
a digest of the whole. The true name stands in the header of every part and is checked there.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from atoll.errors import BadKey, InvalidSpec
from atoll.keys import number

_PLAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\Z")  # lower case: some file systems do not tell A from a
_SEAT = re.compile(r"(\d{6,})\.(?:(\d{5,})\.(json|left)|floor)\Z")
_PART = re.compile(r"(\d{6,})-[0-9a-f]{32}/[^/]+/\d{10,}\.(\d{5,})\Z")
_LONGEST = 1024


@dataclass(frozen=True)
class NamedKeys:
    """The names of one space: what ranks with the same store, space and world size share, and nobody else."""

    space: str | None
    world_size: int

    @property
    def space_prefix(self) -> str:
        return f"allreduce/{'_' if self.space is None else key_part(self.space)}/"

    @property
    def prefix(self) -> str:
        return f"{self.space_prefix}{number(self.world_size, 5)}/"

    def seats_prefix(self) -> str:
        return f"{self.prefix}seats/"

    def seat(self, session: int, rank: int) -> str:
        """One process takes part in this session as this rank; created once."""
        return f"{self.seats_prefix()}{number(session, 6)}.{number(rank, 5)}.json"

    def goodbye(self, session: int, rank: int) -> str:
        """That process needs nothing of the session any more."""
        return f"{self.seats_prefix()}{number(session, 6)}.{number(rank, 5)}.left"

    def floor(self, session: int) -> str:
        """Every earlier session is over and deleted."""
        return f"{self.seats_prefix()}{number(session, 6)}.floor"

    def parse_seat(self, key: str) -> tuple[int, int | None, bool]:
        """(session, rank, has it left) from the name of a seat or a goodbye; a floor has no rank."""
        found = _SEAT.match(key.removeprefix(self.seats_prefix())) if key.startswith(self.seats_prefix()) else None
        if found is None:
            raise BadKey(key, "not a seat")
        return int(found[1]), None if found[2] is None else int(found[2]), found[3] == "left"

    def parts_prefix(self) -> str:
        return f"{self.prefix}parts/"

    def session_prefix(self, session: int, nonce: str) -> str:
        return f"{self.parts_prefix()}{number(session, 6)}-{nonce}/"

    def generation_prefix(self, session: int, nonce: str, name: str, generation: int) -> str:
        return f"{self.session_prefix(session, nonce)}{key_part(name)}/{number(generation, 10)}."

    def part(self, session: int, nonce: str, name: str, generation: int, rank: int) -> str:
        """What a rank contributes to one exchange; created once."""
        return f"{self.generation_prefix(session, nonce, name, generation)}{number(rank, 5)}"

    def parse_part(self, key: str) -> tuple[int, int]:
        """(session, rank) from the name of a part."""
        found = _PART.match(key.removeprefix(self.parts_prefix())) if key.startswith(self.parts_prefix()) else None
        if found is None:
            raise BadKey(key, "not a part of an exchange")
        return int(found[1]), int(found[2])


def key_part(text: str) -> str:
    """A name as one part of a key; two names never give the same."""
    if _PLAIN.match(text):
        return text
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()[:48]).strip("-")
    return f"%{readable}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def check_name(what: str, text: object) -> str:
    """The text, if it can name something: 1 to 1024 characters of valid unicode, whatever they are."""
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST or any("\ud800" <= c <= "\udfff" for c in text):
        raise InvalidSpec(what, [f"{text!r}: a text of 1 to {_LONGEST} characters"])
    return text
