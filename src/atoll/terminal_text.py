"""Lines that replicas print, as a terminal would show them: colours, cursor movements, progress bars. Pure.

Logs keep the bytes that a replica wrote. Views, tables and JSON show lines that went through this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_CSI = r"(?:\x1b\[|\x9b)"
_RETURN = re.compile(rf"{_CSI}[01]?G")
"""Moves the cursor to the first column, like a carriage return."""
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_ESCAPE = re.compile(
    rf"{_CSI}[0-?]*[ -/]*(?:[@-~]|\Z)"  # colours, cursor movements, erasing
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|\Z)?"  # titles, links, other strings
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if code != 0x09}
_RESET = "\x1b[0m"


def without_escapes(text: str) -> str:
    """The text without escape sequences; other control characters stay."""
    return _ESCAPE.sub("", text)


def shown_line(line: str, *, colour: bool = False) -> str:
    """What a terminal shows of one line in the end: of a progress bar, only its last state.

    No control character but the tab is left; with `colour`, colours are kept and end with the line.
    """
    if line.isprintable():
        return line
    segments = _RETURN.sub("\r", line).split("\r")
    last = next((i for i in reversed(range(len(segments))) if _plain(segments[i]).strip()), 0)
    if not colour:
        return _plain(segments[last])
    earlier = "".join(_COLOUR.findall("\r".join(segments[:last])))
    kept = earlier + "".join(_with_colours(segments[last]))
    codes = _COLOUR.findall(kept)
    return kept + _RESET if codes and codes[-1] not in (_RESET, "\x1b[m") else kept


def shown_text(text: str) -> str:
    """Several lines, each as `shown_line` returns it, without colours."""
    return text if text.isprintable() else "\n".join(map(shown_line, text.split("\n")))


def _plain(segment: str) -> str:
    return _erased(without_escapes(segment)).translate(_CONTROLS)


def _with_colours(segment: str) -> Iterator[str]:
    position = 0
    for found in _ESCAPE.finditer(segment):
        yield _erased(segment[position : found.start()]).translate(_CONTROLS)
        if _COLOUR.fullmatch(found[0]):
            yield found[0]
        position = found.end()
    yield _erased(segment[position:]).translate(_CONTROLS)


def _erased(text: str) -> str:
    """The text without the characters that backspaces go back over."""
    if "\b" not in text:
        return text
    left: list[str] = []
    for character in text:
        if character != "\b":
            left.append(character)
        elif left:
            left.pop()
    return "".join(left)
