"""Parses the lines of an ignore file and matches paths byte for byte as git does. Pure.

`docs/decisions/0007-ignore-patterns.md` compares git, `pathspec` and this module. The tests compare it with git.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_SPECIAL = re.compile(rb"[*?\[\\]")
_ASCII = [chr(code) for code in range(128)]
_CLASSES = {
    b"alnum": {c for c in _ASCII if c.isalnum()},
    b"alpha": {c for c in _ASCII if c.isalpha()},
    b"blank": {" ", "\t"},
    b"cntrl": {c for c in _ASCII if not c.isprintable()},
    b"digit": {c for c in _ASCII if c.isdigit()},
    b"graph": {c for c in _ASCII if c.isprintable() and c != " "},
    b"lower": {c for c in _ASCII if c.islower()},
    b"print": {c for c in _ASCII if c.isprintable()},
    b"punct": {c for c in _ASCII if c.isprintable() and c != " " and not c.isalnum()},
    b"space": {" ", "\t", "\n", "\r"},
    b"upper": {c for c in _ASCII if c.isupper()},
    b"xdigit": set("0123456789abcdefABCDEF"),
}


class _NeverMatches(Exception):
    """The pattern is malformed; git keeps it and never matches anything with it."""


@dataclass(frozen=True)
class Pattern:
    """One line. The last pattern that matches a path decides about it."""

    takes_back: bool
    """The line began with `!`: what it matches is not ignored."""
    folders_only: bool
    by_name: bool
    """`matches` wants the last part of the path; otherwise the path below the folder of the ignore file."""
    matches: Callable[[bytes], object]


def parse(text: bytes) -> list[Pattern]:
    """The patterns of an ignore file, in order; lines that can match nothing are left out."""
    patterns = []
    for line in text.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if line.startswith(b"#"):
            continue
        line = _without_trailing_spaces(line.removesuffix(b"\r").partition(b"\0")[0])
        try:
            patterns.append(_pattern(line))
        except _NeverMatches:
            continue
    return patterns


def _without_trailing_spaces(line: bytes) -> bytes:
    at = keep = 0
    while at < len(line):
        width = 2 if line[at : at + 1] == b"\\" else 1
        if line[at : at + 1] != b" ":
            keep = at + width
        at += width
    return line[:keep]


def _pattern(line: bytes) -> Pattern:
    body = line.removeprefix(b"!")
    path = body.removesuffix(b"/")
    glob = path.removeprefix(b"/")
    if not glob:
        raise _NeverMatches
    by_name = b"/" not in path
    return Pattern(line.startswith(b"!"), body.endswith(b"/"), by_name, _matcher(glob, by_name))


def _matcher(glob: bytes, by_name: bool) -> Callable[[bytes], object]:
    special = _SPECIAL.search(glob)
    if special is None:
        return lambda path: path == glob
    if by_name and glob.startswith(b"*") and not _SPECIAL.search(glob, 1):
        tail = glob[1:]
        return lambda name: name.endswith(tail)
    # git compares the plain beginning first and globs only the rest, so `**` right after it counts as leading
    plain, rest = glob[: special.start()], glob[special.start() :]
    return re.compile(re.escape(plain) + _regex(rest), re.DOTALL).fullmatch


def _regex(glob: bytes) -> bytes:
    out, at = [], 0
    while at < len(glob):
        char = glob[at : at + 1]
        if char == b"*":
            piece, at = _stars(glob, at)
        elif char == b"[":
            piece, at = _bracket(glob, at + 1)
        elif char == b"?":
            piece, at = b"[^/]", at + 1
        else:
            at += char == b"\\"
            if at == len(glob):
                raise _NeverMatches
            piece, at = re.escape(glob[at : at + 1]), at + 1
        out.append(piece)
    return b"".join(out)


def _stars(glob: bytes, start: int) -> tuple[bytes, int]:
    end = start
    while glob[end : end + 1] == b"*":
        end += 1
    after = glob[end : end + 2]
    starts_part = start == 0 or glob[start - 1 : start] == b"/"
    ends_part = after[:1] in (b"", b"/") or after == b"\\/"
    if end - start < 2 or not (starts_part and ends_part):
        return b"[^/]*", end
    return (rb"(?:.*/)?", end + 1) if after[:1] == b"/" else (b".*", end)


def _bracket(glob: bytes, at: int) -> tuple[bytes, int]:
    """The regex for the set that starts at `at`, and where it ends."""
    is_negated = glob[at : at + 1] in (b"!", b"^")
    at += is_negated
    members: set[int] = set()
    previous: int | None = None
    first = at
    while (char := glob[at : at + 1]) != b"]" or at == first:
        if char == b"\\":
            at += 1
        elif char == b"-" and previous is not None and glob[at + 1 : at + 2] not in (b"", b"]"):
            at += 2 if glob[at + 1 : at + 2] == b"\\" else 1
            members.update(range(previous, _byte(glob, at) + 1))
            previous, at = None, at + 1
            continue
        elif glob[at : at + 2] == b"[:" and (named := _named_class(glob, at + 2)) is not None:
            members |= named
            previous, at = None, glob.index(b"]", at) + 1
            continue
        previous = _byte(glob, at)
        members.add(previous)
        at += 1
    allowed = (set(range(256)) - members if is_negated else members) - {ord("/")}
    listed = b"".join(rb"\x%02x" % code for code in sorted(allowed))
    return (b"[" + listed + b"]" if listed else b"(?!)"), at + 1


def _byte(glob: bytes, at: int) -> int:
    if at >= len(glob):
        raise _NeverMatches
    return glob[at]


def _named_class(glob: bytes, at: int) -> set[int] | None:
    """The members of `[:name:]`, or None when this is a plain `[` followed by `:`."""
    name, close, _ = glob[at:].partition(b"]")
    if not close:
        raise _NeverMatches
    if not name.endswith(b":"):
        return None
    if (members := _CLASSES.get(name[:-1])) is None:
        raise _NeverMatches
    return {ord(c) for c in members}
